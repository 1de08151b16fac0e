"""Samples whose pages are not in memory: found by page faults, and read ahead together before they are
gathered.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Final

import numpy as np

from cachestream.linux import ask_for_all, count_cached
from cachestream.schema import IntArray
from cachestream.training.batches.columns import read_numbers
from cachestream.training.batches.mapped_shards import EpochMaps, FieldAddresses, fixed_row_bytes

_ENOUGH: Final = 256  # consecutive pages found in memory after which all are taken to be there
_NONE_CHECKED: Final = 1


def count_faults() -> int:
    """Return the number of page faults of this process that read from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class Coldness:
    """Estimates whether pages are missing: before any was checked, and from a page fault that read from the
    disk until `_ENOUGH` consecutive pages were found in memory.
    """

    def __init__(self, faults: Callable[[], int] = count_faults) -> None:
        self._faults = faults
        self._last_faults = -1
        self._pages_left = _NONE_CHECKED

    def may_miss_pages(self) -> bool:
        """Return whether pages may be missing now."""
        before, self._last_faults = self._last_faults, self._faults()
        if 0 <= before < self._last_faults:
            self._pages_left = _ENOUGH
        return self._pages_left > 0

    @property
    def is_first(self) -> bool:
        """True before the first pages were noted."""
        return self._pages_left == _NONE_CHECKED

    def note(self, pages: int, cached: int) -> None:
        """Note that `cached` of `pages` that will be needed are in memory."""
        if cached < pages:
            self._pages_left = _ENOUGH
        else:
            self._pages_left = max(0, self._pages_left - pages)

    def check(self, addresses: IntArray, most: int) -> None:
        """Note how many of up to `most` of `addresses`, int64 `[n]`, are in memory."""
        some = addresses[:: -(-len(addresses) // most) or 1]
        self.note(len(some), count_cached(some))


_NOTHING: Final[IntArray] = np.empty(0, np.int64)


def addresses_of(
    maps: EpochMaps, row_bytes: dict[str, int], starts: IntArray, stops: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the address ranges of samples `starts` up to `stops`, as first bytes and ends: of each field, as
    far as the shards are mapped, with ranges that touch merged. `row_bytes` are those of the fields of one
    shape.
    """
    shards, rows, counts = _split(maps, starts, stops)
    mapped = maps.mapped[shards]
    shards, rows, counts = shards[mapped], rows[mapped], counts[mapped]
    begins, ends = [_NOTHING], [_NOTHING]
    for name, num_bytes in row_bytes.items():
        column = maps.fields[name]
        if column.field.shape is None:
            low, high = _varying(column, shards, rows, counts)
        else:
            low = column.base[shards] + rows * num_bytes
            high = low + counts * num_bytes
        begins.append(low)
        ends.append(high)
    return merged(np.concatenate(begins), np.concatenate(ends))


def _split(maps: EpochMaps, starts: IntArray, stops: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Divide ranges of samples into parts within one shard: shard, first row and number of rows."""
    parts = [(_NOTHING, _NOTHING, _NOTHING)]
    while len(starts):
        shards, rows = maps.locate(starts)
        ends = np.minimum(stops, maps.starts[shards + 1])
        last = maps.locate(ends - 1)[1]  # rows of another split may lie in between
        parts.append((shards, rows, last + 1 - rows))
        more = ends < stops
        starts, stops = ends[more], stops[more]
    shards, rows, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
    return shards, rows, counts


def _varying(
    column: FieldAddresses, shards: IntArray, rows: IntArray, counts: IntArray
) -> tuple[IntArray, IntArray]:
    lengths = column.row_bytes[shards]
    low = column.base[shards] + rows * lengths
    high = low + counts * lengths
    ragged = np.flatnonzero(lengths < 0)
    if len(ragged):
        shards, rows, counts = shards[ragged], rows[ragged], counts[ragged]
        table, base, unit = column.offsets[shards], column.base[shards], column.item_bytes
        low[ragged] = base + unit * read_numbers(table + rows * 8, 1)[:, 0]
        high[ragged] = base + unit * read_numbers(table + (rows + counts) * 8, 1)[:, 0]
    return low, high


def merged(begins: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """Return the ranges from `begins` up to `ends` sorted, without empty ones; those that overlap or touch
    are merged.
    """
    some = begins < ends
    order = np.argsort(begins[some], kind="stable")
    begins, ends = begins[some][order], np.maximum.accumulate(ends[some][order]) if some.any() else ends[some]
    fresh = np.append(True, begins[1:] > ends[:-1])[: len(begins)]
    last = np.append(fresh[1:], True)[: len(begins)]
    return begins[fresh], ends[last]


_CHECKED_PAGES: Final = 16


class ReadTogether:
    """Reads the samples of a batch from the disk together, where the order of batches is not known in
    advance. Used by one thread at a time.
    """

    def __init__(self, maps: EpochMaps) -> None:
        self._maps = maps
        self._row_bytes = {f.name: fixed_row_bytes(f) for f in maps.snapshot.schema.fields}
        self._coldness = Coldness()

    def reach(self, samples: IntArray) -> None:
        """Read ahead `samples`, int64 `[n]`, which are gathered next, and whose shards are mapped."""
        if not len(samples) or not self._coldness.may_miss_pages():
            return
        starts, stops = addresses_of(self._maps, self._row_bytes, samples, samples + 1)
        self._coldness.check(starts, _CHECKED_PAGES)
        if self._coldness.may_miss_pages():
            ask_for_all(starts, stops)
