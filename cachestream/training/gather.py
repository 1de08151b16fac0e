"""From (shard, row) pairs to the fields of a batch: one call a field, whatever the number of shards.

The thread that gathers does a bounded number of Python steps a batch. It avoids torch's small operations (views,
slices of views), each of which gives the GIL away and may wait 5 ms for it while the trainer computes in
Python; numpy's do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from cachestream.model import KEY_FIELD, Field, IntArray
from cachestream.training.buffers import BufferPool, as_tensor
from cachestream.training.maps import EpochMaps, FieldAddresses, element_bytes
from cachestream.training.memory import Pieces, SpanLayout, Window, gather_rows
from cachestream.training.ragged import Ragged, Spans, gather_ragged, layouts_of, wrap_fixed

__all__ = ["LARGE_BYTES", "Block", "Columns", "Copy", "Gatherer", "fixed_row_bytes", "numpy_dtype"]

# Field name → tensor [n, *shape]; where shapes vary a list of tensors, str or bytes, a Padded or a nested tensor.
Columns = dict[str, Any]

# Fields are gathered for as many batches at a time as fit in this: a call for a few kilobytes is all overhead. What
# is as large for one batch is left to be copied when the batch is completed.
LARGE_BYTES: Final = 1 << 20


class Copy(NamedTuple):
    """A large field still to be gathered: rows `wanted` of `rows`, into `out`. `run` may be called in any thread."""

    rows: torch.Tensor
    wanted: torch.Tensor
    out: torch.Tensor

    def run(self) -> None:
        """Gather it, without the GIL."""
        torch.index_select(self.rows, 0, self.wanted, out=self.out)


@dataclass(slots=True, eq=False)
class _Run:
    """What is gathered of one field of a block: samples `start` to `stop`, as `[stop - start, *shape]`."""

    pieces: Pieces
    index: IntArray
    start: int = 0
    stop: int = 0
    values: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A run of samples about to be gathered: their places, and their rows in `window` for each field."""

    window: Window
    shards: IntArray
    rows: IntArray
    runs: dict[str, _Run]


class Gatherer:
    """Gathers samples of one snapshot. Not thread-safe; all shards of a block must be mapped before.

    `batch_size` is what most gathers are for: memory is taken for as much. 0 where they vary. `with_keys` adds the
    samples' keys as one more field, a list of str. `ragged` says how fields come whose shape varies.
    """

    def __init__(
        self,
        maps: EpochMaps,
        pool: BufferPool,
        batch_size: int = 0,
        with_keys: bool = False,
        ragged: Ragged = "list",
    ) -> None:
        self.maps = maps
        self._with_keys = with_keys
        self._pool = pool
        self._batch_size = batch_size
        self._lend = pool.lend if batch_size else pool.lend_rounded
        self._layouts = layouts_of(ragged, maps.snapshot.schema)
        self._fields = [(field, fixed_row_bytes(field)) for field in maps.snapshot.schema.fields]

    def block(self, shards: IntArray, rows: IntArray) -> Block:
        """Prepare for gathering samples `rows` of `shards`, both int64 `[n]`, in parts."""
        window, runs = self.maps.window, {}
        for field, row_bytes in self._fields:
            if row_bytes:
                offsets = self.maps.fields[field.name].base[shards] + rows * row_bytes - window.low
                pieces = Pieces.of(row_bytes, offsets)
                runs[field.name] = _Run(pieces, pieces.index(offsets))
        return Block(window, shards, rows, runs)

    def gather(self, block: Block, start: int, stop: int) -> Columns:
        """Samples `start` to `stop` of `block`, in memory of their own."""
        columns, copies = self.begin(block, start, stop)
        for copy in copies:
            copy.run()
        return columns

    def begin(self, block: Block, start: int, stop: int) -> tuple[Columns, list[Copy]]:
        """As `gather`, but large fields are filled only by the copies returned with them.

        The maps must not be dropped before.
        """
        columns: Columns = {}
        copies: list[Copy] = []
        for field, row_bytes in self._fields:
            if field.shape is None:
                columns[field.name] = self._varying(field, block, start, stop)
            elif not row_bytes or start == stop:
                columns[field.name] = torch.empty(
                    (stop - start, *field.shape), dtype=getattr(torch, field.dtype)
                )
            else:
                run = block.runs[field.name]
                if run.values is None or stop > run.stop:
                    copies += self._fill(run, block.window, field, row_bytes, (start, stop))
                part = run.values[start - run.start : stop - run.start]  # type: ignore[index]
                columns[field.name] = as_tensor(part, field.dtype)
                if stop == run.stop:
                    run.values = None  # the memory belongs to those who have the batch
            if self._layouts and field.shape is not None and field.name in self._layouts:
                columns[field.name] = wrap_fixed(columns[field.name], field, self._layouts[field.name])
        if self._with_keys:
            columns[KEY_FIELD] = self.keys(block.shards[start:stop], block.rows[start:stop])
        return columns, copies

    def _fill(
        self, run: _Run, window: Window, field: Field, row_bytes: int, wanted: tuple[int, int]
    ) -> list[Copy]:
        """Gather the next batches of one field, `wanted` being the first of them, or say what is to be copied."""
        start, stop = wanted
        batch = max(stop - start, self._batch_size)
        rows = max(1, LARGE_BYTES // (batch * row_bytes)) * batch
        pieces = run.pieces
        run.start, run.stop = start, max(stop, min(start + rows, len(run.index) // pieces.count))
        run.values = None  # before the next buffer is taken: it may be the one that this gives back
        count = run.stop - start
        loan = self._lend(max(rows, count) * row_bytes)
        copy = Copy(
            window.rows(pieces.num_bytes, pieces.unit),
            torch.from_numpy(run.index[start * pieces.count : run.stop * pieces.count]),
            loan.rows(count * pieces.count, pieces.num_bytes, pieces.unit),
        )
        run.values = shaped(loan.array[: count * row_bytes], field, count)
        if count * row_bytes >= LARGE_BYTES and run.stop == stop:
            return [copy]
        copy.run()
        return []

    def keys(self, shards: IntArray, rows: IntArray) -> list[str]:
        """The keys of samples `rows` of `shards`."""
        return _texts(self._spans(self.maps.fields[KEY_FIELD], shards, rows)[0])

    def _varying(self, field: Field, block: Block, start: int, stop: int) -> Any:
        places = self.maps.fields[field.name]
        shards, rows = block.shards[start:stop], block.rows[start:stop]
        if field.name in self._layouts:
            spans = self._find_spans(places, shards, rows)
            return gather_ragged(
                field, self._layouts[field.name], Spans(*spans), self.maps.window, self._pool
            )
        values, shapes = self._spans(places, shards, rows)
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
