"""How the cache grew: a few numbers a second in a file of bounded size, for the plots.

It spans the whole life of the cache: rows come further apart as it grows older, and when the file is
full every other row goes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.private import move, open_private
from cachestream.storage.directory import remove_if_there
from cachestream.storage.faults import translated_disk_errors

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

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._first_s = self._last_s = 0.0
        self._rows = 0
        self._keep(read_history(path))  # a torn last row would shift all that follow

    def append(self, *numbers: int) -> None:
        """Add a row: the numbers of ROW after the time. Left out when the last one is too young to differ."""
        now_s = self._clock()
        # Without this, thinning out alone would halve the old rows again and again, until only the
        # last hour was left. A clock that was set back must not end the recording.
        if self._rows and 0 <= now_s - self._last_s < (self._last_s - self._first_s) / ROWS_AT_MOST:
            return
        row = np.array([(now_s, *numbers)], ROW)
        if self._rows >= ROWS_AT_MOST:
            self._keep(read_history(self._path)[::2])
        with translated_disk_errors(self._path), open(self._path, "ab", opener=open_private) as file:
            file.write(row.tobytes())
        self._rows += 1
        self._last_s = now_s
        self._first_s = self._first_s or now_s

    def _keep(self, rows: npt.NDArray[Any]) -> None:
        temporary = self._path + ".new"
        with translated_disk_errors(temporary):
            try:
                with open(temporary, "wb", opener=open_private) as file:
                    file.write(rows.tobytes())
                move(temporary, self._path)
            finally:
                remove_if_there(temporary)
        self._rows = len(rows)
        if len(rows):
            self._first_s, self._last_s = float(rows["time_s"][0]), float(rows["time_s"][-1])


def read_history(path: str) -> npt.NDArray[Any]:
    """The rows so far, oldest first; a torn last row is left out."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data[: len(data) // ROW.itemsize * ROW.itemsize], ROW)
