"""The fields of batches, from (shard, row) pairs: one call copies all fields of one shape, and a few calls
copy each field whose shape varies, whatever the number of shards.

A field whose shape varies becomes a list, or one tensor: padded, or nested in torch's jagged layout.

The gathering thread avoids small torch operations (views, slices of views): each releases the GIL, and may
wait 5 ms for it while the trainer computes in Python. Those of numpy do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch.nested import nested_tensor_from_jagged

from cachestream.errors import ConfigError
from cachestream.schema import KEY_FIELD, Field, IntArray, Schema
from cachestream.training.batches import memory
from cachestream.training.batches.memory import BufferPool, Bytes, as_tensor, copy_runs

if TYPE_CHECKING:
    from cachestream.training.batches.mapped_shards import EpochMaps, FieldAddresses

# Field name → tensor [n, *shape]; where shapes vary a list, a Padded or a nested tensor.
Columns = dict[str, Any]

Layout = Literal["list", "padded", "nested"]
Ragged = Layout | Mapping[str, Layout]

_LAYOUTS: Final = ("list", "padded", "nested")
_ALIGNMENT: Final = 16  # of values that are gathered one after the other, enough for every dtype
# Batches of this size or more are written with non-temporal stores, which is faster for a single thread.
_NON_TEMPORAL_BYTES: Final = 2 << 20


def to_container(columns: Columns, schema: Schema) -> Any:
    """Return the fields in the samples' container: a dict, a tuple in their order, or the only field.

    Keys are the field "__key__" of a dict, and the last element of a tuple.
    """
    if schema.container == "dict":
        return columns
    values = tuple(columns[name] for name in schema.names)
    if KEY_FIELD in columns:
        return (*values, columns[KEY_FIELD])
    return values if schema.container == "tuple" else values[0]


class Padded(NamedTuple):
    """A field whose shape varies, as one tensor: `values` `[B, *largest]`, zeros beside each sample.

    `lengths`, int64: `[B]` for fields of one dimension, str and bytes, otherwise the shapes `[B, ndim]`.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """Bool, of the shape of `values`: true for a sample's own elements, false for padding."""
        values, lengths = self.values, self.lengths
        sizes = lengths if lengths.dim() > 1 else lengths[:, None]
        mask = torch.ones(len(sizes), dtype=torch.bool, device=values.device)
        for axis, most in enumerate(values.shape[1:]):
            inside = torch.arange(most, device=values.device) < sizes[:, axis, None]
            mask = mask[..., None] & inside.reshape(len(sizes), *[1] * axis, most)
        return mask


def check_ragged(ragged: object) -> None:
    """Raise ConfigError unless `ragged` is a layout, or a mapping of fields to layouts."""
    given = list(ragged.values()) if isinstance(ragged, Mapping) else [ragged]
    for layout in given:
        if layout not in _LAYOUTS:
            raise ConfigError(
                f"ragged={ragged!r}: give 'list', 'padded' or 'nested', or a mapping of fields to one of "
                "these"
            )


def layouts_of(ragged: Ragged, schema: Schema) -> dict[str, Layout]:
    """Return the layout of each field that does not have the default one: of the fields that a mapping names,
    or else of bytes and fields whose shape varies. Raises ConfigError for names that are not fields.
    """
    if isinstance(ragged, Mapping):
        for name in ragged:
            if name not in schema.names:
                raise ConfigError(f"ragged= names {name!r}, and the samples have {list(schema.names)}")
        return {name: layout for name, layout in ragged.items() if layout != "list"}
    if ragged == "list":
        return {}
    return {field.name: ragged for field in schema.fields if field.shape is None and field.kind != "str"}


def wrap_fixed(values: torch.Tensor, field: Field, layout: Layout) -> Any:
    """Return a field of one shape, `[B, *shape]`, in the layout that `ragged` names for it."""
    shape = field.shape
    if layout == "list" or shape is None:
        return values
    if not shape:
        raise ConfigError(f"ragged= names {field.name!r}, a number: it has no length that could vary")
    count = len(values)
    if layout == "padded":
        sizes = torch.tensor(shape[0] if len(shape) == 1 else shape, dtype=torch.int64, device="cpu")
        return Padded(values, sizes.expand(count, *sizes.shape).clone())
    offsets = torch.arange(count + 1, device="cpu") * shape[0]
    return nested_tensor_from_jagged(values.reshape(count * shape[0], *shape[1:]), offsets)


# --- fields whose shape varies


def gather_varying(
    column: FieldAddresses, layout: Layout, shards: IntArray, rows: IntArray, pool: BufferPool
) -> Any:
    """Return the values of samples `rows` of `shards` in `layout`; for "list" str, bytes or tensors."""
    field, values = column.field, _Values(column, shards, rows, pool)
    if layout == "nested":
        return _gather_nested(field, values)
    if layout == "padded":
        return _gather_padded(field, values)
    if field.kind == "tensor":
        return [as_tensor(array, field.dtype) for array in values.arrays()]
    data, starts, stops = values.gather()
    texts = map(data.data.__getitem__, map(slice, starts, stops))
    return [bytes(v) if field.kind == "bytes" else str(v, "utf-8", "surrogatepass") for v in texts]


class _Values:
    """One field of n samples: `addresses` and bytes, int64 `[n]`, and `shapes` `[n, ndim]` of its values."""

    def __init__(self, column: FieldAddresses, shards: IntArray, rows: IntArray, pool: BufferPool) -> None:
        self.dtype = column.field.numpy_dtype
        self.addresses, self.lengths, varying = column.spans(shards, rows)
        is_tensor = column.field.kind == "tensor"
        self.shapes = column.shapes_of(shards, rows, varying) if is_tensor else self.lengths[:, None]
        if is_tensor and len(varying):
            column.check_shapes(self.shapes, self.lengths, shards)
        self._pool = pool

    def gather(self) -> tuple[Bytes, list[int], list[int]]:
        """Copy all values into one buffer; return its bytes, and the start and end of each value in it."""
        taken = (self.lengths + (_ALIGNMENT - 1)) & -_ALIGNMENT
        ends = np.cumsum(taken)
        starts = ends - taken
        # A whole number of elements of any dtype.
        loan = self._pool.lend_rounded(max(_ALIGNMENT, int(taken.sum())))
        self.copy_to(loan.address + starts)
        return loan.array, starts.tolist(), (starts + self.lengths).tolist()

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """Return the values as arrays of their shapes, all in one buffer."""
        data, starts, stops = self.gather()
        elements, unit = data.view(self.dtype), self.dtype.itemsize
        flat = [elements[start // unit : stop // unit] for start, stop in zip(starts, stops, strict=True)]
        if self.shapes.shape[1] == 1:
            return flat
        return [value.reshape(shape) for value, shape in zip(flat, self.shapes.tolist(), strict=True)]

    def copy_to(self, targets: IntArray) -> None:
        """Copy each value to its address in `targets`, int64 `[n]`."""
        copy_runs(self.addresses, self.lengths, targets)

    def empty(self, *shape: int) -> np.ndarray[Any, Any]:
        """Return memory for `shape`."""
        return self._pool.lend_rounded(math.prod(shape) * self.dtype.itemsize).shaped(shape, self.dtype)


def _gather_padded(field: Field, values: _Values) -> Padded:
    shapes = values.shapes
    most = shapes.max(axis=0, initial=0)
    whole = values.empty(len(shapes), *most.tolist())
    whole.fill(0)
    if (shapes[:, 1:] == most[1:]).all():
        width = whole.nbytes // max(1, len(whole))
        values.copy_to(whole.ctypes.data + np.arange(len(whole)) * width)
    else:  # several dimensions vary: each value goes into a corner of its part
        for target, value in zip(whole, values.arrays(), strict=True):
            target[tuple(map(slice, value.shape))] = value
    lengths = torch.from_numpy(shapes[:, 0].copy() if shapes.shape[1] == 1 else shapes.copy())
    return Padded(as_tensor(whole, field.dtype), lengths)


def _gather_nested(field: Field, values: _Values) -> torch.Tensor:
    shapes = values.shapes
    rest = shapes[:, 1:].max(axis=0, initial=0)
    if not (shapes[:, 1:] == rest).all():
        raise ConfigError(
            f"field {field.name!r} varies in more than its first dimension, which a jagged tensor cannot hold: give "
            f"ragged={{{field.name!r}: 'padded'}}, or 'list'"
        )
    offsets = np.concatenate([[0], np.cumsum(shapes[:, 0])]).astype(np.int64)
    whole = values.empty(int(offsets[-1]), *rest.tolist())
    values.copy_to(whole.ctypes.data + np.cumsum(values.lengths) - values.lengths)
    return nested_tensor_from_jagged(as_tensor(whole, field.dtype), torch.from_numpy(offsets))


# --- fields of one shape, and batches of all fields


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
        container = maps.snapshot.schema.container
        self._is_dict, self._is_tuple = container == "dict", container == "tuple"
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

    def container(self, part: Columns) -> Any:
        """As `to_container`, of samples that have no other fields."""
        if self._is_dict:
            return part
        values = tuple(part.values())
        return values if self._is_tuple else values[0]

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
            column.name: as_tensor(array[start:stop], column.dtype)
            for column, array in zip(self._columns, arrays, strict=True)
        }

    def gather(
        self,
        shards: IntArray,
        rows: IntArray,
        outs: tuple[int, ...],
        _used: object,
    ) -> None:
        """Copy samples `rows` of `shards`, both int64 `[n]`, to the addresses `outs` of `allocate`. The call
        holds `_used`: the maps and the memory.
        """
        if memory.in_c is not None:
            non_temporal = len(rows) * self._sample_bytes >= _NON_TEMPORAL_BYTES
            memory.in_c.gather(
                shards.ctypes.data, rows.ctypes.data, len(rows), self.sources, outs, non_temporal
            )
            return
        places = np.arange(len(rows))
        for column, out in zip(self._columns, outs, strict=True):
            sources = self._maps.fields[column.name].base[shards] + rows * column.row_bytes
            copy_runs(sources, np.full_like(rows, column.row_bytes), out + places * column.row_bytes)


class Gatherer:
    """Gathers samples of one snapshot. Not thread-safe; the shards of all samples must be mapped before.

    `lend_samples`: the most samples gathered at a time, for which memory is taken; 0 where their number
    varies. `with_keys`: add the samples' keys as one more field, a list of str. `ragged`: the layout of
    fields whose shape varies; `stacked`: the one that has one shape in each batch.
    """

    def __init__(
        self,
        maps: EpochMaps,
        pool: BufferPool,
        lend_samples: int = 0,
        with_keys: bool = False,
        ragged: Ragged = "list",
        stacked: str | None = None,
    ) -> None:
        self.maps = maps
        self._with_keys = with_keys
        self._pool = pool
        self._lend_samples = lend_samples
        self._lend = pool.lend if lend_samples else pool.lend_rounded
        self._layouts = layouts_of(ragged, maps.snapshot.schema)
        self._stacked = stacked
        self.fixed = FixedColumns(maps)

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
        arrays, outs = self.fixed.allocate(self._lend, size, max(size, self._lend_samples))
        batches = []
        for start, stop in pairwise(bounds):
            part = slice(start - first, stop - first)
            fixed = self.fixed.part(arrays, part.start, part.stop)
            batches.append(self._batch(fixed, shards[part], rows[part]))
        used = self.maps.keepers, arrays
        return batches, functools.partial(self.fixed.gather, shards, rows, outs, used)

    def _batch(self, fixed: Columns, shards: IntArray, rows: IntArray) -> Columns:
        columns: Columns = {}
        for field in self.maps.snapshot.schema.fields:
            name, layout = field.name, self._layouts.get(field.name, "list")
            if name == self._stacked:
                columns[name] = self._stack(field, fixed, shards, rows)
            elif field.shape is None:
                columns[name] = gather_varying(self.maps.fields[name], layout, shards, rows, self._pool)
            else:
                columns[name] = wrap_fixed(fixed[name], field, layout)
        if self._with_keys:
            columns[KEY_FIELD] = self.keys(shards, rows)
        return columns

    def _stack(self, field: Field, fixed: Columns, shards: IntArray, rows: IntArray) -> torch.Tensor:
        """Return a field that has one shape in this batch, as one tensor."""
        if field.shape is not None:
            tensor: torch.Tensor = fixed[field.name]
            return tensor
        values = _Values(self.maps.fields[field.name], shards, rows, self._pool)
        if (values.shapes != values.shapes[0]).any():
            raise ConfigError(
                f"group_by={field.name!r}: a batch that was drawn without it has samples of several shapes; "
                "give the state or the manifest to a loader without group_by="
            )
        return _gather_padded(field, values).values

    def keys(self, shards: IntArray, rows: IntArray) -> list[str]:
        """Return the keys of samples `rows` of `shards`."""
        keys: list[str] = gather_varying(self.maps.fields[KEY_FIELD], "list", shards, rows, self._pool)
        return keys
