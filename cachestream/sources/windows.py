"""Windows of arrays: where they may lie, and their bytes in files and in chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError

if TYPE_CHECKING:
    from cachestream.transport.object import RemoteObject

Window = int | Sequence[int | None]
Sizes = tuple[int | None, ...]
LOCAL_GAP_BYTES: Final = 32 << 10  # copying these takes about as long as one more read call
MAX_BAND_BYTES: Final = 16 << 20
BATCH_BYTES: Final = 32 << 20  # of bands with gaps, in memory at a time


def window_of(window: Any, ndim: int, name: str) -> Sizes:
    """Return `window` as one size for each axis, None for a whole axis. Raises ConfigError."""
    given = tuple(window) if isinstance(window, tuple | list) else (window,)
    for size in given:
        if size is not None and (
            isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1
        ):
            raise ConfigError(
                f"window={window!r}: give a length along the first axis, or one for each axis, "
                "None for all of it"
            )
    if len(given) > ndim:
        raise ConfigError(f"window={window!r} has {len(given)} axes, {name} has {ndim}")
    sizes = tuple(None if size is None else int(size) for size in given)
    if not any(size is not None for size in sizes):
        raise ConfigError(f"window={window!r} is all of {name}: give a length for at least one axis")
    return (*sizes, *(None,) * (ndim - len(sizes)))


def _per_axis(value: Any, name: str, count: int, least: int) -> tuple[int, ...]:
    """Return `value`, an int for all axes or one for each, as a tuple. Raises ConfigError below `least`."""
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
    """The positions where windows of `sizes` may begin along the cut axes: multiples of `strides`.

    The last window along each axis ends with it, so that every element can be reached. A drawn position is
    moved at random by up to `jitter`, within the array.
    """

    lengths: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    jitter: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], sizes: Sequence[int], stride: Any, jitter: Any) -> WindowGrid:
        """Make a grid. Raises ConfigError for invalid strides or jitter."""
        count = len(sizes)
        strides = _per_axis(stride, "stride", count, 1)
        return cls(tuple(lengths), tuple(sizes), strides, _per_axis(jitter or 0, "jitter", count, 0))

    @property
    def fits(self) -> bool:
        return all(size <= length for size, length in zip(self.sizes, self.lengths, strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of positions along each axis."""
        axes = zip(self.lengths, self.sizes, self.strides, strict=True)
        return tuple(max(0, -(-(length - size) // stride) + 1) for length, size, stride in axes)

    @property
    def count(self) -> int:
        return math.prod(self.counts) if self.fits else 0

    def at(self, number: int) -> tuple[int, ...]:
        """Return the start of position `number`, in C order."""
        index = []
        for count in reversed(self.counts):
            number, one = divmod(number, count)
            index.append(one)
        return self._start(reversed(index))

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Draw a position uniformly, move it by the jitter, and return its start."""
        return self.move(self._start(int(rng.integers(count)) for count in self.counts), rng)

    def move(self, start: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
        """Return `start` moved by the jitter."""
        if not any(self.jitter):
            return start
        axes = zip(start, self.jitter, self.lengths, self.sizes, strict=True)
        return tuple(
            min(max(one + int(rng.integers(-most, most + 1)), 0), length - size)
            for one, most, length, size in axes
        )

    def _start(self, index: Iterator[int] | Sequence[int]) -> tuple[int, ...]:
        axes = zip(index, self.strides, self.lengths, self.sizes, strict=True)
        return tuple(min(one * stride, length - size) for one, stride, length, size in axes)


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """The options of `ArraySource` for where windows lie."""

    window: Window | Mapping[str, Window]
    stride: int | Sequence[int] | Literal["chunks"]
    jitter: int | Sequence[int] | None

    def sizes_of(self, name: str, ndim: int, shown: str) -> Sizes:
        """Return the window's size along each axis of an array; None: the whole axis. Raises ConfigError."""
        window = self.window[name] if isinstance(self.window, Mapping) else self.window
        return window_of(window, ndim, shown)

    def grid(
        self, sizes: tuple[int, ...], lengths: tuple[int, ...], chunks: tuple[int, ...] | None
    ) -> WindowGrid:
        """Return the window positions along the cut axes; `chunks` are the chunk lengths along them."""
        stride = self.stride
        if stride == "chunks":
            if chunks is None:
                raise ConfigError("stride='chunks': the array has no chunks; give a number")
            stride = chunks
        return WindowGrid.of(lengths, sizes, stride, self.jitter)


# --- arrays without chunks ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The layout of an array in a file: its elements begin at byte `offset`, in C or Fortran order."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool


@dataclass(frozen=True, slots=True)
class Bands:
    """The byte ranges of a C-ordered array that hold a window: bands of equal length and layout.

    A band covers the window along the last `len(shape)` axes: elements of `shape`, with `strides` in bytes.
    `starts` are the byte offsets of the bands, in C order of the axes before these.
    """

    starts: tuple[int, ...]
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def is_dense(self, itemsize: int) -> bool:
        """Return whether a band holds only bytes of the window, in order."""
        return self.nbytes == math.prod(self.shape) * itemsize


def plan_bands(
    shape: Sequence[int], itemsize: int, start: Sequence[int], size: Sequence[int], gap_bytes: int
) -> Bands:
    """Return the bands of the window of shape `size` at `start` in an array of `shape`.

    Gaps of up to `gap_bytes` between bytes of the window become part of a band.
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
    return Bands(tuple(starts), nbytes, tuple(size[axis:]), tuple(strides[axis:]))


def read_window(
    file: RemoteObject, layout: ArrayLayout, start: Sequence[int], size: Sequence[int], gap_bytes: int
) -> npt.NDArray[Any]:
    """Return the window of shape `size` at `start`: a new array, C-contiguous, in native byte order."""
    shape, dtype = layout.shape, layout.dtype
    if layout.fortran_order:
        shape, start, size = shape[::-1], start[::-1], size[::-1]
    bands = plan_bands(shape, dtype.itemsize, start, size, gap_bytes)
    window = np.empty(tuple(size), dtype)
    if window.size:
        slabs = window.reshape(len(bands.starts), *bands.shape)
        spans = [(layout.offset + one, layout.offset + one + bands.nbytes) for one in bands.starts]
        if bands.is_dense(dtype.itemsize):
            rows = slabs.reshape(len(spans), -1).view(np.uint8)
            file.read_spans(spans, [row.data for row in rows])
        else:
            batch = max(1, BATCH_BYTES // bands.nbytes)
            for first in range(0, len(spans), batch):
                found = file.read_spans(spans[first : first + batch], sparse=True)
                for slab, band in zip(slabs[first : first + batch], found, strict=True):
                    slab[...] = np.ndarray(bands.shape, dtype, band, 0, bands.strides)
    if layout.fortran_order:
        window = window.T
    return np.ascontiguousarray(window, dtype.newbyteorder("="))


# --- chunks ------------------------------------------------------------------------------------


def touched(chunk: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the chunks (of shape `chunk`) that the window `size` at `start` touches."""
    axes = zip(chunk, start, size, strict=True)
    return itertools.product(
        *(range(one // length, -(-(one + count) // length)) for length, one, count in axes)
    )


def overlap(
    index: Sequence[int], chunk: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the intersection of the chunk `index` and a window, as slices of the chunk and of the window."""
    inside, outside = [], []
    for number, length, one, count in zip(index, chunk, start, size, strict=True):
        first = number * length
        low, high = max(one, first), min(one + count, first + length)
        inside.append(slice(low - first, high - first))
        outside.append(slice(low - one, high - one))
    return tuple(inside), tuple(outside)
