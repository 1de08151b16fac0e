"""Reading together what a batch needs, where the order of the batches is the caller's: for DataLoader and its like."""

from __future__ import annotations

from typing import Final

from cachestream.mapping import ask_for_all
from cachestream.model import IntArray
from cachestream.training.coldness import Coldness
from cachestream.training.gather import fixed_row_bytes
from cachestream.training.maps import EpochMaps
from cachestream.training.stretches import addresses_of

__all__ = ["ReadTogether"]

_LOOKED_AT: Final = 16  # pages


class ReadTogether:
    """For samples that are asked for batch by batch, in an order that nobody knows: those of a batch are asked of the disk
    together, before the first of them is waited for. Used by one thread at a time.
    """

    def __init__(self, maps: EpochMaps) -> None:
        self._maps = maps
        self._row_bytes = {f.name: fixed_row_bytes(f) for f in maps.snapshot.schema.fields}
        self._coldness = Coldness()

    def reach(self, samples: IntArray) -> None:
        """`samples`, int64 `[n]`, are gathered next; their shards are mapped."""
        if not len(samples) or not self._coldness.look():
            return
        starts, stops = addresses_of(self._maps, self._row_bytes, samples, samples + 1)
        self._coldness.see(starts, _LOOKED_AT)
        if self._coldness.look():
            ask_for_all(starts, stops)
