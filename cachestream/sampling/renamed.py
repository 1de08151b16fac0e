"""Units of an earlier listing found in a later one, by their names: what is cached of them need not be fetched again."""

from __future__ import annotations

import os

import numpy as np
import xxhash

from cachestream.model import IntArray
from cachestream.remote.stored import AnyNames
from cachestream.sampling.order import Order

__all__ = ["EarlierNames", "EarlierOrder"]


class EarlierNames:
    """Where names stand in an earlier listing: 16 bytes for each of its names."""

    def __init__(self, names: AnyNames) -> None:
        self._names = names
        hashes = np.fromiter(map(_hash, names), np.uint64, len(names))
        self._places = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._places]

    def places(self, names: list[str]) -> IntArray:
        """The place of each of `names`; -1 for those that are not there, or more than once."""
        hashes = np.fromiter(map(_hash, names), np.uint64, len(names))
        first, after = (np.searchsorted(self._hashes, hashes, side) for side in ("left", "right"))
        found = np.full(len(names), -1, np.int64)
        for index in np.flatnonzero(after - first == 1).tolist():
            place = int(self._places[first[index]])
            if self._names[place] == names[index]:
                found[index] = place
        return found


class EarlierOrder:
    """The order of a pass over an earlier listing, asked by the units of the listing `names`."""

    def __init__(self, order: Order, earlier: EarlierNames, names: AnyNames) -> None:
        self._order, self._earlier, self._names = order, earlier, names

    def positions(self, units: IntArray) -> IntArray:
        """Where `units` lay in that pass, -1 where they did not."""
        return self._order.positions(self._earlier.places([self._names[unit] for unit in units.tolist()]))


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(name))
