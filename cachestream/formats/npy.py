"""Windows of `.npy` files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy.typing as npt

from cachestream.sources.api import (
    ArrayFile,
    ArrayLayout,
    Remote,
    RemoteObject,
    SampleError,
    parse_npy_header,
    patiently,
    read_window,
)

HEAD_BYTES: Final = 4096


class NpyArray(ArrayFile):
    """A `.npy` file, of which the header and then only the bytes of each window are read.

    Thread-safe and picklable. Raises SampleError for a malformed file, and otherwise as `RemoteObject`.
    """

    array_endings = (".npy",)
    is_sample = True

    def __init__(self, remote: Remote, path: str, shown: str, dataset: str | None) -> None:
        self._file = RemoteObject(remote, path, shown)
        self.shown = shown
        self._layout = patiently(self._read_header)
        self.shape, self.dtype = self._layout.shape, self._layout.dtype

    def read(self, start: Sequence[int], size: Sequence[int]) -> npt.NDArray[Any]:
        """Return the window of shape `size` at `start`, C-contiguous, in native byte order."""
        return read_window(self._file, self._layout, start, size)

    def _read_header(self) -> ArrayLayout:
        file = self._file
        try:
            found = parse_npy_header(file.head(HEAD_BYTES))
            if isinstance(found, int):
                found = parse_npy_header(file.head(found))
            if isinstance(found, int):
                raise ValueError("the header is truncated")  # noqa: TRY004  not of an argument
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, Warning) as error:
            raise SampleError(f"{self.shown}: not a usable .npy file: {error}") from error
        have = file.look().size_bytes - found.offset
        want = math.prod(found.shape) * found.dtype.itemsize
        if have < want:
            raise SampleError(f"{self.shown}: truncated: {have} of {want} bytes of the array are there")
        return found
