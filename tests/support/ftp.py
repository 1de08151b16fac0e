"""Real FTP and SFTP servers: `rclone serve` over a folder, FTP behind a gate that holds listings back or hangs up."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.s3 import rclone

__all__ = ["FTPServer", "run_ftp_server", "run_sftp_server"]

USER: Final = "CANARYUSER"
PASSWORD: Final = "CANARYPASSWORD"
READY_TIMEOUT_S: Final = 60.0
ATTEMPTS: Final = 5


@dataclass(slots=True)
class FTPServer:
    """A running server over `root`, reached through the gate on `port`.

    `asked` are the folders that were to be listed, each time. Of those that were not before, so many more are passed on
    as `allowed`, the others wait until it is raised (None: all are); a reader's look at a folder that is known is not
    held back. `hang_up_after`: the connection is closed instead of passing on the one after so many more; `hang_ups` so far.
    """

    root: Path
    port: int
    asked: list[str] = field(default_factory=list)
    allowed: int | None = None
    hang_up_after: int | None = None
    hang_ups: int = 0
    known: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def options(self) -> dict[str, Any]:
        """Storage options for fsspec's driver."""
        return {"username": USER, "password": PASSWORD, "port": self.port}

    def allow(self, folders: int | None) -> None:
        """Pass on so many more folders; None: all."""
        with self.changed:
            self.allowed = folders
            self.changed.notify_all()

    def passes(self, folder: str) -> bool:
        """Wait until `folder` may be listed; False: hang up instead."""
        with self.changed:
            self.asked.append(folder)
            if self.hang_up_after is not None:
                self.hang_up_after -= 1
                if self.hang_up_after < 0:
                    self.hang_up_after, self.hang_ups = None, self.hang_ups + 1
                    return False
            self.changed.wait_for(lambda: folder in self.known or self.allowed != 0)
            if self.allowed is not None and folder not in self.known:
                self.allowed -= 1
            self.known.add(folder)
            return True


@contextlib.contextmanager
def run_ftp_server(root: Path) -> Iterator[FTPServer]:
    """Serve `root` until the end of the block."""
    process, port = _start(root)
    gate = socket.create_server(("127.0.0.1", 0))
    server = FTPServer(root, gate.getsockname()[1])
    threading.Thread(target=_accept, args=(gate, port, server), name="ftp-gate", daemon=True).start()
    try:
        yield server
    finally:
        gate.shutdown(socket.SHUT_RDWR)
        gate.close()
        server.allow(None)
        process.kill()
        process.wait()


@contextlib.contextmanager
def run_sftp_server(root: Path) -> Iterator[dict[str, Any]]:
    """Serve `root` by SFTP until the end of the block; yields storage options for fsspec's driver."""
    process, port = _start(root, "sftp", "--cache-dir", f"{root}-keys")  # the host's keys
    try:
        yield {"username": USER, "password": PASSWORD, "port": port}
    finally:
        process.kill()
        process.wait()


def _start(root: Path, kind: str = "ftp", *options: str) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(ATTEMPTS):  # it cannot choose a free port itself, and somebody else may take it meanwhile
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [rclone(), "serve", kind, str(root), "--addr", f"127.0.0.1:{port}"]
        command += ["--user", USER, "--pass", PASSWORD, "--config", "", "--dir-cache-time", "0s"]
        command += ["--poll-interval", "0", "--log-level", "ERROR", *options]
        if setpriv := shutil.which("setpriv"):  # the server goes also when the tests are killed
            command = [setpriv, "--pdeathsig", "KILL", *command]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        pause = threading.Event()
        while process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
                return process, port
            pause.wait(0.02)
        process.kill()
        process.wait()
    raise RuntimeError(f"rclone serve {kind} did not start")


def _accept(gate: socket.socket, port: int, server: FTPServer) -> None:
    while True:
        try:
            client, _ = gate.accept()
        except OSError:
            return
        try:
            remote = socket.create_connection(("127.0.0.1", port))
        except OSError:
            client.close()
            continue
        for connection in (client, remote):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or each command takes 40 ms
        for work in (_commands, _answers):
            threading.Thread(target=work, args=(client, remote, server), name="ftp-gate", daemon=True).start()


def _commands(client: socket.socket, remote: socket.socket, server: FTPServer) -> None:
    with contextlib.suppress(OSError), client.makefile("rb") as lines:
        for line in lines:
            command, _, path = line.rstrip().partition(b" ")
            if command.upper() in (b"MLSD", b"LIST") and not server.passes(path.decode()):
                break
            remote.sendall(line)
    _close(client, remote)


def _answers(client: socket.socket, remote: socket.socket, _server: FTPServer) -> None:
    with contextlib.suppress(OSError):
        while data := remote.recv(65_536):
            client.sendall(data)
    _close(client, remote)


def _close(*connections: socket.socket) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
