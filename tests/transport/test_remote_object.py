"""One loop reads every kind of remote: what it asks for, resumes, closes and raises."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import fsspec
import numpy as np
import pytest
from fsspec.asyn import AsyncFileSystem

from cachestream.errors import SampleError
from cachestream.transport import metering
from cachestream.transport.backends import Version
from cachestream.transport.file_objects import open_file
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import ChangedError, classify
from cachestream.transport.remote_object import RemoteObject, fetch, open_stream
from tests.support.s3 import S3Server
from tests.support.unruly import UnrulyServer

TIMEOUT_S: Final = 60.0
DATA: Final = np.random.default_rng(0).bytes(9 << 20)


class Files(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A blocking driver with one file, whose reads at or after the byte `breaks_at` raise `error` once."""

    protocol = "files"
    cachable = False
    data = DATA
    breaks_at: int | None = None
    error: type[Exception] = ConnectionError
    opened: Final[list[int]] = []
    closed: Final[list[int]] = []
    is_closed: Final = threading.Event()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(self.data), "mtime": hash(self.data)}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        options["cache_type"] = "none"
        file = _File(self, path, mode, **options)
        self.opened.append(threading.get_ident())
        return file


class _File(fsspec.spec.AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        if Files.breaks_at is not None and start >= Files.breaks_at:
            Files.breaks_at = None
            raise Files.error("broken")
        return bytes(Files.data[start:end])

    def close(self) -> None:
        if not self.closed:
            Files.closed.append(threading.get_ident())
            Files.is_closed.set()
        super().close()


fsspec.register_implementation("files", Files, clobber=True)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, short_waits: None) -> Callable[[], Remote]:
    """Return a function that returns a Remote of `Files`; the test's reference to it is the only one."""
    Files.opened.clear()
    Files.closed.clear()
    Files.is_closed.clear()
    for name in ("breaks_at", "error", "data"):
        monkeypatch.setattr(Files, name, getattr(Files, name))
    return open_files


def open_files() -> Remote:
    return Remote("files://a.bin")


# --- a driver that blocks


@pytest.mark.e2e
def test_a_file_of_a_blocking_driver_is_resumed_where_it_broke(
    files: Callable[[], Remote], fetched: list[int]
) -> None:
    remote = files()
    Files.breaks_at = 1 << 20
    assert fetch(remote, "a.bin") == DATA
    assert sum(fetched) == len(DATA)
    assert len(Files.opened) == 2
    Files.breaks_at = 1 << 20
    with open_stream(remote, "a.bin", "there", 5) as stream:
        assert stream.read_whole() == DATA[5:]


@pytest.mark.e2e
def test_a_file_that_was_replaced_before_it_is_resumed_is_read_anew(files: Callable[[], Remote]) -> None:
    remote, other = files(), DATA[::-1]

    def replace(nbytes: int) -> None:
        if nbytes and Files.data is DATA:
            Files.breaks_at, Files.data = 0, other

    metering.install(replace)
    try:
        assert fetch(remote, "a.bin") == other
        Files.data = DATA
        file = RemoteObject(remote, "a.bin", "there")
        with pytest.raises(ChangedError):
            file.read(0, len(DATA))
    finally:
        metering.install(None)


def test_spans_of_a_blocking_driver_cost_one_open_file(
    files: Callable[[], Remote], fetched: list[int]
) -> None:
    remote = files()
    spans = [(2_000_000, 2_000_100), (10, 20), (1_000_000, 1_000_500)]
    found = RemoteObject(remote, "a.bin", "there").read_spans(spans)
    assert [bytes(one) for one in found] == [DATA[start:stop] for start, stop in spans]
    assert len(Files.opened) == 1
    assert sum(fetched) == 610


def test_a_file_whose_driver_is_given_up_is_closed_by_the_thread_that_opened_it(
    files: Callable[[], Remote],
) -> None:
    Files.breaks_at, Files.error = 0, ValueError
    remote = files()
    driver = remote.driver()
    with pytest.raises(ValueError, match="broken"):
        fetch(remote, "a.bin")
    assert Files.is_closed.wait(TIMEOUT_S)
    assert Files.closed == Files.opened
    assert remote.driver() is not driver


# --- an asynchronous driver that tells no version in its answers


class Slices(AsyncFileSystem):  # type: ignore[misc]
    """Such a driver, with one file of `DATA`."""

    protocol = "slices"
    cachable = False
    tells_size = True

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(DATA) if self.tells_size else None}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return DATA[start:end]


fsspec.register_implementation("slices", Slices, clobber=True)


@pytest.mark.parametrize("tells_size", [True, False])
def test_the_end_of_a_file_is_its_end_whether_its_size_is_known_or_not(
    monkeypatch: pytest.MonkeyPatch, tells_size: bool
) -> None:
    """The index of a shard of Zarr is asked for in this way."""
    monkeypatch.setattr(Slices, "tells_size", tells_size)
    file = RemoteObject(Remote("slices://a.bin"), "a.bin", "there")
    for _ in range(2):
        assert bytes(asyncio.run(file.read_on_loop(-1000))) == DATA[-1000:]
    file.version = Version()
    assert bytes(asyncio.run(file.read_on_loop(-2 * len(DATA)))) == DATA


def test_a_file_object_is_read_to_its_end_in_one_call() -> None:
    with open_file(Remote("slices://a.bin"), "a.bin", "there") as file:
        assert file.read(5) == DATA[:5]
        assert file.read() == DATA[5:]


# --- what is asked for, and what is raised


@pytest.mark.e2e
def test_every_request_for_a_part_is_announced_before_it_is_made(unruly_server: UnrulyServer) -> None:
    events: list[tuple[str, int]] = []
    metering.install(lambda n: events.append(("came", n)), lambda n: events.append(("asked", n)))
    url = f"{unruly_server.url}/good/part.bin"
    try:
        for read in (RemoteObject.head, RemoteObject.tail):
            events.clear()
            assert bytes(read(RemoteObject(Remote(url), url, "there"), 5)) in (b"good/", b"t.bin")
            assert events[0][0] == "asked"
            assert ("came", 5) in events
    finally:
        metering.install(None)


@pytest.mark.e2e
def test_a_whole_file_that_is_missing_raises_the_error_of_the_driver_on_every_remote(
    unruly_server: UnrulyServer, s3_server: S3Server, s3_bucket: Any
) -> None:
    url = f"{unruly_server.url}/missing/a.bin"
    remotes = {
        url: Remote(url),
        f"{s3_bucket.name}/a.bin": Remote(f"s3://{s3_bucket.name}", s3_server.storage_options),
    }
    for path, remote in remotes.items():
        with pytest.raises(FileNotFoundError) as caught:
            fetch(remote, path)
        assert classify(caught.value) == "missing"


def test_a_server_that_does_not_tell_the_size_serves_whole_files_but_no_parts(
    unruly_server: UnrulyServer,
) -> None:
    url = f"{unruly_server.url}/endless/a.bin"
    file = RemoteObject(Remote(url), url, "there")
    with pytest.raises(SampleError, match="there: the server does not tell its size"):
        file.look()


def test_the_memory_of_a_file_is_freed_with_its_last_reference(unruly_server: UnrulyServer) -> None:
    """Large buffers that wait for the garbage collector would add up."""
    url = f"{unruly_server.url}/good/memory.bin"
    freed = threading.Event()
    gc.disable()
    try:
        data = fetch(Remote(url), url)
        weakref.finalize(data.obj, freed.set)
        del data
        assert freed.wait(TIMEOUT_S)
    finally:
        gc.enable()


def test_the_mean_size_of_objects_counts_those_read_on_a_loop() -> None:
    remote = Remote("slices://a.bin")
    before = remote.likely_bytes()
    file = RemoteObject(remote, "a.bin", "there")
    asyncio.run(file.read_on_loop(0, 100))
    assert remote.likely_bytes() == before
    asyncio.run(file.read_on_loop())
    assert remote.likely_bytes() == len(DATA) != before
