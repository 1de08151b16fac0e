"""Where the data of a benchmark lie: on this disk, on a real S3 server (rclone) beside it, or on that one far away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import scratch
from tests.support.proxy import run_proxy
from tests.support.s3 import S3Server, run_s3_server

__all__ = ["Places", "open_places"]


class Places:
    """One folder of data, as a path and as a bucket; `scratch` is a folder for the rest."""

    def __init__(self, stack: ExitStack, scratch: Path, server: S3Server) -> None:
        self.scratch = scratch
        self.data = server.bucket("data")
        self._stack = stack
        self._server = server

    def at(self, latency_s: float | None) -> tuple[str, dict[str, Any]]:
        """The URL of the data and its storage options: the path (None), or the bucket, behind a latency if above 0."""
        if latency_s is None:
            return str(self.data), {}
        if not latency_s:
            return "s3://data", self._server.storage_options
        proxy = self._stack.enter_context(run_proxy(self._server.port, latency_s=latency_s))
        return "s3://data", self._server.options_through(proxy.port)


@contextmanager
def open_places() -> Iterator[Places]:
    """An empty folder that the server shows, until the end."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        server = stack.enter_context(run_s3_server(folder / "s3", fresh=False))
        yield Places(stack, folder, server)
