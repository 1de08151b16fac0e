"""The share of one node among several: disjoint and complete, whatever order, seed and pass each node has.

Of every run of `count` units each node reads one; which one, a hash of the run's number says. So a
period in how the units lie (pairs of files, sources that take turns) does not become one node's share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError
from cachestream.schema import IntArray

MOST_NODES: Final = 1_000_000
_TEXT: Final = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")


@dataclass(frozen=True, slots=True)
class Partition:
    """Share `index` of `count`, as units by their places in it: places go up with the units, in O(1) memory."""

    index: int
    count: int

    def length(self, num_units: int) -> int:
        """How many of `num_units` units are in the share."""
        runs, rest = divmod(num_units, self.count)
        return runs + int(self._offsets(np.array([runs]))[0] < rest)

    def units(self, places: IntArray) -> IntArray:
        """The units at `places` of the share."""
        units: IntArray = places * self.count + self._offsets(places)
        return units

    def places(self, units: IntArray) -> IntArray:
        """Where `units` lie in the share; -1 for those of other nodes."""
        runs = units // self.count
        return np.where(units % self.count == self._offsets(runs), runs, -1)

    def _offsets(self, runs: IntArray) -> IntArray:
        """Which unit of each run is in the share: all shares are turned by the same hash."""
        turned = _splitmix(runs.astype(np.uint64)) % np.uint64(self.count)
        offsets: IntArray = (turned.astype(np.int64) + self.index) % self.count
        return offsets

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_partition(given: Any) -> Partition | None:
    """`(i, n)` or "i/n", node i of n counted from 0; None for None. Raises ConfigError for anything else."""
    if given is None or isinstance(given, Partition):
        return given
    if isinstance(given, str) and (match := _TEXT.fullmatch(given)):
        given = (int(match[1]), int(match[2]))
    if (
        not isinstance(given, tuple | list)
        or len(given) != 2
        or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in given)
        or not 0 <= given[0] < given[1] <= MOST_NODES
    ):
        raise ConfigError(
            f"partition={given!r}: give (i, n), or 'i/n' on the command line: node i of n, counted from 0, "
            "with one i for each node"
        )
    return Partition(int(given[0]), int(given[1]))


def _splitmix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of each number (Steele, Lea and Flood, OOPSLA 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
