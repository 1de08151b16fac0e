"""Windows of arrays that a file holds uncompressed and contiguous: `.npy` files, and some HDF5 datasets."""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError
from cachestream.sources.windows import plan_bands
from cachestream.transport.ranges import GAP_BYTES, RangedFile, patiently
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import ChangedError

HEAD_BYTES: Final = 4096
MAX_HEADER_BYTES: Final = 1 << 16
LOCAL_GAP_BYTES: Final = 32 << 10  # copying these takes about as long as one more read call
BATCH_BYTES: Final = 32 << 20  # of bands with gaps, in memory at a time
_to_dtype: Final[Callable[[Any], np.dtype[Any]]] = np.lib.format.descr_to_dtype  # has no types in numpy 2.2


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The layout of an array in a file: its elements begin at byte `offset`, in C or Fortran order."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool


def read_window(
    file: RangedFile, layout: ArrayLayout, start: Sequence[int], size: Sequence[int], gap_bytes: int
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


def parse_header(head: memoryview) -> ArrayLayout | int:
    """Return the layout in a `.npy` header, or the size of the header in bytes if `head` is shorter.

    Reads versions 1 to 3 of numpy.lib.format. Raises ValueError for anything else.
    """
    if len(head) < 12 or bytes(head[:6]) != np.lib.format.MAGIC_PREFIX:
        raise ValueError("does not begin as a .npy file")
    wide = head[6] >= 2
    (header_bytes,) = struct.unpack_from("<I" if wide else "<H", head, 8)
    first = 12 if wide else 10
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"a .npy header of {header_bytes} bytes")
    if first + header_bytes > len(head):
        return int(first + header_bytes)
    shape, fortran_order, dtype = _parse_fields(bytes(head[first : first + header_bytes]))
    return ArrayLayout(first + header_bytes, shape, dtype, fortran_order)


@lru_cache(maxsize=256)  # files of one data set mostly share one header, and parsing it is slow
def _parse_fields(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order (True for Fortran) and dtype."""
    fields = ast.literal_eval(header.decode("latin1"))
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ValueError("the .npy header does not hold descr, fortran_order and shape")
    shape = fields["shape"]
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 1 << 62 for n in shape):
        raise ValueError(f"the .npy header holds shape {shape!r}")
    return shape, bool(fields["fortran_order"]), _to_dtype(fields["descr"])


class NpyArray:
    """A `.npy` file, of which the header and then only the bytes of each window are read.

    Thread-safe and picklable. Raises SampleError for a malformed file, or one that was replaced by another
    array, and otherwise as `RangedFile`.
    """

    chunks: tuple[int, ...] | None = None

    def __init__(self, remote: Remote, path: str, shown: str) -> None:
        self._gap_bytes = LOCAL_GAP_BYTES if remote.is_local else GAP_BYTES
        self._remote, self._path = remote, path
        self.shown = shown
        # Replaced as one tuple: other threads read at the same time.
        self._opened = patiently(self._read_header)
        self.shape, self.dtype = self._opened[1].shape, self._opened[1].dtype

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`, C-contiguous, in native byte order."""
        file, layout = self._opened
        try:
            return read_window(file, layout, start, size, self._gap_bytes)
        except ChangedError:
            file, layout = self._read_header()
        if (layout.shape, layout.dtype) != (self.shape, self.dtype):
            raise SampleError(
                f"{self.shown}: was replaced by another array ({layout.dtype}{list(layout.shape)} instead "
                f"of {self.dtype}{list(self.shape)}); start again with a new source"
            )
        self._opened = file, layout
        return read_window(file, layout, start, size, self._gap_bytes)

    def _read_header(self) -> tuple[RangedFile, ArrayLayout]:
        file = RangedFile(self._remote, self._path, self.shown)
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
        return file, found
