"""Windows of an array: the axes they cut, the places they take, the bytes they touch.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cachestream.errors import ConfigError

Sizes = tuple[int | None, ...]
MAX_BAND_BYTES: Final = 16 << 20


def window_of(window: Any, ndim: int, name: str) -> Sizes:
    """`window` as one size an axis, None for a whole axis; raises ConfigError where it does not fit."""
    given = tuple(window) if isinstance(window, tuple | list) else (window,)
    for size in given:
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1
        ):
            raise ConfigError(
                f"window={window!r}: give a length along the first axis, or one for each axis, None for all of it"
            )
    if len(given) > ndim:
        raise ConfigError(f"window={window!r} has {len(given)} axes, {name} has {ndim}")
    sizes = tuple(None if size is None else int(size) for size in given)
    if not any(size is not None for size in sizes):
        raise ConfigError(f"window={window!r} is all of {name}: give a length for at least one axis")
    return (*sizes, *(None,) * (ndim - len(sizes)))


def _per_axis(value: Any, name: str, count: int, least: int) -> tuple[int, ...]:
    """`value`, an int for all axes or one int each."""
    given = tuple(value) if isinstance(value, tuple | list) else (value,) * count
    if len(given) != count or any(
        isinstance(one, bool) or not isinstance(one, int | np.integer) or one < least for one in given
    ):
        raise ConfigError(
            f"{name}={value!r}: give an int of at least {least}, or {count} of them, one a cut axis"
        )
    return tuple(int(one) for one in given)


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """Where windows of `sizes` may begin along the cut axes: at multiples of `strides`.

    The last place of each axis is flush with its end, so that no element is out of reach. At random
    each is then moved by up to `jitter`, inside the array.
    """

    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    jitter: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], sizes: Sequence[int], stride: Any, jitter: Any) -> WindowGrid:
        """Raises ConfigError for strides or jitter that cannot be."""
        count = len(sizes)
        strides = _per_axis(stride, "stride", count, 1)
        return cls(tuple(lengths), tuple(sizes), strides, _per_axis(jitter or 0, "jitter", count, 0))

    @property
    def fits(self) -> bool:
        return all(size <= length for size, length in zip(self.sizes, self.lengths, strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many places there are along each axis."""
        rooms = zip(self.lengths, self.sizes, self.strides, strict=True)
        return tuple(max(0, -(-(length - size) // stride) + 1) for length, size, stride in rooms)

    @property
    def count(self) -> int:
        return math.prod(self.counts) if self.fits else 0

    def at(self, number: int) -> tuple[int, ...]:
        """The start of place `number`, in C order."""
        index = []
        for count in reversed(self.counts):
            number, one = divmod(number, count)
            index.append(one)
        return self._start(reversed(index))

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """The start of a place, each as likely as any other."""
        return self.move(self._start(int(rng.integers(count)) for count in self.counts), rng)

    def move(self, start: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
        """`start` moved by the jitter."""
        if not any(self.jitter):
            return start
        rooms = zip(start, self.jitter, self.lengths, self.sizes, strict=True)
        return tuple(
            min(max(one + int(rng.integers(-most, most + 1)), 0), length - size)
            for one, most, length, size in rooms
        )

    def _start(self, index: Iterator[int] | Sequence[int]) -> tuple[int, ...]:
        rooms = zip(index, self.strides, self.lengths, self.sizes, strict=True)
        return tuple(min(one * stride, length - size) for one, stride, length, size in rooms)


@dataclass(frozen=True, slots=True)
class Bands:
    """The parts of a C-ordered array's bytes that hold a window: bands of equal length and layout.

    A band holds the window's elements along the axes from `axis` on, `shape` of them, `strides` bytes
    apart; `starts` are the bytes where the bands begin, in C order of the axes before.
    """

    axis: int
    starts: tuple[int, ...]
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def is_dense(self, itemsize: int) -> bool:
        """Whether a band is nothing but the window's bytes, in order."""
        return self.nbytes == math.prod(self.shape) * itemsize


def plan_bands(
    shape: Sequence[int], itemsize: int, start: Sequence[int], size: Sequence[int], gap_bytes: int
) -> Bands:
    """The bands of the window `size` at `start` in an array of `shape`.

    Bytes between the window's own are read along where they are fewer than `gap_bytes` in a row.
    """
    ndim = len(shape)
    strides = [itemsize] * ndim
    for axis in reversed(range(ndim - 1)):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    axis, nbytes = ndim, itemsize
    while axis:
        stride = strides[axis - 1]
        wider = (size[axis - 1] - 1) * stride + nbytes
        gap = stride - nbytes if size[axis - 1] > 1 else 0
        if gap > gap_bytes or (gap and wider > MAX_BAND_BYTES):
            break
        axis, nbytes = axis - 1, wider
    first = sum(at * stride for at, stride in zip(start, strides, strict=True))
    steps = (range(0, size[k] * strides[k], strides[k]) for k in range(axis))
    starts = [first]
    for step in steps:
        starts = [one + offset for one in starts for offset in step]
    return Bands(axis, tuple(starts), nbytes, tuple(size[axis:]), tuple(strides[axis:]))
