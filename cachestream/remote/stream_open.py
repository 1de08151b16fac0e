"""`open_stream`: the bytes of one file from some byte on, wherever it lies."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

import numpy as np

from cachestream.errors import SampleError
from cachestream.remote import bounds, pulse
from cachestream.remote.filesystem import Remote
from cachestream.remote.retry import map_errors
from cachestream.remote.stream import PIECE_BYTES, Stream
from cachestream.remote.stream_network import RangeStream, S3Stream, WebStream

__all__ = ["open_stream", "size_of"]


@contextlib.contextmanager
def open_stream(
    remote: Remote, path: str, where: str, start: int = 0, likely_stop: int | None = None
) -> Iterator[Stream]:
    """`path` from byte `start` on; `where` names it in messages. Bytes past `likely_stop` are not fetched ahead."""
    bounds.enter(remote.object_bytes)
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        stream: Stream
        if remote.is_local:
            stream = _LocalStream(path, where, start)
        elif not remote.filesystem().async_impl:
            stream = _OpenedStream(remote, path, where, start)
        elif remote.is_web:
            stream = WebStream(remote, path, where, start, likely_stop)
        elif remote.is_s3:
            stream = S3Stream(remote, path, where, start, likely_stop)
        else:
            stream = RangeStream(remote, path, where, start, likely_stop)
    try:
        yield stream
    finally:
        stream.close()


def size_of(remote: Remote, path: str, where: str) -> int:
    """The size of the file `path` in bytes. Raises as `open_stream` does; SampleError where it is not told."""
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        if remote.is_local:
            return os.stat(path).st_size
        filesystem = remote.filesystem()
        if filesystem.async_impl:
            info = remote.run(filesystem._info(path))
        else:
            info = remote.call(lambda filesystem: filesystem.info(path))
    size = info.get("size")
    if size is None:
        raise SampleError(f"{where}: the server does not tell its size, which reading it in parts needs")
    return int(size)


class _LocalStream(Stream):
    def __init__(self, path: str, where: str, start: int) -> None:
        super().__init__(where, start=start)
        # O_NONBLOCK: to open a named pipe would wait for its writer.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise SampleError(f"{where}: not a regular file")
        self.size_bytes = status.st_size
        self._offset = start

    def _next_piece(self) -> memoryview:
        buffer = np.empty(PIECE_BYTES, np.uint8).data
        if self.size_bytes is not None:
            pulse.asking(max(0, min(PIECE_BYTES, self.size_bytes - self._offset)))
        got = os.preadv(self._fd, [buffer], self._offset)
        self._offset += got
        pulse.fetched(got)
        return buffer[:got]

    def _jump(self, nbytes: int) -> None:
        self._offset += nbytes

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _OpenedStream(Stream):
    """Through the file object of a filesystem that is not asynchronous."""

    def __init__(self, remote: Remote, path: str, where: str, start: int) -> None:
        super().__init__(where, remote.secrets, start)
        self._remote = remote
        self._file = remote.open(path)
        self.size_bytes = getattr(self._file, "size", None)
        if start:
            self._jump(start)

    def _next_piece(self) -> memoryview:
        return memoryview(bytearray(self._remote.read(self._file)))

    def _jump(self, nbytes: int) -> None:
        self._remote.call(lambda _: self._file.seek(nbytes, os.SEEK_CUR))

    def close(self) -> None:
        self._remote.close(self._file)
