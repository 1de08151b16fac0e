"""From (shard, row) pairs to the fields of a batch: one call a field, whatever the number of shards.

The thread that gathers does a bounded number of Python steps a batch. It avoids torch's small operations (views,
slices of views), each of which gives the GIL away and may wait 5 ms for it while the trainer computes in
Python; numpy's do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from cachestream.model import Field, IntArray
from cachestream.training.buffers import BufferPool, as_tensor
from cachestream.training.maps import EpochMaps, FieldAddresses, element_bytes
from cachestream.training.memory import SpanLayout, Window, gather_rows

__all__ = ["Block", "Columns", "Gatherer", "numpy_dtype"]

Columns = dict[str, Any]  # field name → tensor [n, *shape], or a list of tensors, str or bytes

# Narrow columns are gathered a block of batches at a time: a call for a few hundred bytes is all overhead.
_NARROW_BYTES: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A run of samples about to be gathered: their places, and what is worked out for all of them at once.

    `indices` are the rows of the wide fields in `window`, `narrow` the values of the narrow ones.
    """

    window: Window

    shards: IntArray
    rows: IntArray
    indices: dict[str, torch.Tensor]
    narrow: dict[str, np.ndarray[Any, Any]]


class Gatherer:
    """Gathers samples of one snapshot. Not thread-safe; all shards of a block must be mapped before."""

    def __init__(self, maps: EpochMaps, pool: BufferPool, batch_size: int = 0) -> None:
        self.maps = maps
        self._pool = pool
        self._batch_size = batch_size
        self._fields = maps.snapshot.schema.fields

    def block(self, shards: IntArray, rows: IntArray) -> Block:
        """Prepare for gathering samples `rows` of `shards`, both int64 `[n]`, in parts."""
        indices: dict[str, torch.Tensor] = {}
        narrow: dict[str, np.ndarray[Any, Any]] = {}
        window = self.maps.window
        for field in self._fields:
            row_bytes = fixed_row_bytes(field)
            if not row_bytes:
                continue
            index = window.index(self.maps.fields[field.name].base[shards] + rows * row_bytes)
            if row_bytes > _NARROW_BYTES:
                indices[field.name] = index
                continue
            values = np.empty(len(rows) * row_bytes, np.uint8)
            target = torch.from_numpy(values.reshape(len(rows), row_bytes))
            torch.index_select(window.rows(row_bytes), 0, index, out=target)
            narrow[field.name] = shaped(values, field, len(rows))
        return Block(window, shards, rows, indices, narrow)

    def gather(self, block: Block, start: int, stop: int) -> Columns:
        """Samples `start` to `stop` of `block`, in memory of their own."""
        columns: Columns = {}
        for field in self._fields:
            if field.name in block.narrow:
                columns[field.name] = as_tensor(block.narrow[field.name][start:stop], field.dtype)
            elif field.shape is not None:
                columns[field.name] = self._fixed(field, block, start, stop)
            else:
                columns[field.name] = self._varying(field, block, start, stop)
        return columns

    def keys(self, shards: IntArray, rows: IntArray) -> list[str]:
        """The keys of samples `rows` of `shards`."""
        return _texts(self._spans(self.maps.fields["__key__"], shards, rows)[0])

    def _fixed(self, field: Field, block: Block, start: int, stop: int) -> torch.Tensor:
        count, row_bytes = stop - start, fixed_row_bytes(field)
        loan = self._pool.lend(max(count, self._batch_size) * row_bytes)
        if row_bytes and count:
            rows = block.window.rows(row_bytes)
            index = block.indices[field.name][start:stop]
            torch.index_select(rows, 0, index, out=loan.rows(count, row_bytes))
        return as_tensor(shaped(loan.array[: count * row_bytes], field, count), field.dtype)

    def _varying(self, field: Field, block: Block, start: int, stop: int) -> list[Any]:
        places = self.maps.fields[field.name]
        values, shapes = self._spans(places, block.shards[start:stop], block.rows[start:stop])
        if field.kind == "bytes":
            return [value.tobytes() for value in values]
        if field.kind == "str":
            return _texts(values)
        dtype = numpy_dtype(field.dtype)
        return [
            as_tensor(value.view(dtype).reshape(shape), field.dtype)
            for value, shape in zip(values, shapes.tolist(), strict=True)
        ]

    def _spans(
        self, places: FieldAddresses, shards: IntArray, rows: IntArray
    ) -> tuple[list[np.ndarray[Any, Any]], IntArray]:
        """The bytes of each sample's value, as views of one buffer on loan, and their shapes `[n, ndim]`."""
        addresses, lengths, shapes = self._find_spans(places, shards, rows)
        layout = SpanLayout(addresses, lengths, self.maps.room_before)
        loan = self._pool.lend_rounded(layout.num_bytes)
        if layout.num_bytes:
            layout.copy(self.maps.window, loan.rows(layout.num_bytes // layout.row_bytes, layout.row_bytes))
        array, starts = loan.array, layout.starts
        stops = starts + lengths
        return [array[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)], shapes

    def _find_spans(
        self, places: FieldAddresses, shards: IntArray, rows: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Address and bytes of each value, int64 `[n]`, and its shape `[n, ndim]`."""
        lengths = places.row_bytes[shards]
        shapes = places.row_shapes[shards]
        addresses = places.base[shards] + rows * lengths
        ragged = np.flatnonzero(lengths < 0)
        if len(ragged):
            shards, rows = shards[ragged], rows[ragged]
            window = self.maps.window
            ends = gather_rows(window, places.offsets[shards] + rows * 8, 2) * places.item_bytes
            addresses[ragged] = places.base[shards] + ends[:, 0]
            lengths[ragged] = ends[:, 1] - ends[:, 0]
            ndim = places.field.ndim
            if len(places.shapes) and ndim:
                shapes[ragged] = gather_rows(window, places.shapes[shards] + rows * (8 * ndim), ndim)
        return addresses, lengths, shapes


def fixed_row_bytes(field: Field) -> int:
    """Bytes of one sample's value; 0 where they vary."""
    return 0 if field.shape is None else math.prod(field.shape) * element_bytes(field)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that carries values of torch dtype `dtype`: bfloat16 travels as the bits of uint16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def shaped(values: np.ndarray[Any, Any], field: Field, count: int) -> np.ndarray[Any, Any]:
    """uint8 `[n * row_bytes]` as `[n, *shape]` in the field's dtype, without a copy."""
    assert field.shape is not None
    return values.view(numpy_dtype(field.dtype)).reshape(count, *field.shape)


def _texts(values: list[np.ndarray[Any, Any]]) -> list[str]:
    return [value.tobytes().decode("utf-8", "surrogatepass") for value in values]
