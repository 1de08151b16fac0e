"""Windows of arrays: where they may lie, their bytes in contiguous data, and arrays read at one place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from cachestream.config import whole_number
from cachestream.errors import ConfigError, SampleError
from cachestream.sources.decode.values import ArrayLayout
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import ChangedError, map_errors
from cachestream.transport.remote_object import GAP_BYTES, RemoteObject

if TYPE_CHECKING:
    from cachestream.sources.arrays import ArrayLocation

Window = int | Sequence[int | None]
Sizes = tuple[int | None, ...]

LOCAL_GAP_BYTES: Final = 32 << 10  # copying these takes about as long as one more read call
MAX_BAND_BYTES: Final = 16 << 20
BATCH_BYTES: Final = 32 << 20  # of bands with gaps, or of chunks, in memory at a time


def window_of(window: Any, ndim: int, name: str) -> Sizes:
    """Return `window` as one size for each axis, None for a whole axis. Raises ConfigError."""
    given = tuple(window) if isinstance(window, tuple | list) else (window,)
    sizes = tuple(None if size is None else whole_number(size) or 0 for size in given)
    lengths = [size for size in sizes if size is not None]
    if min(lengths, default=1) < 1:
        raise ConfigError(
            f"window={window!r}: give a length along the first axis, or one for each axis, None for all of it"
        )
    if len(sizes) > ndim:
        raise ConfigError(f"window={window!r} has {len(sizes)} axes, {name} has {ndim}")
    if not lengths:
        raise ConfigError(f"window={window!r} is all of {name}: give a length for at least one axis")
    return (*sizes, *(None,) * (ndim - len(sizes)))


def _per_axis(value: Any, name: str, count: int, least: int) -> tuple[int, ...]:
    """Return `value`, an int for all axes or one for each, as a tuple. Raises ConfigError below `least`."""
    given = value if isinstance(value, tuple | list) else (value,) * count
    numbers = [number for number in map(whole_number, given) if number is not None and number >= least]
    if len(numbers) != len(given) or len(given) != count:
        raise ConfigError(
            f"{name}={value!r}: give an int of at least {least}, or {count} of them, one a cut axis"
        )
    return tuple(numbers)


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
    def of(
        cls,
        lengths: Sequence[int],
        sizes: Sequence[int],
        stride: int | Sequence[int] | Literal["chunks"],
        jitter: int | Sequence[int] | None,
        chunks: Sequence[int] | None = None,
    ) -> WindowGrid:
        """Make a grid; `chunks`: chunk lengths along the cut axes. Raises ConfigError for invalid values."""
        if stride == "chunks":
            if chunks is None:
                raise ConfigError("stride='chunks': the array has no chunks; give a number")
            stride = chunks
        count = len(sizes)
        strides = _per_axis(stride, "stride", count, 1)
        return cls(tuple(lengths), tuple(sizes), strides, _per_axis(jitter or 0, "jitter", count, 0))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of positions along each axis; 0 if the window is longer."""
        axes = zip(self.lengths, self.sizes, self.strides, strict=True)
        return tuple(
            -(-(length - size) // stride) + 1 if size <= length else 0 for length, size, stride in axes
        )

    @property
    def count(self) -> int:
        return math.prod(self.counts)

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


# --- contiguous data ---------------------------------------------------------------------------


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
    file: RemoteObject, layout: ArrayLayout, start: Sequence[int], size: Sequence[int]
) -> npt.NDArray[Any]:
    """Return the window of shape `size` at `start`: a new array, C-contiguous, in native byte order."""
    shape, dtype = layout.shape, layout.dtype
    if layout.fortran_order:
        shape, start, size = shape[::-1], start[::-1], size[::-1]
    gap_bytes = LOCAL_GAP_BYTES if file.remote.is_local else GAP_BYTES
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


# --- arrays that are read at the same positions ------------------------------------------------


class ArrayFile:
    """An array of one format that can be read in windows. Picklable; `read` may be called from several
    threads.

    `array_endings` are those of the files or folders that hold such arrays. Raises SampleError for malformed
    data, and otherwise the errors of drivers.
    """

    array_endings: ClassVar[tuple[str, ...]]
    holds_datasets: ClassVar[bool] = False  # several in a file: "a.h5::/group/data"
    is_folder: ClassVar[bool] = False  # arrays lie in folders: "a.zarr/group/data"
    is_sample: ClassVar[bool] = False  # without window= a file is a sample
    is_raw: ClassVar[bool] = False  # no file tells its dtype: an argument, `dtype=`, may
    shown: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None = None

    def __init__(self, remote: Remote, path: str, shown: str, dataset: str | None) -> None:
        raise NotImplementedError

    @classmethod
    def is_at(cls, path: str) -> bool:
        """Return whether an array of this format is at `path`, judged by its endings."""
        name = path.partition("?")[0].lower()
        if cls.is_folder:
            return any(name.endswith(one) or f"{one}/" in name for one in cls.array_endings)
        return name.endswith(cls.array_endings)

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`: a new array, C-contiguous, in native byte order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class AlignedArrays:
    """Arrays that are read at the same positions: by name, with the size of a window in each.

    An array whose file was replaced is opened anew here, whatever its format.
    """

    files: Mapping[str, ArrayLocation]
    arrays: dict[str, ArrayFile]
    sizes: Mapping[str, Sizes]
    grid: WindowGrid

    @property
    def dtypes(self) -> dict[str, str]:
        return {
            name: f"{array.dtype.newbyteorder('=')}[{len(array.shape)}d]"
            for name, array in self.arrays.items()
        }

    def read(self, name: str, place: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of array `name` that begins at `place` along the cut axes.

        Raises SampleError for malformed data, and for a file that was replaced by another array, and the
        errors of the driver.
        """
        array = self.arrays[name]
        cut = iter(place)
        start, size = [], []
        for one, length in zip(self.sizes[name], array.shape, strict=True):
            start.append(0 if one is None else next(cut))
            size.append(length if one is None else one)
        try:
            return array.read(start, size)
        except ChangedError:
            fresh = self.files[name].open()
        if (fresh.shape, fresh.dtype) != (array.shape, array.dtype):
            raise SampleError(
                f"{array.shown}: was replaced by another array ({fresh.dtype}{list(fresh.shape)} instead "
                f"of {array.dtype}{list(array.shape)}); start again with a new source"
            )
        self.arrays[name] = fresh
        return fresh.read(start, size)


def open_aligned(files: Mapping[str, ArrayLocation], cut: WindowOptions) -> AlignedArrays:
    """Open the arrays at `files`. Raises ConfigError if the windows of `cut` do not fit them."""
    arrays: dict[str, ArrayFile] = {}
    for name, file in files.items():
        with map_errors(file.shown, secrets=file.remote.secrets):
            arrays[name] = file.open()
    windows = cut.window if isinstance(cut.window, Mapping) else dict.fromkeys(arrays, cut.window)
    sizes = {name: window_of(windows[name], len(array.shape), array.shown) for name, array in arrays.items()}
    axes = {name: [axis for axis, one in enumerate(sizes[name]) if one is not None] for name in arrays}
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        mine = [(array.shape[axis], sizes[name][axis]) for axis in axes[name]]
        others = [(first.shape[axis], sizes[first_name][axis]) for axis in axes[first_name]]
        if mine != others:
            raise ConfigError(
                f"{first.shown} {first.shape} and {array.shown} {array.shape}: the cut axes must have the "
                f"same lengths and windows; here they are {_describe_axes(others)} and "
                f"{_describe_axes(mine)}; give window= by name"
            )
    lengths = tuple(first.shape[axis] for axis in axes[first_name])
    window = tuple(one for one in sizes[first_name] if one is not None)
    chunks = None if first.chunks is None else tuple(first.chunks[axis] for axis in axes[first_name])
    grid = WindowGrid.of(lengths, window, cut.stride, cut.jitter, chunks)
    if not grid.count:
        raise ConfigError(f"{first.shown} {first.shape} is smaller than the window {window}")
    return AlignedArrays(files, arrays, sizes, grid)


def _describe_axes(axes: Sequence[tuple[int, int | None]]) -> str:
    return ", ".join(f"{size} of {length}" for length, size in axes)
