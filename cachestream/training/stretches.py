"""Stretches of samples as stretches of memory: what is to be asked of the disk for them."""

from __future__ import annotations

from typing import Final

import numpy as np

from cachestream.model import IntArray
from cachestream.training.maps import EpochMaps, FieldAddresses
from cachestream.training.memory import gather_rows

__all__ = ["addresses_of", "merged"]

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
            low, high = _varying(maps, places, shards, rows, counts)
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
    maps: EpochMaps, places: FieldAddresses, shards: IntArray, rows: IntArray, counts: IntArray
) -> tuple[IntArray, IntArray]:
    lengths = places.row_bytes[shards]
    low = places.base[shards] + rows * lengths
    high = low + counts * lengths
    ragged = np.flatnonzero(lengths < 0)
    if len(ragged):
        shards, rows, counts = shards[ragged], rows[ragged], counts[ragged]
        table, window = places.offsets[shards], maps.window
        base, unit = places.base[shards], places.item_bytes
        low[ragged] = base + unit * gather_rows(window, table + rows * 8, 1)[:, 0]
        high[ragged] = base + unit * gather_rows(window, table + (rows + counts) * 8, 1)[:, 0]
    return low, high


def merged(begins: IntArray, ends: IntArray) -> tuple[IntArray, IntArray]:
    """The ranges from `begins` up to `ends`, sorted, with those that overlap or touch as one; without empty ones."""
    some = begins < ends
    order = np.argsort(begins[some], kind="stable")
    begins, ends = begins[some][order], np.maximum.accumulate(ends[some][order]) if some.any() else ends[some]
    fresh = np.append(True, begins[1:] > ends[:-1])[: len(begins)]
    last = np.append(fresh[1:], True)[: len(begins)]
    return begins[fresh], ends[last]
