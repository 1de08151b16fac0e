"""The numbers of units: of the parts of files, in the order of the files or in rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cachestream.schema import IntArray


class FileUnits:
    """The units of several files in order: file i has `counts[i]` (int64 `[num_files]`) of them.

    With several `rounds`, each has every `rounds`-th unit of each file, and neighbouring files begin with
    different ones. `round_ends` are the numbers of units up to the end of each; () for a single round.
    """

    def __init__(self, counts: npt.ArrayLike, rounds: int = 1) -> None:
        self.counts: IntArray = np.asarray(counts, np.int64)
        self._ends: IntArray = np.cumsum(self.counts)
        self._order: IntArray | None = None
        self.round_ends: tuple[int, ...] = ()
        if rounds > 1:
            files, parts = self.locate(np.arange(len(self)))
            turns = (parts - files) % rounds
            self._order = np.argsort(turns, kind="stable")
            self.round_ends = tuple(np.cumsum(np.bincount(turns, minlength=rounds)).tolist())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, units: Any) -> Any:
        """Return the place of a unit in the order of the files; or the places of an array of units."""
        return units if self._order is None else self._order[units]

    def locate(self, units: Any) -> tuple[Any, Any]:
        """Return the file of a unit, and the number of the unit in it; or those of an array of units."""
        places = self.place(units)
        files = np.searchsorted(self._ends, places, side="right")
        return files, places - (self._ends[files] - self.counts[files])
