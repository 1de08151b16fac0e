"""A remote file as a seekable file object, for the libraries that read those: h5py and pyarrow."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from cachestream.transport.backends import Span
from cachestream.transport.remote_object import RemoteObject, merge_spans

BLOCK_BYTES: Final = 64 << 10  # fetched in one request, and kept
MAX_BLOCKS: Final = 256


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

    def __init__(self, file: RemoteObject, spans: Sequence[Span]) -> None:
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
