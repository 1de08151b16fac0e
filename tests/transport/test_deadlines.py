"""Every backend keeps the same deadlines: to connect, for the first byte, in a body, for a whole object."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import fsspec
import pytest
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cachestream.errors import SampleError, SourceUnavailableError
from cachestream.listing.pages import Walk
from cachestream.transport import driver
from cachestream.transport.driver import Caller, LateCallsError
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors
from cachestream.transport.remote_object import fetch, open_stream
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server
from tests.support.unruly import UnrulyServer, full_backlog

SHORT: Final = {
    "CONNECT_S": 0.4,
    "FIRST_BYTE_S": 0.6,
    "STALL_S": 0.6,
    "CALL_S": 1.0,
    "PIECE_S": 1.5,
    "CALL_MIB_S": 0.4,
    "RESUMES": 1,
    "ATTEMPTS": 2,
}
BOUND_S: Final = 60.0  # without a deadline the read never ends


class Plain(HTTPFileSystem):  # type: ignore[misc]
    """An asynchronous driver with nothing but the interface of fsspec."""

    protocol = "plain"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.replace("plain://", "http://")


fsspec.register_implementation("plain", Plain, clobber=True)


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch, short_waits: None) -> None:
    """Shorten the deadlines in every module of the transport that uses them."""
    for name, module in list(sys.modules.items()):
        for constant, short_s in SHORT.items():
            if name.startswith("cachestream.transport.") and hasattr(module, constant):
                monkeypatch.setattr(module, constant, short_s)


def read_whole(remote: Remote, path: str) -> bytes:
    with map_errors("there", one_of_many=True):
        return bytes(fetch(remote, path))


def read_stream(remote: Remote, path: str) -> bytes:
    with open_stream(remote, path, "there") as stream:
        return bytes(stream.read_whole())


READERS: Final[dict[str, Callable[[Remote, str], bytes]]] = {"whole": read_whole, "stream": read_stream}
BACKENDS: Final = ("http", "plain", "webhdfs")
# A stream and a whole object keep the same deadlines by the same code, but for what a backend does of itself.
READ_BY: Final = [
    pytest.param(reader, backend, marks=() if reader == "whole" or backend == "http" else pytest.mark.slow)
    for reader in READERS
    for backend in BACKENDS
]


def remote_of(backend: str, port: int, kind: str) -> tuple[Remote, str]:
    """Return the Remote that reads the file of a `kind` through a backend, and the path of the file."""
    remote = Remote(f"{backend}://127.0.0.1:{port}/{kind}/a.bin")
    return remote, f"/{kind}/a.bin" if backend == "webhdfs" else f"http://127.0.0.1:{port}/{kind}/a.bin"


@pytest.mark.e2e
@pytest.mark.usefixtures("deadlines")
@pytest.mark.parametrize("fault", ["connect", "silent", "stalled", "dripping"])
@pytest.mark.parametrize(("reader", "backend"), READ_BY)
def test_a_server_that_keeps_one_waiting_is_given_up(
    unruly_server: UnrulyServer, backend: str, fault: str, reader: str
) -> None:
    with full_backlog() as unreachable:
        remote, path = remote_of(backend, unreachable if fault == "connect" else unruly_server.port, fault)
        begun_s = time.monotonic()
        with pytest.raises(SourceUnavailableError):
            READERS[reader](remote, path)
        assert time.monotonic() - begun_s < BOUND_S
    unruly_server.hang_up()  # ends the calls that were left behind


@pytest.mark.e2e
@pytest.mark.usefixtures("deadlines")
@pytest.mark.parametrize(("reader", "backend"), READ_BY)
def test_a_server_that_was_given_up_is_read_when_it_answers(
    unruly_server: UnrulyServer, backend: str, reader: str
) -> None:
    remote, path = remote_of(backend, unruly_server.port, "silent")
    with pytest.raises(SourceUnavailableError):
        READERS[reader](remote, path)
    remote, path = remote_of(backend, unruly_server.port, "good")
    assert len(READERS[reader](remote, path)) > 0


@pytest.mark.e2e
@pytest.mark.usefixtures("deadlines")
@pytest.mark.parametrize(
    ("reader", "fault"),
    [
        *(("whole", fault) for fault in ("connect", "silent", "stalled", "dripping")),
        ("stream", "stalled"),
        *(
            pytest.param("stream", fault, marks=pytest.mark.slow)
            for fault in ("connect", "silent", "dripping")
        ),
    ],
)
def test_an_s3_that_keeps_one_waiting_is_given_up(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, fault: str, reader: str
) -> None:
    (s3_bucket / "a.bin").write_bytes(bytes(8 << 20))
    with full_backlog() as unreachable:
        options = s3_server.options_through(unreachable if fault == "connect" else s3_proxy.port)
        remote = Remote(f"s3://{s3_bucket.name}/a.bin", options)
        if fault == "silent":
            s3_proxy.hang()
        elif fault == "stalled":
            s3_proxy.bytes_allowed = 1 << 20
        elif fault == "dripping":
            s3_proxy.bytes_per_s = 40_000
        begun_s = time.monotonic()
        with pytest.raises(SourceUnavailableError):
            READERS[reader](remote, f"{s3_bucket.name}/a.bin")
        assert time.monotonic() - begun_s < BOUND_S
    s3_proxy.heal()


@pytest.mark.e2e
@pytest.mark.usefixtures("deadlines")
def test_an_ftp_server_that_accepts_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        remote = Remote(f"ftp://127.0.0.1:{listener.getsockname()[1]}/a.bin")
        begun_s = time.monotonic()
        with pytest.raises(SourceUnavailableError):
            read_whole(remote, "/a.bin")
        assert time.monotonic() - begun_s < BOUND_S


@pytest.mark.e2e
def test_deadlines_of_the_user_win(unruly_server: UnrulyServer) -> None:
    aiohttp: Any = pytest.importorskip("aiohttp")
    patient = {"timeout": aiohttp.ClientTimeout(total=0.5)}
    remote = Remote(f"{unruly_server.url}/silent/a.bin", {"client_kwargs": patient})
    begun_s = time.monotonic()
    with pytest.raises(SourceUnavailableError):
        read_whole(remote, f"{unruly_server.url}/silent/a.bin")
    assert time.monotonic() - begun_s < 10.0


def test_a_named_pipe_and_a_file_that_shrinks_keep_nobody_waiting(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for reader in READERS.values():
        with pytest.raises(SampleError, match="not a regular file"):
            reader(Remote(str(tmp_path)), str(tmp_path / "pipe"))


class Paging(MemoryFileSystem):  # type: ignore[misc]
    """A driver that takes its time for all the pages of a folder, or for anything else."""

    protocol = "paging"

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        time.sleep(0.2)
        return [{"name": f"{path}/a.txt", "type": "file", "size": 1}]

    def info(self, path: str, **_: Any) -> Any:
        time.sleep(0.2)
        return {"name": path, "type": "file", "size": 1}


def test_a_folder_of_many_pages_has_more_time_than_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("paging", Paging, clobber=True)
    monkeypatch.setattr("cachestream.transport.remote.PAGE_TIMEOUT_S", 0.02)
    monkeypatch.setattr("cachestream.transport.remote_errors.ATTEMPTS", 1)
    remote = Remote("paging://set")
    assert list(Walk(remote, "/set/").all()) == ["a.txt"]
    with pytest.raises(TimeoutError):
        remote.ask("info", "/set/a.txt")


def test_a_caller_whose_call_is_late_is_left_behind_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MOST_LATE", 1)
    before, gate = threading.active_count(), threading.Event()
    caller = Caller()
    assert caller.submit(lambda: 1).result(5.0) == 1
    caller.submit(gate.wait)
    caller.abandon()
    late = "1 calls of drivers in process .* have not returned; .* restart the process"
    with pytest.raises(LateCallsError, match=late), map_errors("there", one_of_many=True):
        Caller()
    forked = os.fork()  # a fork has none of these threads
    if not forked:
        Caller()
        os._exit(0)
    assert os.waitpid(forked, 0) == (forked, 0)
    del caller
    gate.set()
    deadline_s = time.monotonic() + 30.0
    while threading.active_count() > before and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    assert threading.active_count() == before
    assert Caller().submit(lambda: 1).result(5.0) == 1
