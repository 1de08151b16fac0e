"""The fields of batches, from (shard, row) pairs: one call copies all fields of one shape, and a few calls
copy each field whose shape varies, whatever the number of shards.

The gathering thread avoids small torch operations (views, slices of views): each releases the GIL, and may
wait 5 ms for it while the trainer computes in Python. Those of numpy do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cachestream.schema import KEY_FIELD, Field, IntArray
from cachestream.training.batches.buffers import BufferPool
from cachestream.training.batches.columns import Columns, FixedColumns
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.batches.ragged import Ragged, find_spans, gather_varying, layouts_of, wrap_fixed


class Copy(NamedTuple):
    """A copy of the fields of one shape of a few batches, still to run, in any thread."""

    columns: FixedColumns
    shards: IntArray
    rows: IntArray
    arrays: list[np.ndarray[Any, Any]]
    outs: tuple[int, ...]

    def run(self) -> None:
        """Copy the rows, without the GIL."""
        self.columns.gather(self.shards, self.rows, self.arrays, self.outs)


class Gatherer:
    """Gathers samples of one snapshot. Not thread-safe; the shards of all samples must be mapped before.

    `lend_samples`: the most samples gathered at a time, for which memory is taken; 0 where their number
    varies. `with_keys`: add the samples' keys as one more field, a list of str. `ragged`: the layout of
    fields whose shape varies.
    """

    def __init__(
        self,
        maps: EpochMaps,
        pool: BufferPool,
        lend_samples: int = 0,
        with_keys: bool = False,
        ragged: Ragged = "list",
    ) -> None:
        self.maps = maps
        self._with_keys = with_keys
        self._pool = pool
        self._lend_samples = lend_samples
        self._lend = pool.lend if lend_samples else pool.lend_rounded
        self._layouts = layouts_of(ragged, maps.snapshot.schema)
        self._fixed = FixedColumns(maps)

    def gather(self, shards: IntArray, rows: IntArray) -> Columns:
        """Return samples `rows` of `shards`, both int64 `[n]`, in memory of their own."""
        batches, copy = self.begin(shards, rows, [0, len(rows)])
        copy.run()
        return batches[0]

    def begin(self, shards: IntArray, rows: IntArray, bounds: Sequence[int]) -> tuple[list[Columns], Copy]:
        """Return batches that are gathered together, and the copy that fills their fields of one shape.

        Batch i has samples `bounds[i]` to `bounds[i + 1]` of `rows` of `shards`, both int64 `[n]`. The maps
        must not be dropped before the copy has run.
        """
        first, last = bounds[0], bounds[-1]
        shards, rows, size = shards[first:last], rows[first:last], last - first
        arrays, outs = self._fixed.lend(self._lend, size, max(size, self._lend_samples))
        batches = [
            self._batch(shards, rows, arrays, start - first, stop - first) for start, stop in pairwise(bounds)
        ]
        return batches, Copy(self._fixed, shards, rows, arrays, outs)

    def _batch(
        self, shards: IntArray, rows: IntArray, arrays: list[np.ndarray[Any, Any]], start: int, stop: int
    ) -> Columns:
        fixed = self._fixed.part(arrays, start, stop)
        shards, rows = shards[start:stop], rows[start:stop]
        columns = {
            field.name: self._varying(field, shards, rows)
            if field.shape is None
            else self._wrapped(field, fixed[field.name])
            for field in self.maps.snapshot.schema.fields
        }
        if self._with_keys:
            columns[KEY_FIELD] = self.keys(shards, rows)
        return columns

    def _wrapped(self, field: Field, values: Any) -> Any:
        layout = self._layouts.get(field.name)
        return values if layout is None else wrap_fixed(values, field, layout)

    def _varying(self, field: Field, shards: IntArray, rows: IntArray) -> Any:
        spans = find_spans(self.maps.fields[field.name], shards, rows)
        return gather_varying(field, self._layouts.get(field.name, "list"), spans, self._pool)

    def keys(self, shards: IntArray, rows: IntArray) -> list[str]:
        """Return the keys of samples `rows` of `shards`."""
        column = self.maps.fields[KEY_FIELD]
        keys: list[str] = gather_varying(column.field, "list", find_spans(column, shards, rows), self._pool)
        return keys
