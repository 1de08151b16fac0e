"""Fields of one shape, gathered by the part in C: from all mapped shards, into one buffer a field."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from cachestream.schema import IntArray, Schema
from cachestream.training.batches.buffers import BufferPool, Loan, as_tensor
from cachestream.training.batches.gather import Columns, fixed_row_bytes, numpy_dtype
from cachestream.training.batches.mapped_shards import EpochMaps

if TYPE_CHECKING:
    from cachestream.training.batches import _gather


in_c: ModuleType | None
try:
    from cachestream.training.batches import _gather as in_c
except ImportError:  # installed where there was no compiler
    in_c = None


def are_fixed(schema: Schema) -> bool:
    """Whether all fields have one shape, and the part in C is there."""
    return in_c is not None and all(field.shape is not None for field in schema.fields)


def new_queue(threads: int) -> _gather.Queue:
    """A queue of up to `threads` threads; only where the part in C is there."""
    assert in_c is not None
    queue: _gather.Queue = in_c.Queue(threads)
    return queue


# A lone thread that gathers into memory in the caches is slower from here on than one that goes around them.
AROUND_BYTES: Final = 2 << 20


class _Column(NamedTuple):
    name: str
    dtype: str
    stored: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int


class FixedColumns:
    """The fields of samples in `maps`; the shards of those that are gathered must be mapped, and stay so meanwhile."""

    def __init__(self, maps: EpochMaps) -> None:
        self._maps = maps  # the addresses are of its arrays
        self._columns = [
            _Column(f.name, f.dtype, numpy_dtype(f.dtype), f.shape or (), fixed_row_bytes(f))
            for f in maps.snapshot.schema.fields
        ]
        self._sample_bytes = sum(column.row_bytes for column in self._columns)
        self.sources = tuple(
            number
            for column in self._columns
            for number in (maps.fields[column.name].base.ctypes.data, column.row_bytes)
        )

    def lend(
        self, lend: Callable[[int], Loan], size: int, room: int
    ) -> tuple[list[np.ndarray[Any, Any]], tuple[int, ...]]:
        """Memory from `lend` for `room` samples, as fields of `size` samples `[size, *shape]`, and where each begins."""
        arrays, addresses = [], []
        for column in self._columns:
            loan = lend(room * column.row_bytes)
            addresses.append(loan.address)
            arrays.append(loan.shaped((size, *column.shape), column.stored))
        return arrays, tuple(addresses)

    def part(self, arrays: list[np.ndarray[Any, Any]], start: int, stop: int) -> Columns:
        """Samples `start` to `stop` of what was lent, as tensors."""
        return {
            column.name: as_tensor(array[start:stop], column.dtype)
            for column, array in zip(self._columns, arrays, strict=True)
        }

    def gather(self, pool: BufferPool, shards: IntArray, rows: IntArray) -> Columns:
        """Samples `rows` of `shards`, both int64 `[n]`, in memory of `pool`."""
        size = len(rows)
        arrays, outs = self.lend(pool.lend_rounded, size, size)
        assert in_c is not None
        around = size * self._sample_bytes >= AROUND_BYTES
        in_c.gather(shards.ctypes.data, rows.ctypes.data, size, self.sources, outs, around)
        return self.part(arrays, 0, size)
