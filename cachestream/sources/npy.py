"""Arrays that lie in a file as in memory: `.npy` files, and the windows of contiguous data in any file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError
from cachestream.sources.decode.values import ArrayLayout, parse_header
from cachestream.transport.remote import Remote
from cachestream.transport.remote_object import GAP_BYTES, RemoteObject, patiently

HEAD_BYTES: Final = 4096
LOCAL_GAP_BYTES: Final = 32 << 10  # copying these takes about as long as one more read call
MAX_BAND_BYTES: Final = 16 << 20
BATCH_BYTES: Final = 32 << 20  # of bands with gaps, in memory at a time


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


# --- windows -----------------------------------------------------------------------------------


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
