"""From (shard, row) pairs to the fields of a batch: one call a field, whatever the number of shards.

The thread that gathers does a bounded number of Python steps a batch. It avoids torch's small operations (views,
slices of views), each of which gives the GIL away and may wait 5 ms for it while the trainer computes in
Python; numpy's do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from cachestream.schema import KEY_FIELD, Field, IntArray
from cachestream.training.batches.buffers import BufferPool, Loan, as_tensor
from cachestream.training.batches.mapped_shards import EpochMaps, FieldAddresses, element_bytes
from cachestream.training.batches.ragged import Ragged, Spans, gather_ragged, layouts_of, wrap_fixed
from cachestream.training.batches.row_views import (
    Pieces,
    Select,
    SpanLayout,
    Window,
    gather_rows,
    select_shared,
)

# Field name → tensor [n, *shape]; where shapes vary a list of tensors, str or bytes, a Padded or a nested tensor.
Columns = dict[str, Any]

# A field of which a block has less than this is gathered for all of it: a call for a few kilobytes is all overhead.
LARGE_BYTES: Final = 1 << 20
_MOST_LISTED: Final = 1 << 19  # values, 4 MiB


class Copy(NamedTuple):
    """A field still to be gathered: rows `wanted` of `rows`, into `out`. `run` may be called in any thread."""

    rows: torch.Tensor
    wanted: torch.Tensor
    out: torch.Tensor

    def run(self, select: Select = select_shared) -> None:
        """Gather it by `select`, without the GIL."""
        select(self.rows, self.wanted, self.out)


@dataclass(slots=True, eq=False)
class _Run:
    """One field of a block: which pieces of the window, and its values `[n, *shape]` if they are gathered already."""

    pieces: Pieces
    index: IntArray
    values: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A run of samples about to be gathered: their places, and their rows in `window` for each field."""

    window: Window
    shards: IntArray
    rows: IntArray
    runs: dict[str, _Run]


def find_block(maps: EpochMaps, shards: IntArray, rows: IntArray) -> Block:
    """Samples `rows` of `shards`, both int64 `[n]`, as pieces of the window that `maps` lie in."""
    window, runs = maps.window, {}
    for field in maps.snapshot.schema.fields:
        if row_bytes := fixed_row_bytes(field):
            offsets = maps.fields[field.name].base[shards] + rows * row_bytes - window.low
            pieces = Pieces.of(row_bytes, offsets)
            runs[field.name] = _Run(pieces, pieces.index(offsets))
    return Block(window, shards, rows, runs)


class SmallSnapshot:
    """The pieces of all samples of a small snapshot, worked out once, for batches that are asked for one by one.

    All shards must be mapped, and stay so.
    """

    def __init__(self, maps: EpochMaps) -> None:
        self._maps = maps
        block = find_block(maps, *maps.locate(np.arange(maps.snapshot.num_samples)))
        self._runs = {
            name: (run.pieces, run.index.reshape(-1, run.pieces.count)) for name, run in block.runs.items()
        }

    @classmethod
    def of(cls, maps: EpochMaps) -> SmallSnapshot | None:
        """None for a snapshot that is too large, or not all mapped."""
        size = maps.snapshot.num_samples * max(1, len(maps.snapshot.schema.fields))
        return cls(maps) if size <= _MOST_LISTED and maps.all_mapped else None

    def block(self, samples: IntArray) -> Block:
        """What to gather `samples` from, int64 `[n]`."""
        shards, rows = self._maps.locate(samples)
        runs = {
            name: _Run(pieces, index[samples].reshape(-1)) for name, (pieces, index) in self._runs.items()
        }
        return Block(self._maps.window, shards, rows, runs)


class Gatherer:
    """Gathers samples of one snapshot. Not thread-safe; all shards of a block must be mapped before.

    `lend_samples` is the most that is gathered at a time: memory is taken for as many. 0 where that varies.
    `with_keys` adds the samples' keys as one more field, a list of str. `ragged` says how fields come whose shape
    varies. `select` copies what is gathered at once.
    """

    def __init__(
        self,
        maps: EpochMaps,
        pool: BufferPool,
        lend_samples: int = 0,
        with_keys: bool = False,
        ragged: Ragged = "list",
        select: Select = select_shared,
    ) -> None:
        self.maps = maps
        self._select = select
        self._with_keys = with_keys
        self._pool = pool
        self._lend_samples = lend_samples
        self._lend = pool.lend if lend_samples else pool.lend_rounded
        self._layouts = layouts_of(ragged, maps.snapshot.schema)
        self._fields = [(field, fixed_row_bytes(field)) for field in maps.snapshot.schema.fields]

    def block(self, shards: IntArray, rows: IntArray) -> Block:
        """Prepare for gathering samples `rows` of `shards`, both int64 `[n]`, in parts."""
        return find_block(self.maps, shards, rows)

    def gather(self, block: Block, start: int, stop: int) -> Columns:
        """Samples `start` to `stop` of `block`, in memory of their own."""
        batches, copies = self.begin(block, [start, stop])
        for copy in copies:
            copy.run(self._select)
        return batches[0]

    def begin(self, block: Block, bounds: Sequence[int]) -> tuple[list[Columns], list[Copy]]:
        """Batches of `block` that are gathered together: samples `bounds[0]` to `bounds[1]`, to `bounds[2]`, ...

        They are filled by the copies returned with them. The maps must not be dropped before.
        """
        spans = list(pairwise(bounds))
        batches: list[Columns] = [{} for _ in spans]
        copies: list[Copy] = []
        for field, row_bytes in self._fields:
            for columns, values in zip(
                batches, self._values(field, row_bytes, block, spans, copies), strict=True
            ):
                columns[field.name] = values
        if self._with_keys:
            for columns, (start, stop) in zip(batches, spans, strict=True):
                columns[KEY_FIELD] = self.keys(block.shards[start:stop], block.rows[start:stop])
        return batches, copies

    def _values(
        self, field: Field, row_bytes: int, block: Block, spans: list[tuple[int, int]], copies: list[Copy]
    ) -> list[Any]:
        """One field of each batch of `spans`; what is still to be copied is added to `copies`."""
        first, last = spans[0][0], spans[-1][1]
        if field.shape is None:
            return [self._varying(field, block, start, stop) for start, stop in spans]
        if not row_bytes or first == last:
            dtype = getattr(torch, field.dtype)
            return [
                torch.empty((stop - start, *field.shape), dtype=dtype, device="cpu") for start, stop in spans
            ]
        run = block.runs[field.name]
        if run.values is not None:
            values = run.values[first:last]
        elif len(block.rows) * row_bytes < LARGE_BYTES:
            run.values, of_all = self._copies(run, block, field, 0, len(block.rows), self._pool.lend_rounded)
            for copy in of_all:
                copy.run(self._select)
            values = run.values[first:last]
        else:
            values, of_these = self._copies(run, block, field, first, last, self._lend)
            copies += of_these
        tensors = [as_tensor(values[start - first : stop - first], field.dtype) for start, stop in spans]
        layout = self._layouts.get(field.name)
        return tensors if layout is None else [wrap_fixed(tensor, field, layout) for tensor in tensors]

    def _copies(
        self, run: _Run, block: Block, field: Field, start: int, stop: int, lend: Callable[[int], Loan]
    ) -> tuple[np.ndarray[Any, Any], list[Copy]]:
        """Memory for samples `start` to `stop` of one field, `[stop - start, *shape]`, and what fills it."""
        pieces, count = run.pieces, stop - start
        row_bytes = pieces.num_bytes * pieces.count
        loan = lend(max(count, self._lend_samples) * row_bytes)
        index = run.index[start * pieces.count : stop * pieces.count]
        out = loan.rows(count * pieces.count, pieces.num_bytes, pieces.unit)
        copies = _copies_of(block.window, pieces, index, out)
        return loan.shaped((count, *(field.shape or ())), numpy_dtype(field.dtype)), copies

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
            out = loan.rows(layout.num_bytes // layout.row_bytes, layout.row_bytes)
            layout.copy(self.maps.window, out, self._select)
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


def _copies_of(window: Window, pieces: Pieces, index: IntArray, out: torch.Tensor) -> list[Copy]:
    """What fills `out` with the `pieces` at `index`: one copy, or one for each strip of them, where the window is too
    wide for pieces as large as these.
    """
    unit, elements, most = pieces.unit, pieces.num_bytes // pieces.unit, window.most_elements(pieces.unit)
    if elements <= most:
        return [Copy(window.rows(pieces.num_bytes, unit), torch.from_numpy(index), out)]
    copies, before = [], 0
    for strip in out.tensor_split(-(-elements // most), dim=1):
        width = strip.shape[1]
        copies.append(Copy(window.rows(width * unit, unit), torch.from_numpy(index + before), strip))
        before += width
    return copies


def fixed_row_bytes(field: Field) -> int:
    """Bytes of one sample's value; 0 where they vary."""
    return 0 if field.shape is None else math.prod(field.shape) * element_bytes(field)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that carries values of torch dtype `dtype`: bfloat16 travels as the bits of uint16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def _texts(values: list[np.ndarray[Any, Any]]) -> list[str]:
    return [value.tobytes().decode("utf-8", "surrogatepass") for value in values]
