"""Fields whose shape varies, gathered as one tensor: padded, or nested in torch's jagged layout.

Short values (a few words, a few numbers) are copied by one call for all samples of a batch, whatever shards they lie in.
Longer ones are copied one by one: that is quicker from some 200 bytes on, and makes no objects that stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from cachestream.errors import ConfigError
from cachestream.schema import Field, IntArray, Schema
from cachestream.training.batches.buffers import BufferPool, as_tensor
from cachestream.training.batches.row_views import Window

Layout = Literal["list", "padded", "nested"]
Ragged = Layout | Mapping[str, Layout]

_LAYOUTS: Final = ("list", "padded", "nested")
_LONG_BYTES: Final = 256  # on the average: a step of Python copies as much as the arithmetic of a call costs
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Padded(NamedTuple):
    """A field whose shape varies, as one tensor: `values` `[B, *largest]`, zeros beside each sample's own part.

    `lengths`, int64: `[B]` for fields of one dimension, str and bytes, otherwise `[B, ndim]`, the shape of each sample.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    @property
    def mask(self) -> torch.Tensor:
        """Which of `values` are a sample's own: bool, of the same shape."""
        sizes = self.lengths if self.lengths.dim() > 1 else self.lengths[:, None]
        mask = torch.ones((), dtype=torch.bool, device=self.values.device)
        for axis in range(self.values.dim() - 1):
            place = torch.arange(self.values.shape[axis + 1], device=self.values.device)
            inside = place < sizes[:, axis, None]
            shape = [len(sizes), *[1] * axis, len(place), *[1] * (self.values.dim() - 2 - axis)]
            mask = mask & inside.reshape(shape)
        return mask.expand(self.values.shape)


class Spans(NamedTuple):
    """The values of one field of n samples: address and bytes of each, int64 `[n]`, and its shape, `[n, ndim]`."""

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
    """The layout of each field that is not given as it always is: fields that a mapping names, or else those whose
    shape varies, and bytes. Raises ConfigError for names that are no fields.
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
    """A field of one shape, `[B, *shape]`, in the layout that was asked for by its name."""
    shape = field.shape
    assert shape is not None
    if not shape:
        raise ConfigError(f"ragged= names {field.name!r}, a number: it has no length that could vary")
    count = len(values)
    if layout == "padded":
        sizes = torch.tensor(shape[0] if len(shape) == 1 else shape, dtype=torch.int64, device="cpu")
        return Padded(values, sizes.expand(count, *sizes.shape).clone())
    offsets = torch.arange(count + 1, device="cpu") * shape[0]
    return _nested(values.reshape(count * shape[0], *shape[1:]), offsets)


def gather_ragged(field: Field, layout: Layout, spans: Spans, window: Window, pool: BufferPool) -> Any:
    """The values at `spans` as a `Padded` or a nested tensor."""
    shapes = spans.shapes if field.kind == "tensor" else spans.lengths[:, None]
    if layout == "nested":
        return _gather_nested(field, spans, shapes, window, pool)
    most = shapes.max(axis=0, initial=0)
    values = _empty(field, (len(shapes), *most.tolist()), pool)
    values.fill(0)
    if (shapes[:, 1:] == most[1:]).all():
        _copy_padded(spans, values, window)
    else:
        _copy_parts(spans, shapes, values, window)
    lengths = torch.from_numpy(shapes[:, 0].copy() if shapes.shape[1] == 1 else shapes.copy())
    return Padded(as_tensor(values, field.dtype), lengths)


def _gather_nested(
    field: Field, spans: Spans, shapes: IntArray, window: Window, pool: BufferPool
) -> torch.Tensor:
    rest = shapes[:, 1:].max(axis=0, initial=0)
    if not (shapes[:, 1:] == rest).all():
        raise ConfigError(
            f"field {field.name!r} varies in more than its first dimension, which a jagged tensor cannot hold: give "
            f"ragged={{{field.name!r}: 'padded'}}, or 'list'"
        )
    offsets = np.concatenate([[0], np.cumsum(shapes[:, 0])]).astype(np.int64)
    values = _empty(field, (int(offsets[-1]), *rest.tolist()), pool)
    flat = values.reshape(-1).view(np.uint8)
    starts = np.cumsum(spans.lengths) - spans.lengths
    if _are_long(spans.lengths):
        _copy_one_by_one(spans, starts, flat, window)
    elif len(flat):
        unit = _row_bytes(values)
        _select(window, spans, unit, torch.from_numpy(flat.reshape(-1, unit)))
    return _nested(as_tensor(values, field.dtype), torch.from_numpy(offsets))


def _nested(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def _empty(field: Field, shape: tuple[int, ...], pool: BufferPool) -> np.ndarray[Any, Any]:
    """Memory for `shape`, in the numpy dtype that carries the field's."""
    dtype = np.dtype("uint16" if field.dtype == "bfloat16" else field.dtype)
    return pool.lend_rounded(math.prod(shape) * dtype.itemsize).shaped(shape, dtype)


def _row_bytes(values: np.ndarray[Any, Any]) -> int:
    """Bytes of one step of the first dimension that varies."""
    row_bytes: int = math.prod(values.shape[1:]) * values.itemsize
    return row_bytes


def _are_long(lengths: IntArray) -> bool:
    return bool(len(lengths)) and int(lengths.sum()) >= _LONG_BYTES * len(lengths)


def _select(window: Window, spans: Spans, unit: int, out: torch.Tensor) -> None:
    """Copy all of `spans` one after the other into `out`, uint8 `[n, unit]`, by one call."""
    counts = spans.lengths // unit
    before = np.cumsum(counts) - counts
    addresses = (
        np.repeat(spans.addresses - before * unit, counts) + np.arange(len(out), dtype=np.int64) * unit
    )
    rows = window.rows(unit)
    torch.index_select(rows, 0, window.index(addresses), out=out.view(-1, *rows.shape[1:]))


def _copy_one_by_one(spans: Spans, starts: IntArray, flat: Bytes, window: Window) -> None:
    places = (spans.addresses - window.low).tolist()
    for place, length, start in zip(places, spans.lengths.tolist(), starts.tolist(), strict=True):
        flat[start : start + length] = window.array[place : place + length]


def _copy_padded(spans: Spans, values: np.ndarray[Any, Any], window: Window) -> None:
    """Into the beginning of each row of `values`: only the first dimension varies."""
    if not values.size:
        return
    flat, width = values.reshape(-1).view(np.uint8), values.nbytes // len(values)
    if _are_long(spans.lengths):
        _copy_one_by_one(spans, np.arange(len(values), dtype=np.int64) * width, flat, window)
        return
    unit = math.prod(values.shape[2:]) * values.itemsize
    counts = spans.lengths // unit
    rows = torch.empty((int(counts.sum()), unit), dtype=torch.uint8, device="cpu")
    _select(window, spans, unit, rows)
    inside = np.arange(width // unit) < counts[:, None]
    flat.reshape(len(values), width // unit, unit)[inside] = rows.numpy()


def _copy_parts(spans: Spans, shapes: IntArray, values: np.ndarray[Any, Any], window: Window) -> None:
    """Into a corner of each of `values`: several dimensions vary."""
    places = (spans.addresses - window.low).tolist()
    for value, place, length, shape in zip(
        values, places, spans.lengths.tolist(), shapes.tolist(), strict=True
    ):
        sample = window.array[place : place + length].view(values.dtype)
        value[tuple(map(slice, shape))] = sample.reshape(shape)
