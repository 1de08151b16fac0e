"""A remote file as a seekable file object, for the libraries that read those."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, Final

from cachestream.transport.backends import Span
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors
from cachestream.transport.remote_object import RemoteObject, merge_spans
from cachestream.transport.stream import join

BLOCK_BYTES: Final = 64 << 10  # fetched in one request, and kept
MAX_BLOCKS: Final = 256


class SeekableFile(io.RawIOBase):
    """A read-only remote file with a position. Not thread-safe.

    `spans` are fetched in the constructor; a read inside a span returns a view of its memory, without a copy.
    For small reads elsewhere, of metadata, the last used blocks are kept; large ones fetch their own bytes.
    """

    def __init__(self, file: RemoteObject, spans: Sequence[Span] = ()) -> None:
        self._file = file
        self._size_bytes = file.look().size_bytes
        self._position = 0
        merged = [span for span, _ in merge_spans(spans)]
        self._held = list(zip(merged, file.read_spans(merged), strict=True)) if merged else []
        self._block = lru_cache(MAX_BLOCKS)(partial(_read_block, file, self._size_bytes))
        self._error: Exception | None = None

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

    def read(self, size: int = -1) -> memoryview:
        start = self._position
        stop = self._size_bytes if size < 0 else min(start + size, self._size_bytes)
        if stop <= start:
            return memoryview(b"")
        try:
            data = self._bytes(start, stop)
        except Exception as error:
            self._error = error
            raise
        self._position = stop
        return data

    def raise_error(self) -> None:
        """Raise the exception that a read raised, if one did: libraries in C report only that a read failed.

        The file does not keep it. Its traceback refers to the file, and the garbage collector does not see
        the references of such libraries.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error from None

    def readall(self) -> bytes:
        return bytes(self.read())

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        data = self.read(len(out))
        out[: len(data)] = data
        return len(data)

    def _bytes(self, start: int, stop: int) -> memoryview:
        for (first, last), data in self._held:
            if first <= start and stop <= last:
                return data[start - first : stop - first]
        if stop - start >= BLOCK_BYTES:
            return self._file.read(start, stop)
        number, begin = divmod(start, BLOCK_BYTES)
        found = self._block(number)[begin : begin + stop - start]
        missing = stop - start - len(found)
        return join([found, self._block(number + 1)[:missing]], stop - start) if missing else found


def _read_block(file: RemoteObject, size_bytes: int, number: int) -> memoryview:
    first = number * BLOCK_BYTES
    return file.read(first, min(first + BLOCK_BYTES, size_bytes))


@contextmanager
def open_file(
    remote: Remote, path: str, where: str, buffer_bytes: int = 1 << 20
) -> Iterator[io.BufferedReader]:
    """Open the file at `path`, `where` in messages, as a file object; a request fetches `buffer_bytes`.

    Reads have deadlines, resume, are counted and limited. An error in the block becomes a SampleError with
    the file's name, or, where a read failed for that, SourceUnavailableError.
    """
    with map_errors(where, one_of_many=True, secrets=remote.secrets):
        raw: Any = SeekableFile(RemoteObject(remote, path, where))
        with io.BufferedReader(raw, buffer_bytes) as file:
            try:
                yield file
            except Exception:
                raw.raise_error()  # libraries replace it by one of their own
                raise
