"""Samples that are not in memory: found by page faults, and read from the disk together before they are gathered."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Final

import numpy as np

from cachestream.linux import ask_for_all, count_cached
from cachestream.schema import IntArray
from cachestream.training.batches.columns import read_numbers
from cachestream.training.batches.mapped_shards import EpochMaps, FieldAddresses, fixed_row_bytes

_ENOUGH: Final = 256  # pages in memory, one after the other, after which nothing is missing any more
_UNSEEN: Final = 1


def count_faults() -> int:
    """How often this process has waited for a page from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class Coldness:
    """Whether pages are missing. It is to be seen at the first look; then, from when the process has waited for the
    disk, until `_ENOUGH` pages that were asked for were there, one after the other.
    """

    def __init__(self, faults: Callable[[], int] = count_faults) -> None:
        self._faults = faults
        self._seen = -1
        self._left = _UNSEEN

    def look(self) -> bool:
        """Whether to see what is missing now."""
        before, self._seen = self._seen, self._faults()
        if 0 <= before < self._seen:
            self._left = _ENOUGH
        return self._left > 0

    @property
    def is_first(self) -> bool:
        """Whether nothing has been seen yet."""
        return self._left == _UNSEEN

    def note(self, pages: int, cached: int) -> None:
        """`cached` of `pages` that will be needed are in memory."""
        if cached < pages:
            self._left = _ENOUGH
        else:
            self._left = max(0, self._left - pages)

    def see(self, addresses: IntArray, most: int) -> None:
        """Note of up to `most` of these addresses, int64 `[n]`, whether they are in memory."""
        some = addresses[:: -(-len(addresses) // most) or 1]
        self.note(len(some), count_cached(some))


_NOTHING: Final[IntArray] = np.empty(0, np.int64)


def addresses_of(
    maps: EpochMaps, row_bytes: dict[str, int], starts: IntArray, stops: IntArray
) -> tuple[IntArray, IntArray]:
    """Where samples `starts` up to `stops` lie, as far as their shards are mapped: addresses of the first bytes and of
    those after the last, of each field, those that touch merged. `row_bytes` are those of the fields of one shape.
    """
    shards, rows, counts = _split(maps, starts, stops)
    mapped = maps.mapped[shards]
    shards, rows, counts = shards[mapped], rows[mapped], counts[mapped]
    begins, ends = [_NOTHING], [_NOTHING]
    for name, num_bytes in row_bytes.items():
        places = maps.fields[name]
        if places.field.shape is None:
            low, high = _varying(places, shards, rows, counts)
        else:
            low = places.base[shards] + rows * num_bytes
            high = low + counts * num_bytes
        begins.append(low)
        ends.append(high)
    return merged(np.concatenate(begins), np.concatenate(ends))


def _split(maps: EpochMaps, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Stretches of samples as parts that lie in one shard each: shard, first row and number of rows."""
    parts = [(_NOTHING, _NOTHING, _NOTHING)]
    while len(starts):
        shards, rows = maps.locate(starts)
        ends = np.minimum(stops, maps.starts[shards + 1])
        last = maps.locate(ends - 1)[1]  # of one split, others may lie in between
        parts.append((shards, rows, last + 1 - rows))
        more = ends < stops
        starts, stops = ends[more], stops[more]
    shards, rows, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
    return shards, rows, counts


def _varying(
    places: FieldAddresses, shards: IntArray, rows: IntArray, counts: IntArray
) -> tuple[IntArray, IntArray]:
    lengths = places.row_bytes[shards]
    low = places.base[shards] + rows * lengths
    high = low + counts * lengths
    ragged = np.flatnonzero(lengths < 0)
    if len(ragged):
        shards, rows, counts = shards[ragged], rows[ragged], counts[ragged]
        table, base, unit = places.offsets[shards], places.base[shards], places.item_bytes
        low[ragged] = base + unit * read_numbers(table + rows * 8, 1)[:, 0]
        high[ragged] = base + unit * read_numbers(table + (rows + counts) * 8, 1)[:, 0]
    return low, high


def merged(begins: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The ranges from `begins` up to `ends`, sorted, with those that overlap or touch as one; without empty ones."""
    some = begins < ends
    order = np.argsort(begins[some], kind="stable")
    begins, ends = begins[some][order], np.maximum.accumulate(ends[some][order]) if some.any() else ends[some]
    fresh = np.append(True, begins[1:] > ends[:-1])[: len(begins)]
    last = np.append(fresh[1:], True)[: len(begins)]
    return begins[fresh], ends[last]


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
