"""Local files: read straight into place, mapped, or as a stream. The kernel resumes and retries for them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from cachestream.errors import SampleError
from cachestream.linux import FileMap, filesystem_of, is_network_filesystem
from cachestream.transport import metering, object_limit
from cachestream.transport.backends import Span, Version
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.stream import Stream

READAHEAD_BYTES: Final = 128 << 10  # the kernel's usual readahead at a page fault
READ_BYTES: Final = 4 << 20  # in one system call


def _open(path: str, where: str) -> tuple[int, os.stat_result]:
    """Open a regular file; return its descriptor and status. `where` names the file in messages."""
    # O_NONBLOCK: without it, opening a named pipe waits for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise SampleError(f"{where}: not a regular file")
    return fd, status


def is_on_disk(path: str) -> bool:
    """Return whether a local path lies on a disk of this machine: not on a network file system, or behind FUSE."""
    kind = filesystem_of(os.path.realpath(path))
    return not is_network_filesystem(kind) and not kind.startswith("fuse")


def _fill(fd: int, start: int, out: memoryview, where: str, unreported: int = 0) -> int:
    """Read from byte `start` on until `out` is full. Raises SampleError if the file ends before.

    Bytes are reported `PIECE_BYTES` at a time. `unreported` is the number of bytes that earlier calls have
    not reported; the number after this call is returned.
    """
    have = 0
    while have < len(out):
        got = os.preadv(fd, [out[have : have + READ_BYTES]], start + have)
        if got == 0:
            raise SampleError(f"{where}: ends after {start + have} of at least {start + len(out)} bytes")
        have += got
        unreported += got
        if unreported >= PIECE_BYTES:
            metering.fetched(unreported)
            unreported = 0
    return unreported


def fetch_local(path: str, most_bytes: int) -> memoryview:
    """Return all bytes of the file `path`, writable. Raises TooLargeError above `most_bytes`."""
    fd, status = _open(path, path)
    try:
        object_limit.check(status.st_size, most_bytes)
        buffer = np.empty(status.st_size, np.uint8).data
        metering.asking(status.st_size)
        unreported = _fill(fd, 0, buffer, path)
    finally:
        os.close(fd)
    metering.fetched(unreported)
    return buffer


def mapped_spans(mapped: FileMap, spans: Sequence[Span]) -> list[memoryview] | None:
    """Return the bytes of `spans` of a mapped file, read-only and without a copy; None before Linux 5.14.

    The pages are populated first, by a call that raises OSError where an access to them would end the process
    with SIGBUS.
    """
    for start, stop in spans:
        if stop - start > READAHEAD_BYTES and not mapped.is_cached(start, stop):
            mapped.ask_for(start, stop)
        if start < stop and not mapped.bring_in(start, stop):
            return None
    whole = mapped.array().data
    return [whole[start:stop] for start, stop in spans]


class LocalFile:
    """The file `path`, which messages call `shown`. Thread-safe and picklable."""

    def __init__(self, path: str, shown: str) -> None:
        self._path, self._shown = path, shown
        # Assigned as one tuple: other threads read it meanwhile.
        self._map: tuple[Version, FileMap] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def stat(self) -> Version:
        """Return the current version."""
        fd, status = _open(self._path, self._shown)
        os.close(fd)
        return _version_of_status(status)

    def read_spans(
        self,
        spans: Sequence[Span],
        outs: Sequence[memoryview] | None,
        sparse: bool,
        check: Callable[[Version], Version],
    ) -> Sequence[memoryview]:
        """Return the bytes of each span, as `RemoteObject.read_spans` does; `check` takes their version."""
        fd, status = _open(self._path, self._shown)
        unreported = 0
        try:
            now = check(_version_of_status(status))
            announced = outs is None and sparse and all(stop <= now.size_bytes for _, stop in spans)
            if announced:
                nbytes = sum(stop - start for start, stop in spans)
                metering.asking(nbytes)
                found = self._mapped_spans(fd, now, spans)
                if found is not None:
                    metering.fetched(nbytes)
                    return found
            if outs is None:
                outs = [np.empty(stop - start, np.uint8).data for start, stop in spans]
            for (start, _), out in zip(spans, outs, strict=True):
                if not announced:
                    metering.asking(len(out))
                unreported = _fill(fd, start, out, self._shown, unreported)
        finally:
            os.close(fd)
        metering.fetched(unreported)
        return outs

    def _mapped_spans(self, fd: int, now: Version, spans: Sequence[Span]) -> list[memoryview] | None:
        """Return the bytes of `spans` without a copy; None if the file cannot be mapped."""
        mapped = self._map
        if mapped is None or mapped[0] != now:
            try:
                mapped = self._map = now, FileMap(fd, now.size_bytes)
            except OSError:
                return None
        return mapped_spans(mapped[1], spans)


def _version_of_status(status: os.stat_result) -> Version:
    return Version(status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")


class LocalStream(Stream):
    """A local file as a stream."""

    def __init__(self, path: str, where: str, start: int) -> None:
        super().__init__(where, start=start)
        self._fd, status = _open(path, where)
        self.size_bytes = self._end = status.st_size
        self._offset = start

    def _next_piece(self) -> memoryview:
        buffer = np.empty(PIECE_BYTES, np.uint8).data
        metering.asking(max(0, min(PIECE_BYTES, self._end - self._offset)))
        got = os.preadv(self._fd, [buffer], self._offset)
        if got == 0 and self._offset < self._end:
            raise SampleError(
                f"{self.where}: it was cut while it was read: it had {self._end:,} bytes, and ends now "
                f"before byte {self._offset + 1:,}"
            )
        self._offset += got
        metering.fetched(got)
        return buffer[:got]

    def _jump(self, nbytes: int) -> None:
        self._offset += nbytes

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
