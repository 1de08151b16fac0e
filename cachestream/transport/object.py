"""One remote file: whole, in parts, as a stream, or as a file object. A read is of one version of the file.

| | |
|-|-|
| whole | one request; on S3 and drivers without streams, from some size on, parts follow, several at once |
| parts | near ones share a request, large ones take several, `PARALLEL` at once |
| stream | one request, read ahead by a piece |
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Final, TypeVar

import numpy as np

from cachestream.errors import SampleError
from cachestream.transport import bounds, metering
from cachestream.transport.backends import LocalFile, LocalStream, Span, Version, backend_of, fetch_local
from cachestream.transport.download import PART_BYTES, RESUMES, Download
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.remote import PIECE_S, Remote, result_of, run_blocking
from cachestream.transport.remote_errors import backoff_delays, classify, judge, map_errors, redact
from cachestream.transport.stream import Stream, join

T = TypeVar("T")

STREAM_BYTES: Final = 32 << 20  # a whole object is one stream up to here; the rest comes in parts
PARALLEL: Final = 4
GAP_BYTES: Final = 64 << 10  # about as many as arrive in the time that one more request takes
ENOUGH_S: Final = 0.1  # an incomplete piece is handed over after this time
# The size of the first request beyond `likely_stop`; each next one asks for as much as came beyond it before.
BEYOND_BYTES: Final = 32 << 10
ATTEMPTS: Final = 4  # to look at a file
BLOCK_BYTES: Final = 64 << 10  # fetched in one request, and kept
MAX_BLOCKS: Final = 256


class RemoteObject:
    """The file `path`, which messages call `shown`. Thread-safe and picklable.

    `version` is what is known of the version that is read; when it is set to `Version()`, the current version
    is read from then on. Raises the driver's errors (see `remote_errors.map_errors`), ChangedError if the
    file was replaced since the first read, and SampleError for bytes beyond its end.
    """

    def __init__(self, remote: Remote, path: str, shown: str) -> None:
        self.remote, self.path, self.shown = remote, path, shown
        self.version = Version()
        self._local = LocalFile(path, shown) if remote.is_local else None

    def check(self, now: Version) -> Version:
        """Take over what `now` tells of the version. Raises ChangedError if it is another one."""
        self.version = merged = self.version.merged(now)
        return merged

    def look(self) -> Version:
        """Return the version with its size; the remote is asked only if that is not known.

        Raises SampleError if the server does not tell the size.
        """
        if self.version.size_bytes < 0:
            self.check(self._stat() if self._local is None else self._local.stat())
        if self.version.size_bytes < 0:
            raise SampleError(
                f"{self.shown}: the server does not tell its size, which reading it in parts needs"
            )
        return self.version

    def look_again(self) -> None:
        """Raise ChangedError if the file was replaced, unless every answer tells the version."""
        if not backend_of(self.remote).tells_version:
            self.check(self._stat())

    def _stat(self) -> Version:
        backend = backend_of(self.remote)
        metering.asking(1)
        try:
            found: Version = result_of(backend.driver.submit(backend.stat, self.path), backend.deadline_s(1))
        except Exception as error:
            self.remote.note_failure(backend.driver, error)
            if classify(error) != "range":
                raise
            return Version(0)
        metering.fetched(1 if backend.streams else 0)
        return found

    # --- the beginning, the end, or all

    def head(self, nbytes: int) -> memoryview:
        """Return the first `nbytes`, or the whole file if it is shorter."""
        if self._local is None and backend_of(self.remote).tells_version:
            return run_blocking(self._read_part(0, nbytes))
        return self.read(0, min(self.look().size_bytes, nbytes))

    def tail(self, nbytes: int) -> memoryview:
        """Return the last `nbytes`, or the whole file if it is shorter."""
        if self._local is None and backend_of(self.remote).tells_version:
            return run_blocking(self._read_part(-nbytes, None))[-nbytes:]
        size = self.look().size_bytes
        return self.read(max(0, size - nbytes), size)

    async def read_on_loop(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes from `start` (negative: from the end) to `stop` (None: the end).

        Several may be awaited on the caller's event loop, which each of them blocks until its own bytes come:
        all are requested at once. Not for local files.
        """
        data = await self._read_part(start, stop, on_loop=True)
        if (start, stop) == (0, None):
            self.remote.saw_object(len(data))
        return data

    async def _read_part(self, start: int, stop: int | None, *, on_loop: bool = False) -> memoryview:
        memory = _Memory(self.remote.most_bytes, stop)
        with closing(Download(self, start, memory.room, stop)) as download:
            await _gather(download, memory, on_loop=on_loop)
        return memory.all()

    def read_all(self) -> memoryview:
        """Return all bytes, writable. Not for local files."""
        backend = backend_of(self.remote)
        stop = min(STREAM_BYTES, backend.request_bytes) if backend.takes_parts else None
        memory = _Memory(self.remote.most_bytes, None)
        step_bytes, patience_s = backend.piece_bytes, _patience_s()
        download = Download(self, 0, memory.room, stop, step_bytes=step_bytes, patience_s=patience_s)
        with closing(download):
            run_blocking(_gather(download, memory))
        data = memory.all()
        have = len(data)
        if have == stop and not download.is_at_end:
            data = memory.all_of(self.look().size_bytes)
            self._read_parts([(have, len(data))], [data[have:]], have)
            self.look_again()
        self.remote.saw_object(len(data))
        return data

    # --- parts

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` up to, not including, `stop`."""
        return self.read_spans([(start, stop)])[0]

    def read_spans(
        self, spans: Sequence[Span], outs: Sequence[memoryview] | None = None, *, sparse: bool = False
    ) -> Sequence[memoryview]:
        """Return the bytes of each span (start, stop), in `outs`, of the same sizes, if they are given.

        `sparse`: only few of the bytes will be used, and none written to; local files are mapped then.
        """
        size = self.version.size_bytes
        end = max((stop for _, stop in spans), default=0)
        if 0 <= size < end:
            raise SampleError(f"{self.shown}: truncated: {size} of at least {end} bytes")
        if self._local is not None:
            return self._local.read_spans(spans, outs, sparse, self.check)
        groups = merge_spans(spans)
        found: list[memoryview] = [memoryview(b"")] * len(spans)
        wholes = [np.empty(stop - start, np.uint8).data for (start, stop), _ in groups]
        self._read_parts([span for span, _ in groups], wholes)
        for (span, members), data in zip(groups, wholes, strict=True):
            for position in members:
                start, stop = spans[position]
                found[position] = data[start - span[0] : stop - span[0]]
                if outs is not None:
                    outs[position][:] = found[position]
        return found if outs is None else outs

    def _read_parts(self, spans: Sequence[Span], outs: Sequence[memoryview], num_bytes: int = 0) -> None:
        """Read `spans` into `outs`, in order, with `PARALLEL` requests under way.

        A part that fails after another one came, or after `num_bytes` came before, is resumed by itself.
        """
        backend = backend_of(self.remote)
        parts = deque(_split(spans, outs, min(PART_BYTES, backend.request_bytes)))
        if parts and not backend.driver.is_async:
            with closing(Download(self, 0, _room_of(*parts[0]), spans[-1][1])) as download:
                for part in parts:
                    download.seek(part[0])
                    self._fill(download, *part)
            return
        under_way: deque[tuple[Download, int, memoryview]] = deque()
        try:
            while parts or under_way:
                while parts and len(under_way) < PARALLEL:
                    start, out = parts.popleft()
                    download = Download(self, start, _room_of(start, out), start + len(out))
                    under_way.append((download, start, out))
                    download.ask()
                under_way[0][0].num_bytes += num_bytes
                self._fill(*under_way[0])
                num_bytes += len(under_way.popleft()[2])
        finally:
            for download, _, _ in under_way:
                download.close()

    def _fill(self, download: Download, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on, where `download` began."""
        download.room = _room_of(start, out)
        while download.offset < start + len(out):
            if not download.take():
                stop = start + len(out)
                raise SampleError(f"{self.shown}: ends after {download.offset} of at least {stop} bytes")

    # --- a stream

    def stream(self, start: int = 0, likely_stop: int | None = None) -> Stream:
        """Return a stream from byte `start` on; bytes beyond `likely_stop` are not fetched ahead."""
        if self._local is not None:
            return LocalStream(self.path, self.shown, start)
        return _RemoteStream(self, start, likely_stop)


class _Memory:
    """The memory for the bytes of one read: a buffer once their number is known, until then pieces."""

    def __init__(self, most_bytes: int, stop: int | None) -> None:
        self._most_bytes, self._stop = most_bytes, stop
        self._first = 0
        self._buffer: memoryview | None = None
        self._pieces: list[memoryview] = []
        self._num_bytes = 0

    def room(self, offset: int, size_bytes: int) -> memoryview:
        """Return the memory from `offset` on, of a file of this size (-1: unknown)."""
        if self._buffer is None and size_bytes >= 0 and not self._pieces:
            end = size_bytes if self._stop is None else min(self._stop, size_bytes)
            bounds.check(max(0, end - offset), self._most_bytes)
            self._first, self._buffer = offset, np.empty(max(0, end - offset), np.uint8).data
        if self._buffer is None:
            return np.empty(PIECE_BYTES, np.uint8).data
        return self._buffer[offset - self._first :]

    def add(self, piece: memoryview) -> None:
        """Add `piece`, which came into the last room."""
        self._num_bytes += len(piece)
        if self._buffer is None:
            bounds.check(self._num_bytes, self._most_bytes)
            self._pieces.append(piece)

    def all(self) -> memoryview:
        """Return the bytes that came, writable."""
        if self._buffer is None:
            return join(self._pieces, self._num_bytes)
        return self._buffer[: self._num_bytes]

    def all_of(self, size_bytes: int) -> memoryview:
        """Return memory for a whole file of this size, which begins with the bytes that came."""
        if self._buffer is None:
            bounds.check(size_bytes, self._most_bytes)
            buffer = np.empty(size_bytes, np.uint8).data
            buffer[: self._num_bytes] = self.all()
            self._buffer = buffer
        return self._buffer


async def _gather(download: Download, memory: _Memory, *, on_loop: bool = False) -> None:
    """Read all of `download` into `memory`; `on_loop`, after others had the chance to send their requests."""
    while not download.is_done:
        if on_loop:
            download.ask()
            await asyncio.sleep(0)
        if not (piece := download.take()):
            break
        memory.add(piece)


class _RemoteStream(Stream):
    """A stream of a remote file; the next piece is on its way while one is used."""

    def __init__(self, file: RemoteObject, start: int, likely_stop: int | None) -> None:
        super().__init__(file.shown, file.remote.secrets, start)
        backend = backend_of(file.remote)
        self._file = file
        self._tells_version = backend.tells_version
        self._likely_stop = likely_stop if backend.driver.is_async else None
        most = backend.piece_bytes

        def room(offset: int, size_bytes: int) -> memoryview:
            left = most if size_bytes < 0 else size_bytes - offset
            return np.empty(max(0, min(left, most)), np.uint8).data

        self._download = Download(file, start, room, step_bytes=most, patience_s=_patience_s())

    def _next_piece(self) -> memoryview:
        file, download = self._file, self._download
        had_ended = download.is_at_end
        if had_ended:
            return memoryview(b"")
        if not self._tells_version:
            file.look()
        self._set_stop()
        piece = download.take()
        if file.version.size_bytes >= 0:
            self.size_bytes = file.version.size_bytes
        if download.is_at_end:
            file.look_again()
            file.remote.saw_object(download.offset)
        elif self._likely_stop is None or download.offset < self._likely_stop:
            download.ask()
        return piece

    def _set_stop(self) -> None:
        if self._likely_stop is not None:
            beyond = self._download.offset - self._likely_stop
            more = max(BEYOND_BYTES, beyond)
            self._download.stop = self._likely_stop if beyond < 0 else self._download.offset + more

    def _jump(self, nbytes: int) -> None:
        self._download.seek(self._download.offset + nbytes)

    def close(self) -> None:
        self._download.close()


def _patience_s() -> float:
    """Return the time after which an incomplete piece is handed over.

    Under a bandwidth limit the requests are small, and an incomplete piece is charged as a whole one.
    """
    return ENOUGH_S if metering.at_most() == metering.NO_LIMIT_BYTES else PIECE_S


def _room_of(start: int, out: memoryview) -> Callable[[int, int], memoryview]:
    return lambda offset, _size_bytes: out[offset - start :]


def _split(
    spans: Sequence[Span], outs: Sequence[memoryview], part_bytes: int
) -> Iterator[tuple[int, memoryview]]:
    """Yield the begin of each part that is one request, and the part of an out that it goes to."""
    for (start, stop), out in zip(spans, outs, strict=True):
        for cut in range(start, stop, part_bytes):
            yield cut, out[cut - start : cut - start + part_bytes]


def merge_spans(spans: Sequence[Span], gap_bytes: int = GAP_BYTES) -> list[tuple[Span, list[int]]]:
    """Merge near spans; return the merged spans in order, each with the indices of the `spans` inside it."""
    merged: list[tuple[Span, list[int]]] = []
    for position in sorted(range(len(spans)), key=spans.__getitem__):
        start, stop = spans[position]
        if merged and start - merged[-1][0][1] <= gap_bytes:
            (first, last), members = merged[-1]
            merged[-1] = ((first, max(last, stop)), [*members, position])
        else:
            merged.append(((start, stop), [position]))
    return merged


def patiently(look: Callable[[], T]) -> T:
    """Call `look` and return its result; try up to `ATTEMPTS` times while the remote is unavailable."""
    delays = backoff_delays(random)
    for _ in range(ATTEMPTS - 1):
        try:
            return look()
        except Exception as error:
            if judge(error) != "unavailable":
                raise
        metering.wait(next(delays))
    return look()


def fetch(remote: Remote, path: str) -> memoryview:
    """Return all bytes of `path`, writable, of one version; it is read anew if it was replaced meanwhile.

    An object above the bound is not read further. Raises the driver's errors (see
    `remote_errors.map_errors`).
    """
    bounds.enter(remote.object_bytes)
    if remote.is_local:
        return fetch_local(path)
    for tries in itertools.count():
        try:
            return RemoteObject(remote, path, redact(path)).read_all()
        except Exception as error:
            if classify(error) != "changed" or tries >= RESUMES:
                raise
    raise AssertionError


@contextlib.contextmanager
def open_stream(
    remote: Remote, path: str, where: str, start: int = 0, likely_stop: int | None = None
) -> Iterator[Stream]:
    """Open a stream of `path` from byte `start` on; `where` names the file in messages.

    Bytes beyond `likely_stop` are not fetched ahead. Raises SampleError for a file that cannot be read, and
    SourceUnavailableError for a remote that does not answer.
    """
    bounds.enter(remote.object_bytes)
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        stream = RemoteObject(remote, path, where).stream(start, likely_stop)
    with closing(stream):
        yield stream


def size_of(remote: Remote, path: str, where: str) -> int:
    """Return the size of the file `path` in bytes. Raises the errors of `open_stream`."""
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        return RemoteObject(remote, path, where).look().size_bytes


# --- file objects, for libraries that read those


class _SeekableFile(io.RawIOBase):
    """A read-only remote file with a position. Not thread-safe.

    `error` is the exception that a read raised: libraries in C report only that a read failed.
    """

    def __init__(self, file: RemoteObject) -> None:
        self._file = file
        self._size_bytes = file.look().size_bytes
        self._position = 0
        self.error: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = (0, self._position, self._size_bytes)[whence]
        self._position = base + offset
        return self._position


class BlockFile(_SeekableFile):
    """A file whose last used blocks are kept; large reads bypass the blocks."""

    def __init__(self, file: RemoteObject) -> None:
        super().__init__(file)
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        start, stop = self._position, min(self._position + len(out), self._size_bytes)
        if stop <= start:
            return 0
        try:
            if stop - start > MAX_BLOCKS * BLOCK_BYTES // 4:
                self._file.read_spans([(start, stop)], [out[: stop - start]])
            else:
                self._copy(start, stop, out)
        except Exception as error:
            self.error = error
            raise
        self._position = stop
        return stop - start

    def _copy(self, start: int, stop: int, out: memoryview) -> None:
        numbers = range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES))
        missing = [number for number in numbers if number not in self._blocks]
        spans = [
            (number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self._size_bytes)) for number in missing
        ]
        self._blocks.update(zip(missing, self._file.read_spans(spans), strict=True))
        for number in numbers:
            self._blocks.move_to_end(number)
            first = number * BLOCK_BYTES
            low, high = max(start, first), min(stop, first + BLOCK_BYTES)
            out[low - start : high - start] = self._blocks[number][low - first : high - first]
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)


class SpanFile(_SeekableFile):
    """A file of which `spans` are fetched in the constructor, and other bytes when they are read.

    A read inside a span returns a view of its memory, without a copy.
    """

    def __init__(self, file: RemoteObject, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(file)
        merged = [span for span, _ in merge_spans(spans)]
        self._held = list(zip(merged, file.read_spans(merged), strict=True))

    def read(self, size: int = -1) -> memoryview:
        start = self._position
        stop = self._size_bytes if size < 0 else min(start + size, self._size_bytes)
        if stop <= start:
            return memoryview(b"")
        self._position = stop
        for (first, last), data in self._held:
            if first <= start and stop <= last:
                return data[start - first : stop - first]
        try:
            return self._file.read(start, stop)
        except Exception as error:
            self.error = error
            raise
