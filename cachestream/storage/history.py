"""How the cache grew: a few numbers a second in a file of bounded size, for the plots.

When the file is full every other row goes, so it always spans the whole life of the cache, more and
more coarsely.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["ROW", "History", "read_history"]

ROWS_AT_MOST: Final = 1024
ROW: Final = np.dtype(
    [
        ("time_s", "<f8"),  # since the epoch, for plots only
        ("samples", "<i8"),
        ("size_bytes", "<i8"),
        ("limit_bytes", "<i8"),
        ("written_samples", "<i8"),
        ("evicted_samples", "<i8"),
        ("fetched_bytes", "<i8"),
        ("snapshots", "<i8"),
    ]
)


class History:
    """Appends to the history at `path`; one writer, the supervisor."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rows = len(read_history(path))

    def append(self, *numbers: int) -> None:
        """Add a row: the numbers of ROW after the time."""
        row = np.array([(time.time(), *numbers)], ROW)
        if self._rows >= ROWS_AT_MOST:
            kept = read_history(self._path)[::2]
            temporary = self._path + ".new"
            with open(temporary, "wb", opener=_private) as file:
                file.write(kept.tobytes())
            os.replace(temporary, self._path)
            self._rows = len(kept)
        with open(self._path, "ab", opener=_private) as file:
            file.write(row.tobytes())
        self._rows += 1


def read_history(path: str) -> npt.NDArray[Any]:
    """The rows so far, oldest first; a torn last row is left out."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
