"""Fields whose shape varies, gathered as lists, or as one tensor: padded, or nested in torch's jagged layout.

The values of a field are copied by one call for all samples of a batch, whatever shards they lie in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch.nested import nested_tensor_from_jagged

from cachestream.errors import ConfigError
from cachestream.schema import Field, IntArray, Schema
from cachestream.training.batches.buffers import BufferPool, Bytes, as_tensor
from cachestream.training.batches.columns import copy_runs, read_numbers
from cachestream.training.batches.mapped_shards import FieldAddresses, numpy_dtype

Layout = Literal["list", "padded", "nested"]
Ragged = Layout | Mapping[str, Layout]

_LAYOUTS: Final = ("list", "padded", "nested")
_ALIGNMENT: Final = 16  # of values that are gathered one after the other, enough for every dtype


class Padded(NamedTuple):
    """A field whose shape varies, as one tensor: `values` `[B, *largest]`, zeros beside each sample's own
    part.

    `lengths`, int64: `[B]` for fields of one dimension, str and bytes, otherwise `[B, ndim]`, the shape of
    each sample.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """Bool, of the shape of `values`: true for a sample's own elements, false for padding."""
        sizes = self.lengths if self.lengths.dim() > 1 else self.lengths[:, None]
        mask = torch.ones((), dtype=torch.bool, device=self.values.device)
        for axis in range(self.values.dim() - 1):
            place = torch.arange(self.values.shape[axis + 1], device=self.values.device)
            inside = place < sizes[:, axis, None]
            shape = [len(sizes), *[1] * axis, len(place), *[1] * (self.values.dim() - 2 - axis)]
            mask = mask & inside.reshape(shape)
        return mask.expand(self.values.shape)


class Spans(NamedTuple):
    """The values of one field of n samples: address and bytes of each, int64 `[n]`, and its shape, `[n,
    ndim]`.
    """

    addresses: IntArray
    lengths: IntArray
    shapes: IntArray


def check_ragged(ragged: object) -> None:
    """Raise ConfigError unless `ragged` is a layout, or a mapping of fields to layouts."""
    given = list(ragged.values()) if isinstance(ragged, Mapping) else [ragged]
    for layout in given:
        if layout not in _LAYOUTS:
            raise ConfigError(
                f"ragged={ragged!r}: give 'list', 'padded' or 'nested', or a mapping of fields to one of these"
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
    assert shape is not None
    if not shape:
        raise ConfigError(f"ragged= names {field.name!r}, a number: it has no length that could vary")
    count = len(values)
    if layout == "padded":
        sizes = torch.tensor(shape[0] if len(shape) == 1 else shape, dtype=torch.int64, device="cpu")
        return Padded(values, sizes.expand(count, *sizes.shape).clone())
    offsets = torch.arange(count + 1, device="cpu") * shape[0]
    return nested_tensor_from_jagged(values.reshape(count * shape[0], *shape[1:]), offsets)


def find_spans(column: FieldAddresses, shards: IntArray, rows: IntArray) -> Spans:
    """Return the spans of one field of samples `rows` of `shards`."""
    lengths = column.row_bytes[shards]
    shapes = column.row_shapes[shards]
    addresses = column.base[shards] + rows * lengths
    ragged = np.flatnonzero(lengths < 0)
    if len(ragged):
        shards, rows = shards[ragged], rows[ragged]
        ends = read_numbers(column.offsets[shards] + rows * 8, 2) * column.item_bytes
        addresses[ragged] = column.base[shards] + ends[:, 0]
        lengths[ragged] = ends[:, 1] - ends[:, 0]
        ndim = column.field.ndim
        if len(column.shapes) and ndim:
            shapes[ragged] = read_numbers(column.shapes[shards] + rows * (8 * ndim), ndim)
    return Spans(addresses, lengths, shapes)


def gather_varying(field: Field, layout: Layout, spans: Spans, pool: BufferPool) -> Any:
    """Return the values at `spans` in `layout`; str, bytes and lists of tensors for "list"."""
    if layout == "nested":
        return _gather_nested(field, spans, pool)
    if layout == "padded":
        return _gather_padded(field, spans, pool)
    if field.kind == "tensor":
        arrays = _gather_arrays(numpy_dtype(field.dtype), spans, pool)
        return [as_tensor(array, field.dtype) for array in arrays]
    data, starts, stops = _gather_bytes(spans, pool)
    values = map(data.data.__getitem__, map(slice, starts, stops))
    return [bytes(v) if field.kind == "bytes" else str(v, "utf-8", "surrogatepass") for v in values]


def _gather_arrays(dtype: np.dtype[Any], spans: Spans, pool: BufferPool) -> list[np.ndarray[Any, Any]]:
    """Return the values as arrays of their shapes, all in one buffer."""
    data, starts, stops = _gather_bytes(spans, pool)
    values, unit = data.view(dtype), dtype.itemsize
    flat = [values[start // unit : stop // unit] for start, stop in zip(starts, stops, strict=True)]
    if spans.shapes.shape[1] == 1:
        return flat
    return [value.reshape(shape) for value, shape in zip(flat, spans.shapes.tolist(), strict=True)]


def _gather_bytes(spans: Spans, pool: BufferPool) -> tuple[Bytes, list[int], list[int]]:
    """Copy all values into one buffer; return its bytes, and the start and the end of each value in it."""
    taken = (spans.lengths + (_ALIGNMENT - 1)) & -_ALIGNMENT
    ends = np.cumsum(taken)
    starts = ends - taken
    loan = pool.lend_rounded(max(_ALIGNMENT, int(taken.sum())))  # a whole number of elements of any dtype
    copy_runs(spans.addresses, spans.lengths, loan.address + starts)
    return loan.array, starts.tolist(), (starts + spans.lengths).tolist()


def _shapes(field: Field, spans: Spans) -> IntArray:
    return spans.shapes if field.kind == "tensor" else spans.lengths[:, None]


def _gather_padded(field: Field, spans: Spans, pool: BufferPool) -> Padded:
    shapes = _shapes(field, spans)
    most = shapes.max(axis=0, initial=0)
    values = _empty(field, (len(shapes), *most.tolist()), pool)
    values.fill(0)
    if (shapes[:, 1:] == most[1:]).all():
        width = values.nbytes // max(1, len(values))
        copy_runs(spans.addresses, spans.lengths, values.ctypes.data + np.arange(len(values)) * width)
    else:  # several dimensions vary: each value goes into a corner of its part
        for value, part in zip(values, _gather_arrays(values.dtype, spans, pool), strict=True):
            value[tuple(map(slice, part.shape))] = part
    lengths = torch.from_numpy(shapes[:, 0].copy() if shapes.shape[1] == 1 else shapes.copy())
    return Padded(as_tensor(values, field.dtype), lengths)


def _gather_nested(field: Field, spans: Spans, pool: BufferPool) -> torch.Tensor:
    shapes = _shapes(field, spans)
    rest = shapes[:, 1:].max(axis=0, initial=0)
    if not (shapes[:, 1:] == rest).all():
        raise ConfigError(
            f"field {field.name!r} varies in more than its first dimension, which a jagged tensor cannot hold: give "
            f"ragged={{{field.name!r}: 'padded'}}, or 'list'"
        )
    offsets = np.concatenate([[0], np.cumsum(shapes[:, 0])]).astype(np.int64)
    values = _empty(field, (int(offsets[-1]), *rest.tolist()), pool)
    starts = np.cumsum(spans.lengths) - spans.lengths
    copy_runs(spans.addresses, spans.lengths, values.ctypes.data + starts)
    return nested_tensor_from_jagged(as_tensor(values, field.dtype), torch.from_numpy(offsets))


def _empty(field: Field, shape: tuple[int, ...], pool: BufferPool) -> np.ndarray[Any, Any]:
    """Return memory for `shape`, in the numpy dtype that carries the dtype of `field`."""
    dtype = numpy_dtype(field.dtype)
    return pool.lend_rounded(math.prod(shape) * dtype.itemsize).shaped(shape, dtype)
