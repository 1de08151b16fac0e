"""Windows of arrays: where they may lie, and the arrays that are read at the same positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError, SampleError
from cachestream.listing.patterns import HDF5_ENDINGS, is_zarr
from cachestream.sources.hdf5 import Hdf5Array
from cachestream.sources.npy import NpyArray
from cachestream.sources.zarr import ZarrArray
from cachestream.transport.remote_errors import ChangedError, map_errors

if TYPE_CHECKING:
    from cachestream.sources.arrays import ArrayLocation

Window = int | Sequence[int | None]
Sizes = tuple[int | None, ...]
_STORABLE: Final = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


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
    def of(
        cls,
        lengths: Sequence[int],
        sizes: Sequence[int],
        stride: int | Sequence[int] | Literal["chunks"],
        jitter: int | Sequence[int] | None,
        chunks: Sequence[int] | None = None,
    ) -> WindowGrid:
        """Make a grid; `chunks`: the chunk lengths along the cut axes. Raises ConfigError for other values."""
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


# --- arrays ------------------------------------------------------------------------------------


class ArrayFile(Protocol):
    """An array that can be read in windows. Picklable; `read` may be called from several threads."""

    shown: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`: a new array, C-contiguous, in native byte order."""


def open_array(file: ArrayLocation) -> ArrayFile:
    """Open an array of any kind. Raises ConfigError for one that has no windows of numbers."""
    array: ArrayFile
    ending = file.path.partition("?")[0].lower()
    if is_zarr(file.path):
        array = ZarrArray(file.remote, file.path, file.shown)
    elif ending.endswith(HDF5_ENDINGS):
        array = Hdf5Array(file.remote, file.path, file.shown, file.dataset)
    elif ending.endswith(".npy"):
        array = NpyArray(file.remote, file.path, file.shown)
    else:
        raise ConfigError(f"{file.shown}: ArraySource reads .npy, .zarr and {', '.join(HDF5_ENDINGS)}")
    # The kind is checked first: numpy's newer dtypes, such as variable-length strings, have no byte order.
    if array.dtype.kind not in "biufc" or array.dtype.newbyteorder("=") not in _STORABLE:
        raise ConfigError(f"{array.shown}: has dtype {array.dtype}; windows are of numbers or bools")
    if not array.shape:
        raise ConfigError(f"{array.shown}: is a single value, which has no windows")
    return array


@dataclass(frozen=True, slots=True, eq=False)
class AlignedArrays:
    """Arrays that are read at the same positions: by name, with the size of a window in each.

    An array whose file was replaced is opened anew, once for all kinds of files.
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
            fresh = open_array(self.files[name])
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
            arrays[name] = open_array(file)
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
