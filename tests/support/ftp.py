"""A real FTP server: `rclone serve ftp` over a folder, behind a gate that holds listings back or hangs up."""

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

__all__ = ["FTPServer", "run_ftp_server"]

USER: Final = "CANARYUSER"
PASSWORD: Final = "CANARYPASSWORD"
READY_TIMEOUT_S: Final = 60.0
ATTEMPTS: Final = 5


@dataclass(slots=True)
class FTPServer:
    """A running server over `root`, reached through the gate on `port`.

    `lists` counts folders that were asked for; `lists_allowed`: so many more are passed on, the rest wait until it is
    raised (None: all are); `hang_up_after`: the connection is closed instead of passing on the one after so many more.
    """

    root: Path
    port: int
    lists: int = 0
    lists_allowed: int | None = None
    hang_up_after: int | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def options(self) -> dict[str, Any]:
        """What fsspec's driver needs."""
        return {"username": USER, "password": PASSWORD, "port": self.port}

    def allow(self, lists: int | None) -> None:
        """Pass on so many more listings; None: all."""
        with self.changed:
            self.lists_allowed = lists
            self.changed.notify_all()

    def passes(self) -> bool:
        """Wait until a listing may be passed on; False: hang up instead."""
        with self.changed:
            self.lists += 1
            if self.hang_up_after is not None:
                self.hang_up_after -= 1
                if self.hang_up_after < 0:
                    self.hang_up_after = None
                    return False
            self.changed.wait_for(lambda: self.lists_allowed != 0)
            if self.lists_allowed is not None:
                self.lists_allowed -= 1
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


def _start(root: Path) -> tuple[subprocess.Popen[bytes], int]:
    for _ in range(ATTEMPTS):  # it cannot choose a free port itself, and somebody else may take it meanwhile
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [rclone(), "serve", "ftp", str(root), "--addr", f"127.0.0.1:{port}"]
        command += ["--user", USER, "--pass", PASSWORD, "--config", "", "--dir-cache-time", "0s"]
        command += ["--poll-interval", "0", "--log-level", "ERROR"]
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
    raise RuntimeError("rclone serve ftp did not start")


def _accept(gate: socket.socket, port: int, server: FTPServer) -> None:
    while True:
        try:
            client, _ = gate.accept()
            remote = socket.create_connection(("127.0.0.1", port))
        except OSError:
            return
        for work in (_commands, _answers):
            threading.Thread(target=work, args=(client, remote, server), name="ftp-gate", daemon=True).start()


def _commands(client: socket.socket, remote: socket.socket, server: FTPServer) -> None:
    with contextlib.suppress(OSError), client.makefile("rb") as lines:
        for line in lines:
            if line[:4].upper() in (b"MLSD", b"LIST") and not server.passes():
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
