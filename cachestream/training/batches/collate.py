"""The container of a batch: fields stacked into tensors, or lists, as torch's default collate would.

torch's default collate looks up the type of the first sample in a registry that may be extended (see the
documentation of `torch.utils.data.default_collate`). So the first sample of our batches has a subclass of
dict, tuple, tensor, str or bytes that is registered there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.utils.data._utils.collate import collate as collate_with
from torch.utils.data._utils.collate import default_collate_fn_map

from cachestream.errors import ConfigError
from cachestream.schema import KEY_FIELD, Schema

if TYPE_CHECKING:
    from cachestream.training.batches.gather import Columns


class Stacked:
    """A sequence of samples that are stacked already."""

    def stacked(self) -> Any:
        """Return the samples as one batch; None if single samples may have been changed."""
        raise NotImplementedError


class _Dict(dict[str, Any]):
    pass


class _Tuple(tuple[Any, ...]):
    __slots__ = ()


class _Str(str):
    __slots__ = ()


class _Bytes(bytes):
    __slots__ = ()


class _Tensor(torch.Tensor):
    # Results of operations on it are ordinary tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_KINDS: Final[dict[type, Any]] = {dict: _Dict, tuple: _Tuple, str: _Str, bytes: _Bytes}
_PLAIN: Final[dict[type, Any]] = {mark: kind for kind, mark in _KINDS.items()}


def marked(sample: Any) -> Any:
    """Return `sample`, the first of a `Stacked`, as an instance of its registered subclass."""
    if isinstance(sample, torch.Tensor):
        return sample.as_subclass(_Tensor)
    return _KINDS[type(sample)](sample)


def _collate(samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """Collate `samples`, the first of which is marked, for the default collate."""
    if isinstance(samples, Stacked) and (stacked := samples.stacked()) is not None:
        # The default collate makes lists of tuples.
        return list(stacked) if isinstance(stacked, tuple) else stacked
    first = samples[0]
    plain = first.as_subclass(torch.Tensor) if isinstance(first, _Tensor) else _PLAIN[type(first)](first)
    return collate_with([plain, *samples[1:]], collate_fn_map=collate_fn_map)


default_collate_fn_map.update(dict.fromkeys((_Tensor, *_PLAIN), _collate))


def to_container(columns: Columns, schema: Schema) -> Any:
    """Return the fields in the container of the samples: a dict, a tuple in the order of the fields, or the
    only field.

    Keys are the field "__key__" of a dict, and the last element of a tuple.
    """
    if schema.container == "dict":
        return columns
    values = tuple(columns[name] for name in schema.names)
    if KEY_FIELD in columns:
        return (*values, columns[KEY_FIELD])
    return values if schema.container == "tuple" else values[0]


def as_samples(columns: Columns, schema: Schema, size: int) -> Sequence[Any]:
    """Return the `size` samples of `columns` for any collate function; ours and torch's take them whole."""
    if schema.container in ("dict", "tuple"):
        return SampleBatch(columns, schema, size)
    return ValueBatch(columns[schema.names[0]])


class SampleBatch(Stacked, Sequence[Any]):
    """Samples that are dicts or tuples of views of the batch's tensors, made at the first access and kept."""

    def __init__(self, columns: Columns, schema: Schema, size: int) -> None:
        self._columns = columns
        self._schema = schema
        self._size = size
        self._first: Any = None
        self._fields_of_first: dict[str, Any] = {}
        self._samples: list[Any] | None = None

    def stacked(self) -> Any:
        """Return the batch: tensors `[n, *shape]`, lists for str, bytes and fields whose shape varies."""
        first, given = self._first, self._fields_of_first
        if self._samples is not None:
            return None
        if isinstance(first, dict) and not _are_same([*first, *first.values()], [*given, *given.values()]):
            return None
        return to_container(self._columns, self._schema)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if index != 0 or self._samples is not None:
            return self._taken_apart()[index]
        if self._first is None:  # a collate function looks at its type
            self._fields_of_first = {name: column[0] for name, column in self._columns.items()}
            self._first = marked(to_container(self._fields_of_first, self._schema))
        return self._first

    def __iter__(self) -> Iterator[Any]:
        return iter(self._taken_apart())

    def _taken_apart(self) -> list[Any]:
        if self._samples is None:
            names, rows = list(self._columns), zip(*map(_rows_of, self._columns.values()), strict=True)
            self._samples = [to_container(dict(zip(names, row, strict=True)), self._schema) for row in rows]
            if self._first is not None:
                self._samples[0] = self._first
        return self._samples


class ValueBatch(Stacked, list[Any]):
    """Samples without a container: arrays, numbers, str or bytes. A list, as `torch.stack` takes."""

    def __init__(self, column: Any) -> None:
        super().__init__(_rows_of(column))
        if self:
            self[0] = marked(self[0])
        self._column = column
        self._given = tuple(self)

    def stacked(self) -> Any:
        """Return the batch: a tensor `[n, *shape]`, or a list for str, bytes and ragged arrays."""
        return self._column if _are_same(self, self._given) else None


def _rows_of(column: Any) -> Sequence[Any]:
    rows: Sequence[Any] = column.unbind(0) if isinstance(column, torch.Tensor) else column
    return rows


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def collate(samples: Sequence[Any]) -> Any:
    """Samples of an `EpochDataset` as one batch, for `DataLoader(collate_fn=cs.collate)`.

    The layout is that of `EpochLoader`: fields of one shape become tensors `[batch, *shape]`; fields whose
    shape varies, str and bytes become lists; dicts and tuples stay dicts and tuples. Samples that come
    straight from the dataset are not copied again.
    """
    if isinstance(samples, Stacked) and (stacked := samples.stacked()) is not None:
        return stacked
    if not len(samples):
        raise ConfigError("collate() needs at least one sample")
    return _merge(list(samples))


def _merge(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _merge([value[name] for value in values]) for name in first}
    if isinstance(first, tuple):
        return tuple(_merge(list(column)) for column in zip(*values, strict=True))
    if isinstance(first, np.ndarray):
        return _merge([torch.from_numpy(np.require(value, requirements=("C", "W"))) for value in values])
    if isinstance(first, torch.Tensor):
        return torch.stack(values) if all(value.shape == first.shape for value in values) else values
    if isinstance(first, bool | int | float | complex | np.generic):
        return torch.as_tensor(np.array(values), device="cpu")
    return values
