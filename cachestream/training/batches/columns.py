"""Copies out of mapped shards: rows of fields of one shape, and runs of bytes of any length.

The part in C does both, without the GIL. Where it was not built, torch's `index_select` gathers the rows from
a view of all memory in which a row begins at every byte, and numpy copies the runs one by one. Only the bytes
at the given addresses are read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from cachestream.schema import IntArray, Schema
from cachestream.training.batches.buffers import Bytes, Loan, as_tensor
from cachestream.training.batches.mapped_shards import EpochMaps, fixed_row_bytes, numpy_dtype

if TYPE_CHECKING:
    from cachestream.training.batches import _gather


in_c: ModuleType | None
try:
    from cachestream.training.batches import _gather as in_c
except ImportError:  # no compiler at the installation
    in_c = None

# Field name → tensor [n, *shape]; where shapes vary a list of tensors, str or bytes, a Padded or a nested
# tensor.
Columns = dict[str, Any]

# Batches of this size or more are written with non-temporal stores, which is faster for a single thread.
_NON_TEMPORAL_BYTES: Final = 2 << 20
_FIRST_ADDRESS: Final = 4096  # no page is ever mapped below
_END_ADDRESS: Final = 1 << 48  # of what processors give to programs
_MOST_ROW_BYTES: Final = 1 << 14  # torch counts the bytes of overlapping rows in an int64


def are_fixed(schema: Schema) -> bool:
    """Return whether all fields have one shape, and the part in C is there."""
    return in_c is not None and all(field.shape is not None for field in schema.fields)


def new_queue(threads: int) -> _gather.Queue:
    """Return a queue of up to `threads` threads. Requires the part in C."""
    assert in_c is not None
    queue: _gather.Queue = in_c.Queue(threads)
    return queue


class _Column(NamedTuple):
    name: str
    dtype: str
    stored: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int


class FixedColumns:
    """The fields of one shape of samples in `maps`. The shards of gathered samples must be mapped, and stay
    so.
    """

    def __init__(self, maps: EpochMaps) -> None:
        self._maps = maps  # the addresses are of its arrays
        self._columns = [
            _Column(f.name, f.dtype, numpy_dtype(f.dtype), f.shape, fixed_row_bytes(f))
            for f in maps.snapshot.schema.fields
            if f.shape is not None
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
        """Take memory for `room` samples from `lend`; return it as fields `[size, *shape]`, and the address
        of each.
        """
        arrays, addresses = [], []
        for column in self._columns:
            loan = lend(room * column.row_bytes)
            addresses.append(loan.address)
            arrays.append(loan.shaped((size, *column.shape), column.stored))
        return arrays, tuple(addresses)

    def part(self, arrays: list[np.ndarray[Any, Any]], start: int, stop: int) -> Columns:
        """Return samples `start` to `stop` of the `arrays` of `lend` as tensors."""
        return {
            column.name: as_tensor(array[start:stop], column.dtype)
            for column, array in zip(self._columns, arrays, strict=True)
        }

    def gather(
        self, shards: IntArray, rows: IntArray, arrays: list[np.ndarray[Any, Any]], outs: tuple[int, ...]
    ) -> None:
        """Copy samples `rows` of `shards`, both int64 `[n]`, into the `arrays` of `lend` at `outs`."""
        if in_c is not None:
            non_temporal = len(rows) * self._sample_bytes >= _NON_TEMPORAL_BYTES
            in_c.gather(shards.ctypes.data, rows.ctypes.data, len(rows), self.sources, outs, non_temporal)
            return
        for column, array in zip(self._columns, arrays, strict=True):
            if array.size:
                addresses = self._maps.fields[column.name].base[shards] + rows * column.row_bytes
                _select_rows(addresses, array.view(np.uint8).reshape(len(rows), column.row_bytes))


def copy_runs(sources: IntArray, lengths: IntArray, targets: IntArray) -> None:
    """Copy `lengths` bytes from the addresses `sources` to `targets`, all int64 `[n]`."""
    if in_c is not None:
        sources, lengths, targets = map(np.ascontiguousarray, (sources, lengths, targets))
        in_c.copy_runs(sources.ctypes.data, lengths.ctypes.data, targets.ctypes.data, len(lengths))
        return
    memory = _memory()
    starts, ends = (sources - _FIRST_ADDRESS).tolist(), (targets - _FIRST_ADDRESS).tolist()
    for source, length, target in zip(starts, lengths.tolist(), ends, strict=True):
        memory[target : target + length] = memory[source : source + length]


def read_numbers(addresses: IntArray, width: int) -> IntArray:
    """Return `width` int64 numbers from each of `addresses`, int64 `[n, width]`."""
    memory, num_bytes = _memory(), 8 * width
    items = np.ndarray((len(memory) - num_bytes + 1,), f"V{num_bytes}", memory, strides=(1,))
    return items[addresses - _FIRST_ADDRESS].view(np.int64).reshape(-1, width)


def _select_rows(addresses: IntArray, out: Bytes) -> None:
    """Copy the rows at `addresses`, int64 `[n]`, to `out`, `[n, row_bytes]`; long ones a strip at a time."""
    memory, target, row_bytes = torch.from_numpy(_memory()), torch.from_numpy(out), out.shape[1]
    for start in range(0, row_bytes, _MOST_ROW_BYTES):
        width = min(_MOST_ROW_BYTES, row_bytes - start)
        rows = memory.as_strided((len(memory) - width + 1, width), (1, 1))
        wanted = torch.from_numpy(addresses + (start - _FIRST_ADDRESS))
        torch.index_select(rows, 0, wanted, out=target[:, start : start + width])


@functools.cache
def _memory() -> Bytes:
    """All memory of the process as bytes, from `_FIRST_ADDRESS` on. Most of it is not mapped."""
    size = _END_ADDRESS - _FIRST_ADDRESS
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(_FIRST_ADDRESS)), np.uint8)
