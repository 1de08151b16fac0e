"""Files of arrays: where they lie, `.npy` files, and the opening of arrays of every kind, alone or stacked."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import fsspec
import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError, SampleError, SourceError
from cachestream.listing.patterns import (
    HDF5_ENDINGS,
    MAGIC,
    expand_braces,
    is_zarr,
    local_path,
    split_dataset,
)
from cachestream.sources.decode.values import parse_header
from cachestream.sources.hdf5 import Hdf5Array
from cachestream.sources.windows import (
    LOCAL_GAP_BYTES,
    ArrayLayout,
    Sizes,
    WindowGrid,
    WindowOptions,
    read_window,
)
from cachestream.sources.zarr import ZarrArray
from cachestream.transport.object import GAP_BYTES, RemoteObject, patiently
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import ChangedError, map_errors, redact

HEAD_BYTES: Final = 4096
_STORABLE: Final = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


# --- locations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Located:
    """The place of an array: its path for the driver, and the dataset in that file."""

    remote: Remote
    path: str = field(repr=False)  # may be signed
    dataset: str | None

    @property
    def shown(self) -> str:
        """The path as shown in messages."""
        scheme = "" if self.remote.is_local or "://" in self.path else f"{self.remote.protocol}://"
        return redact(scheme + self.path)

    @property
    def name(self) -> str:
        """A unique name: the path as shown, and the dataset in it."""
        return self.shown if self.dataset is None else f"{self.shown}::/{self.dataset.lstrip('/')}"


def locate(remote: Remote, url: str, dataset: str | None) -> list[Located]:
    """Return the arrays that `url` stands for; those found by a wildcard in the order of their names.

    Raises ConfigError for a dataset named twice, SourceError if a wildcard finds nothing, and the errors of
    `map_errors`.
    """
    outer, inner = split_dataset(url)
    if inner is not None and dataset is not None:
        raise ConfigError(f"{redact(url)}: give the dataset in the path or as dataset=, not both")
    with map_errors(redact(outer), secrets=remote.secrets):
        paths = _local_paths(outer) if remote.is_local else _remote_paths(remote, outer)
    if not paths:
        raise SourceError(f"{redact(outer)}: nothing found; check the path or the pattern")
    return [Located(remote, path, inner or dataset) for path in paths]


def _local_paths(url: str) -> list[str]:
    path = local_path(url)
    if os.path.exists(path):  # a name may contain braces and stars
        return [path]
    paths = []
    for one in expand_braces(path):
        paths += sorted(glob.glob(one, recursive=True)) if MAGIC.search(one) else [one]
    return paths


def _remote_paths(remote: Remote, url: str) -> list[str]:
    if "::" in url:
        return [remote.open_for_listing()[1]]
    strip = fsspec.get_filesystem_class(remote.protocol)._strip_protocol
    paths = [str(strip(one)) for one in expand_braces(url)]
    if remote.is_web or not any(map(MAGIC.search, paths)):  # in a web URL "?" begins a query
        return paths
    filesystem, _ = remote.open_for_listing()
    return [path for one in paths for path in sorted(filesystem.glob(one))]


# --- arrays ------------------------------------------------------------------------------------


class ArrayFile(Protocol):
    """An array that can be read in windows. Picklable; `read` may be called from several threads."""

    shown: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`: a new array, C-contiguous, in native byte order."""


class NpyArray:
    """A `.npy` file, of which the header and then only the bytes of each window are read.

    Thread-safe and picklable. Raises SampleError for a malformed file, and otherwise as `RemoteObject`.
    """

    chunks: tuple[int, ...] | None = None

    def __init__(self, remote: Remote, path: str, shown: str) -> None:
        self._gap_bytes = LOCAL_GAP_BYTES if remote.is_local else GAP_BYTES
        self._file = RemoteObject(remote, path, shown)
        self.shown = shown
        self._layout = patiently(self._read_header)
        self.shape, self.dtype = self._layout.shape, self._layout.dtype

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`, C-contiguous, in native byte order."""
        return read_window(self._file, self._layout, start, size, self._gap_bytes)

    def _read_header(self) -> ArrayLayout:
        file = self._file
        try:
            found = parse_header(file.head(HEAD_BYTES))
            if isinstance(found, int):
                found = parse_header(file.head(found))
            if isinstance(found, int):
                raise ValueError("the header is truncated")  # noqa: TRY004  not of an argument
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, Warning) as error:
            raise SampleError(f"{self.shown}: not a usable .npy file: {error}") from error
        have = file.look().size_bytes - found.offset
        want = math.prod(found.shape) * found.dtype.itemsize
        if have < want:
            raise SampleError(f"{self.shown}: truncated: {have} of {want} bytes of the array are there")
        return found


def open_array(file: Located) -> ArrayFile:
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
class Stack:
    """Arrays that are read at the same positions: by name, with the size of a window in each.

    An array whose file was replaced is opened anew, once for all kinds of files.
    """

    files: Mapping[str, Located]
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


def open_stack(files: Mapping[str, Located], cut: WindowOptions) -> Stack:
    """Open the arrays at `files`. Raises ConfigError if the windows of `cut` do not fit them."""
    arrays: dict[str, ArrayFile] = {}
    for name, file in files.items():
        with map_errors(file.shown, secrets=file.remote.secrets):
            arrays[name] = open_array(file)
    sizes = {name: cut.sizes_of(name, len(array.shape), array.shown) for name, array in arrays.items()}
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
    grid = cut.grid(window, lengths, chunks)
    if not grid.count:
        raise ConfigError(f"{first.shown} {first.shape} is smaller than the window {window}")
    return Stack(files, arrays, sizes, grid)


def _describe_axes(axes: Sequence[tuple[int, int | None]]) -> str:
    return ", ".join(f"{size} of {length}" for length, size in axes)
