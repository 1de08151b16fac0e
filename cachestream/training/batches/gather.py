"""The fields of batches, from (shard, row) pairs: one call copies all fields of one shape, and a few calls
copy each field whose shape varies, whatever the number of shards.

The gathering thread avoids small torch operations (views, slices of views): each releases the GIL, and may
wait 5 ms for it while the trainer computes in Python. Those of numpy do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from cachestream.schema import KEY_FIELD, IntArray
from cachestream.training.batches import memory
from cachestream.training.batches.ragged import Ragged, gather_varying, layouts_of, wrap_fixed

if TYPE_CHECKING:
    from cachestream.training.batches.mapped_shards import EpochMaps

# Field name → tensor [n, *shape]; where shapes vary a list of tensors, str or bytes, a Padded or a nested
# tensor.
Columns = dict[str, Any]

# Batches of this size or more are written with non-temporal stores, which is faster for a single thread.
_NON_TEMPORAL_BYTES: Final = 2 << 20


class _Column(NamedTuple):
    name: str
    dtype: str
    stored: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int


class FixedColumns:
    """The fields of one shape of samples in `maps`. Gathered samples' shards must be mapped, and stay so."""

    def __init__(self, maps: EpochMaps) -> None:
        self._maps = maps  # the addresses are of its arrays
        self._columns = [
            _Column(f.name, f.dtype, f.numpy_dtype, f.shape, f.row_bytes)
            for f in maps.snapshot.schema.fields
            if f.shape is not None
        ]
        self._sample_bytes = sum(column.row_bytes for column in self._columns)
        bases = (maps.fields[column.name].base.ctypes.data for column in self._columns)
        # For each field the address of its `base` and the bytes of a row, as `_gather` takes them.
        self.sources = tuple(
            number
            for base, column in zip(bases, self._columns, strict=True)
            for number in (base, column.row_bytes)
        )

    def allocate(
        self, lend: Callable[[int], memory.Loan], size: int, room: int
    ) -> tuple[list[np.ndarray[Any, Any]], tuple[int, ...]]:
        """Take memory for `room` samples from `lend`; return fields `[size, *shape]`, and their addresses."""
        arrays, addresses = [], []
        for column in self._columns:
            loan = lend(room * column.row_bytes)
            addresses.append(loan.address)
            arrays.append(loan.shaped((size, *column.shape), column.stored))
        return arrays, tuple(addresses)

    def part(self, arrays: list[np.ndarray[Any, Any]], start: int, stop: int) -> Columns:
        """Return samples `start` to `stop` of the `arrays` of `allocate` as tensors."""
        return {
            column.name: memory.as_tensor(array[start:stop], column.dtype)
            for column, array in zip(self._columns, arrays, strict=True)
        }

    def gather(
        self,
        shards: IntArray,
        rows: IntArray,
        arrays: list[np.ndarray[Any, Any]],
        outs: tuple[int, ...],
        _keepers: object,
    ) -> None:
        """Copy samples `rows` of `shards`, both int64 `[n]`, into the `arrays` of `allocate` at `outs`, from maps
        that are held by `_keepers`.
        """
        if memory.in_c is not None:
            non_temporal = len(rows) * self._sample_bytes >= _NON_TEMPORAL_BYTES
            memory.in_c.gather(
                shards.ctypes.data, rows.ctypes.data, len(rows), self.sources, outs, non_temporal
            )
            return
        for column, array in zip(self._columns, arrays, strict=True):
            if array.size:
                addresses = self._maps.fields[column.name].base[shards] + rows * column.row_bytes
                memory.copy_rows(addresses, array.view(np.uint8).reshape(len(rows), column.row_bytes))


class Gatherer:
    """Gathers samples of one snapshot. Not thread-safe; the shards of all samples must be mapped before.

    `lend_samples`: the most samples gathered at a time, for which memory is taken; 0 where their number
    varies. `with_keys`: add the samples' keys as one more field, a list of str. `ragged`: the layout of
    fields whose shape varies.
    """

    def __init__(
        self,
        maps: EpochMaps,
        pool: memory.BufferPool,
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
        copy()
        return batches[0]

    def begin(
        self, shards: IntArray, rows: IntArray, bounds: Sequence[int]
    ) -> tuple[list[Columns], Callable[[], None]]:
        """Return batches that are gathered together, and the copy that fills their fields of one shape, to be
        called in any thread.

        Batch i has samples `bounds[i]` to `bounds[i + 1]` of `rows` of `shards`, both int64 `[n]`.
        """
        first, last = bounds[0], bounds[-1]
        shards, rows, size = shards[first:last], rows[first:last], last - first
        arrays, outs = self._fixed.allocate(self._lend, size, max(size, self._lend_samples))
        batches = []
        for start, stop in pairwise(bounds):
            part = slice(start - first, stop - first)
            fixed = self._fixed.part(arrays, part.start, part.stop)
            batches.append(self._batch(fixed, shards[part], rows[part]))
        return batches, functools.partial(self._fixed.gather, shards, rows, arrays, outs, self.maps.keepers)

    def _batch(self, fixed: Columns, shards: IntArray, rows: IntArray) -> Columns:
        columns: Columns = {}
        for field in self.maps.snapshot.schema.fields:
            name, layout = field.name, self._layouts.get(field.name, "list")
            if field.shape is None:
                columns[name] = gather_varying(self.maps.fields[name], layout, shards, rows, self._pool)
            else:
                columns[name] = wrap_fixed(fixed[name], field, layout)
        if self._with_keys:
            columns[KEY_FIELD] = self.keys(shards, rows)
        return columns

    def keys(self, shards: IntArray, rows: IntArray) -> list[str]:
        """Return the keys of samples `rows` of `shards`."""
        keys: list[str] = gather_varying(self.maps.fields[KEY_FIELD], "list", shards, rows, self._pool)
        return keys
