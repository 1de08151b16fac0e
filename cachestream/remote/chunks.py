"""Chunks of an array in memory: which ones a window touches, and how the usual HDF5 filters are undone."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Chunked", "overlap", "touched"]

MAX_CHUNK_BYTES: Final = 4 << 30
_DEFLATE: Final = 1
_SHUFFLE: Final = 2

Area = tuple[slice, ...]


def touched(chunk: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The indices of the chunks (of shape `chunk`) that the window `size` at `start` touches."""
    axes = zip(chunk, start, size, strict=True)
    return itertools.product(
        *(range(one // length, -(-(one + count) // length)) for length, one, count in axes)
    )


def overlap(
    index: Sequence[int], chunk: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> tuple[Area, Area]:
    """Where the window lies within the chunk `index`, and where that chunk lies within the window."""
    inside, outside = [], []
    for number, length, one, count in zip(index, chunk, start, size, strict=True):
        first = number * length
        low, high = max(one, first), min(one + count, first + length)
        inside.append(slice(low - first, high - first))
        outside.append(slice(low - one, high - one))
    return tuple(inside), tuple(outside)


@dataclass(frozen=True, slots=True)
class Chunked:
    """How the chunks of an HDF5 dataset are stored: `filters` are (number, first parameter), as applied."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    filters: tuple[tuple[int, int], ...]
    fill: Any

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def can_decode(self) -> bool:
        """Whether `decode` knows all the filters."""
        known = all(number in (_DEFLATE, _SHUFFLE) for number, _ in self.filters)
        return known and 0 < self.nbytes <= MAX_CHUNK_BYTES

    def decode(self, data: memoryview, filter_mask: int) -> npt.NDArray[Any] | None:
        """The chunk that `data` holds; None if it is not what these filters make.

        Bit i of `filter_mask` says that filter i was left out.
        """
        current: memoryview | bytes = data
        for place in reversed(range(len(self.filters))):
            number, parameter = self.filters[place]
            if filter_mask >> place & 1:
                continue
            if number == _DEFLATE:
                try:
                    # Bounded: a few bytes may unpack to a thousand times as many.
                    current = zlib.decompressobj().decompress(current, self.nbytes + 1)
                except zlib.error:
                    return None
            else:
                current = unshuffle(current, parameter or self.dtype.itemsize)
        if len(current) != self.nbytes:
            return None
        return np.frombuffer(current, self.dtype).reshape(self.shape)


def unshuffle(data: memoryview | bytes, width: int) -> memoryview:
    """Undo HDF5's shuffle filter: it puts the first bytes of all elements first, then the second."""
    count = len(data) // width
    mixed = np.frombuffer(data, np.uint8)
    plain = np.empty_like(mixed)
    elements = plain[: count * width].reshape(count, width)
    for place, values in enumerate(mixed[: count * width].reshape(width, count)):
        elements[:, place] = values  # three times as fast as to assign the transpose
    plain[count * width :] = mixed[count * width :]
    return plain.data
