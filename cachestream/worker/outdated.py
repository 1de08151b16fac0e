"""The shards that another transform has made, by the samples that they hold.

Their units are read anew, in the order of the shards. The transaction that publishes new samples takes the
shards that hold these samples out of the cache: no epoch has a sample in two versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cachestream.schema import IntArray
from cachestream.storage.tables import OutdatedShard
from cachestream.worker.order import END


def pieces_of(spans: IntArray) -> IntArray:
    """The positions in which `spans` lie, int64 `[n, 3]`: each with the offset of the first sample, and the
    one after the last.
    """
    first, offset, last, until = spans.T
    counts = last + (until > 0) - first
    index = np.repeat(np.arange(len(spans)), counts)
    positions = np.arange(len(index)) - (np.cumsum(counts) - counts - first)[index]
    starts = np.where(positions == first[index], offset[index], 0)
    stops = np.where(positions == last[index], until[index], END)
    return np.stack([positions, starts, stops], axis=1)


@dataclass(slots=True)
class Outdated:
    """The outdated `shards`, by id, and the `pieces` of units in them, in the order of the shards.

    A piece is (unit, first offset, offset after the last, id), int64 `[n, 4]`; the unit is -1 where it is
    unknown, or cannot be read here.
    """

    shards: dict[int, OutdatedShard]
    pieces: IntArray
    _by_unit: IntArray = field(init=False)
    _lost: list[int] = field(init=False)  # shards of which no unit can be read anew
    _credit: int = 0  # new samples that have not taken the places of others

    def __post_init__(self) -> None:
        self._by_unit = self.pieces[np.argsort(self.pieces[:, 0], kind="stable")]
        readable = set(self.pieces[self.pieces[:, 0] >= 0, 3].tolist())
        self._lost = [key for key in self.shards if key not in readable]

    @property
    def units(self) -> IntArray:
        """The units that can be read anew, in the order of their shards."""
        units, places = np.unique(self.pieces[:, 0], return_index=True)
        found: IntArray = self.pieces[np.sort(places[units >= 0]), 0]
        return found

    def holding(self, pieces: IntArray) -> list[int]:
        """The ids of the shards that are left and hold samples of `pieces`, int64 `[n, 3]`, in the order of
        these.
        """
        units = self._by_unit[:, 0]
        begun, ended = (np.searchsorted(units, pieces[:, 0], side) for side in ("left", "right"))
        index = np.repeat(np.arange(len(pieces)), ended - begun)
        places = np.arange(len(index)) - (np.cumsum(ended - begun) - ended)[index]
        theirs, ours = self._by_unit[places], pieces[index]
        both = (theirs[:, 1] < ours[:, 2]) & (ours[:, 1] < theirs[:, 2])
        return [key for key in dict.fromkeys(theirs[both, 3].tolist()) if key in self.shards]

    def replaced_by(self, pieces: IntArray, num_samples: int) -> list[int]:
        """The ids of the shards whose places `num_samples` new samples take, which are those of `pieces`.

        Shards of which no unit can be read anew go one by one, as others come.
        """
        ids = self.holding(pieces)
        credit = self._credit + num_samples - sum(self.shards[key].num_samples for key in ids)
        for key in (key for key in self._lost if key in self.shards):
            credit -= self.shards[key].num_samples
            if credit < 0:
                break
            ids.append(key)
        return ids

    def fewest(self, ids: Iterable[int], size_bytes: int) -> list[int]:
        """The first of the shards `ids` that together have `size_bytes`; all if they do not."""
        chosen: list[int] = []
        for key in ids:
            if size_bytes <= 0:
                break
            chosen.append(key)
            size_bytes -= self.shards[key].size_bytes
        return chosen

    def forget(self, ids: Iterable[int], num_samples: int = 0) -> None:
        """Note that the shards `ids` have gone, as `num_samples` new samples came."""
        self._credit += num_samples - sum(self.shards.pop(key).num_samples for key in ids)


def whole_units(units: Sequence[int] | IntArray) -> IntArray:
    """The pieces that are all of `units`."""
    numbers = np.asarray(units, np.int64)
    return np.stack([numbers, np.zeros_like(numbers), np.full_like(numbers, END)], axis=1)
