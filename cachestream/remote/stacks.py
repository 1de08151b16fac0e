"""Arrays that are read at the same place together: an image and its mask, or one array alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError
from cachestream.remote.hdf5 import Hdf5Array
from cachestream.remote.locate import HDF5_ENDINGS, Located, is_zarr
from cachestream.remote.npy import NpyArray
from cachestream.remote.retry import map_errors
from cachestream.remote.windows import Places, Sizes, window_of
from cachestream.remote.zarrs import ZarrArray

__all__ = ["ArrayFile", "Cut", "Stack", "Window", "open_stack"]

Window = int | Sequence[int | None]

_STORABLE: Final = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


class ArrayFile(Protocol):
    """An array that can be read in windows. Picklable; `read` may be called from several threads."""

    shown: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """The window `size` at `start`: new, C-contiguous, in native byte order."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How windows are cut out: see `ArraySource` for what each means."""

    window: Window | Mapping[str, Window]
    stride: int | Sequence[int] | Literal["chunks"]
    jitter: int | Sequence[int] | None

    def sizes_of(self, name: str, array: ArrayFile) -> Sizes:
        """The window's size along each axis of `array`; None: all of it."""
        window = self.window[name] if isinstance(self.window, Mapping) else self.window
        return window_of(window, len(array.shape), array.shown)

    def places(
        self, sizes: tuple[int, ...], lengths: tuple[int, ...], chunks: tuple[int, ...] | None
    ) -> Places:
        """Where windows may begin, along the cut axes; `chunks` are those of the array along them."""
        stride = self.stride
        if stride == "chunks":
            if chunks is None:
                raise ConfigError("stride='chunks': the array has no chunks; give a number")
            stride = chunks
        return Places.of(lengths, sizes, stride, self.jitter)


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Arrays by name, the size of a window in each, and the places that they have in common."""

    arrays: Mapping[str, ArrayFile]
    sizes: Mapping[str, Sizes]
    places: Places

    @property
    def dtypes(self) -> dict[str, str]:
        return {
            name: f"{array.dtype.newbyteorder('=')}[{len(array.shape)}d]"
            for name, array in self.arrays.items()
        }

    def read(self, name: str, place: Sequence[int]) -> npt.NDArray[Any]:
        """The window of array `name` that begins at `place` along the cut axes."""
        array = self.arrays[name]
        cut = iter(place)
        start, size = [], []
        for one, length in zip(self.sizes[name], array.shape, strict=True):
            start.append(0 if one is None else next(cut))
            size.append(length if one is None else one)
        return array.read(start, size)


def open_stack(files: Mapping[str, Located], cut: Cut) -> Stack:
    """Look at the arrays at `files`. Raises ConfigError where windows cannot be cut out of them as asked."""
    arrays = {name: _open(file) for name, file in files.items()}
    sizes = {name: cut.sizes_of(name, array) for name, array in arrays.items()}
    axes = {name: [axis for axis, one in enumerate(sizes[name]) if one is not None] for name in arrays}
    first_name, first = next(iter(arrays.items()))
    for name, array in arrays.items():
        mine = [(array.shape[axis], sizes[name][axis]) for axis in axes[name]]
        others = [(first.shape[axis], sizes[first_name][axis]) for axis in axes[first_name]]
        if mine != others:
            raise ConfigError(
                f"{first.shown} {first.shape} and {array.shown} {array.shape}: the cut axes must have the same "
                f"lengths and windows; here they are {_pairs(others)} and {_pairs(mine)}; give window= by name"
            )
    lengths = tuple(first.shape[axis] for axis in axes[first_name])
    window = tuple(one for one in sizes[first_name] if one is not None)
    chunks = None if first.chunks is None else tuple(first.chunks[axis] for axis in axes[first_name])
    places = cut.places(window, lengths, chunks)
    if not places.count:
        raise ConfigError(f"{first.shown} {first.shape} is smaller than the window {window}")
    return Stack(arrays, sizes, places)


def _pairs(axes: Sequence[tuple[int, int | None]]) -> str:
    return ", ".join(f"{size} of {length}" for length, size in axes)


def _open(file: Located) -> ArrayFile:
    with map_errors(file.shown, secrets=file.remote.secrets):
        array: ArrayFile
        if is_zarr(file.path):
            array = ZarrArray(file.remote, file.path, file.shown)
        elif file.path.partition("?")[0].lower().endswith(HDF5_ENDINGS):
            array = Hdf5Array(file.remote, file.path, file.shown, file.dataset)
        elif file.path.partition("?")[0].lower().endswith(".npy"):
            array = NpyArray(file.remote, file.path, file.shown)
        else:
            raise ConfigError(f"{file.shown}: ArraySource reads .npy, .zarr and {', '.join(HDF5_ENDINGS)}")
    # Others may be of numpy's newer kinds, such as strings of any length, which have no byte order.
    if array.dtype.kind not in "biufc" or array.dtype.newbyteorder("=") not in _STORABLE:
        raise ConfigError(f"{array.shown}: has dtype {array.dtype}; windows are of numbers or bools")
    if not array.shape:
        raise ConfigError(f"{array.shown}: is a single value, which has no windows")
    return array
