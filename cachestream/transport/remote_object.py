"""One file of a remote: whole, in parts, or as a stream. A read is of one version of the file.

| | |
|-|-|
| whole | one request; on S3 and drivers without streams, from some size on, parts follow, several at once |
| parts | near ones share a request, large ones take several, `PARALLEL` at once |
| stream | one request, read ahead by a piece |
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Final

import numpy as np

from cachestream.errors import SampleError
from cachestream.transport import metering, object_limit
from cachestream.transport.backends import PART_BYTES, Span, Version, WrongAnswerError
from cachestream.transport.download import RESUMES, Download
from cachestream.transport.driver import PIECE_S
from cachestream.transport.local_files import LocalFile, LocalStream, fetch_local
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import (
    backoff_delays,
    classify,
    map_errors,
    redact,
)
from cachestream.transport.stream import Stream

STREAM_BYTES: Final = 32 << 20  # a whole object is one stream up to here; the rest comes in parts
PARALLEL: Final = 4
GAP_BYTES: Final = 64 << 10  # about as many as arrive in the time that one more request takes
ENOUGH_S: Final = 0.1  # an incomplete piece is handed over after this time
# The size of the first request beyond `likely_stop`; each next one asks for as much as came beyond it before.
BEYOND_BYTES: Final = 32 << 10


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
        """Add what `now` tells to the version, and return it. Raises ChangedError if `now` is another one."""
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
                f"{self.shown}: the server does not tell its size, or packs it on the way, and reading it in "
                "parts needs the size"
            )
        return self.version

    def look_again(self) -> None:
        """Raise ChangedError if the file was replaced, unless every answer tells the version."""
        if not self.remote.driver().streams:
            self.check(self._stat())

    def _stat(self) -> Version:
        delays = backoff_delays(random)
        for _ in range(RESUMES):
            with contextlib.suppress(WrongAnswerError):
                return self._stat_once()
            metering.wait(next(delays))
        return self._stat_once()

    def _stat_once(self) -> Version:
        backend = self.remote.driver()
        metering.asking(1)
        try:
            found = self.remote.answer_of(
                backend, backend.submit(backend.stat, self.path), backend.deadline_s(1)
            )
        except Exception as error:
            if classify(error) != "range":
                raise
            return Version(0)
        metering.fetched(1 if backend.streams else 0)
        return found

    # --- the beginning, the end, or all

    def head(self, nbytes: int) -> memoryview:
        """Return the first `nbytes`, or the whole file if it is shorter."""
        return self._read_slice(0, nbytes)

    def tail(self, nbytes: int) -> memoryview:
        """Return the last `nbytes`, or the whole file if it is shorter."""
        return self._read_slice(-nbytes, None)

    def _read_slice(self, start: int, stop: int | None) -> memoryview:
        """Return the bytes that exist from `start` (negative: from the end) to `stop` (None: the end)."""
        if self._local is None and self.remote.driver().streams:
            memory = _Memory(self.remote.most_bytes, stop)
            self._fill_memory(memory, start, stop)
            return memory.all()[min(start, 0) :]  # where no size is told, a suffix comes with all before it
        first, last, _ = slice(start, stop).indices(self.look().size_bytes)
        return self.read(first, last)

    async def read_on_loop(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes from `start` (negative: from the end) to `stop` (None: the end).

        Reads that are gathered on one event loop send all their requests first. Each then holds up the loop,
        which serves nothing else, until its own bytes have come: to wait on it takes a quarter more of a
        processor. Not for local files.
        """
        memory = _Memory(self.remote.most_bytes, stop)
        with closing(Download(self, start, memory.room, stop, patience_s=_patience_s())) as download:
            while not download.is_done:
                download.ask()
                await asyncio.sleep(0)
                if not memory.added(download.take()):
                    break
        if (start, stop) == (0, None):
            self.remote.saw_object(memory.num_bytes)
        return memory.all()[min(start, 0) :]

    def _fill_memory(self, memory: _Memory, start: int, stop: int | None) -> bool:
        """Read from `start` to `stop`; return whether the file ends there."""
        with closing(Download(self, start, memory.room, stop, patience_s=_patience_s())) as download:
            while not download.is_done and memory.added(download.take()):
                pass
            return download.is_at_end

    def read_all(self) -> memoryview:
        """Return all bytes, writable. Not for local files."""
        backend = self.remote.driver()
        stop = min(STREAM_BYTES, backend.request_bytes) if backend.takes_parts else None
        memory = _Memory(self.remote.most_bytes, None)
        is_at_end = self._fill_memory(memory, 0, stop)
        have = memory.num_bytes
        if have == stop and not is_at_end:
            size_bytes = self.look().size_bytes
            rest = memory.room(have, size_bytes)
            self._read_parts([(have, size_bytes)], [rest], have)
            memory.num_bytes = size_bytes
            self.look_again()
        self.remote.saw_object(memory.num_bytes)
        return memory.all()

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
        backend = self.remote.driver()
        parts = deque(_split(spans, outs, min(PART_BYTES, backend.request_bytes)))
        if parts and not backend.is_async:
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
    """The memory for the `num_bytes` that one read brings. It doubles until the size of the file is known."""

    def __init__(self, most_bytes: int, stop: int | None) -> None:
        self._most_bytes, self._stop = most_bytes, stop
        self._first: int | None = None  # the offset of the first byte in the file
        self._buffer = memoryview(b"")
        self.num_bytes = 0

    def room(self, offset: int, size_bytes: int) -> memoryview:
        """Return the memory from `offset` on, of a file of this size (-1: unknown)."""
        if self._first is None:
            self._first = offset
        need = self.num_bytes + PIECE_BYTES
        if size_bytes >= 0:
            end = size_bytes if self._stop is None else min(self._stop, size_bytes)
            need = max(0, end - self._first)
            object_limit.check(need, self._most_bytes)
        if len(self._buffer) < need:
            buffer = np.empty(need if size_bytes >= 0 else max(need, 2 * len(self._buffer)), np.uint8).data
            buffer[: self.num_bytes] = self._buffer[: self.num_bytes]
            self._buffer = buffer
        return self._buffer[offset - self._first :]

    def added(self, piece: memoryview) -> bool:
        """Count a piece, which came into the last room; return whether it has any bytes.

        Raises TooLargeError above the limit.
        """
        self.num_bytes += len(piece)
        object_limit.check(self.num_bytes, self._most_bytes)
        return len(piece) > 0

    def all(self) -> memoryview:
        """Return the bytes that came, writable."""
        return self._buffer[: self.num_bytes]


class _RemoteStream(Stream):
    """A stream of a remote file; the next piece is on its way while one is used."""

    def __init__(self, file: RemoteObject, start: int, likely_stop: int | None) -> None:
        super().__init__(file.shown, file.remote.secrets, start)
        backend = file.remote.driver()
        self._file = file
        self._streams = backend.streams
        self._likely_stop = likely_stop if backend.is_async else None
        # A driver without streams makes a call for each piece.
        most = PIECE_BYTES if backend.streams else PART_BYTES

        def room(offset: int, size_bytes: int) -> memoryview:
            left = most if size_bytes < 0 else size_bytes - offset
            return np.empty(max(0, min(left, most)), np.uint8).data

        self._download = Download(file, start, room, step_bytes=most, patience_s=_patience_s())

    def _next_piece(self) -> memoryview:
        file, download = self._file, self._download
        had_ended = download.is_at_end
        if had_ended:
            return memoryview(b"")
        if not self._streams and file.version == Version():
            file.check(file._stat())
        if self._likely_stop is not None:
            beyond = download.offset - self._likely_stop
            download.stop = self._likely_stop if beyond < 0 else download.offset + max(BEYOND_BYTES, beyond)
        piece = download.take()
        if file.version.size_bytes >= 0:
            self.size_bytes = file.version.size_bytes
        if download.is_at_end:
            file.look_again()
            file.remote.saw_object(download.offset)
        elif self._likely_stop is None or download.offset < self._likely_stop:
            download.ask()
        return piece

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


def fetch(remote: Remote, path: str) -> memoryview:
    """Return all bytes of `path`, writable, of one version; it is read anew if it was replaced meanwhile.

    An object above the limit is not read further. Raises the driver's errors (see
    `remote_errors.map_errors`).
    """
    if remote.is_local:
        return fetch_local(path, remote.most_bytes)
    for _ in range(RESUMES):
        try:
            return RemoteObject(remote, path, redact(path)).read_all()
        except Exception as error:
            if classify(error) != "changed":
                raise
    return RemoteObject(remote, path, redact(path)).read_all()


@contextlib.contextmanager
def open_stream(
    remote: Remote, path: str, where: str, start: int = 0, likely_stop: int | None = None
) -> Iterator[Stream]:
    """Open a stream of `path` from byte `start` on; `where` names the file in messages.

    Bytes beyond `likely_stop` are not fetched ahead. The remote's limit for one object is applied while the
    stream is open. Raises SampleError for a file that cannot be read, and SourceUnavailableError for a
    remote that does not answer.
    """
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        stream = RemoteObject(remote, path, where).stream(start, likely_stop)
    with closing(stream), object_limit.applied(remote.max_object_bytes):
        yield stream


def size_of(remote: Remote, path: str, where: str) -> int:
    """Return the size of the file `path` in bytes. Raises the errors of `open_stream`."""
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        return RemoteObject(remote, path, where).look().size_bytes
