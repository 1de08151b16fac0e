"""The container of a batch: fields as tensors or lists, in a dict, a tuple or alone, as the samples are.

torch's default collate looks up the type of the first sample in a registry that may be extended (see the
documentation of `torch.utils.data.default_collate`). So the first sample of a `SampleBatch` has a subclass
that is registered there, by which the batch is taken whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data._utils.collate import collate as collate_with
from torch.utils.data._utils.collate import default_collate_fn_map

from cachestream.errors import ConfigError
from cachestream.training.batches.gather import to_container

if TYPE_CHECKING:
    from cachestream.schema import Schema
    from cachestream.training.batches.gather import Columns


class _FirstDict(dict[str, Any]):
    pass


class _FirstTuple(tuple[Any, ...]):
    __slots__ = ()


class SampleBatch(Sequence[Any]):
    """The `size` samples of `columns` for any collate function; torch's and ours take them whole.

    Samples are views of the batch's tensors, made at the first access and kept, since they may be changed.
    """

    def __init__(self, columns: Columns, schema: Schema, size: int) -> None:
        self._columns = columns
        self._schema = schema
        self._size = size
        self._first: _FirstDict | _FirstTuple | None = None
        self._first_values: dict[str, Any] = {}
        self._samples: list[Any] | None = None

    def whole(self) -> Any:
        """The batch: tensors `[n, *shape]`, or lists; None if single samples may have been changed."""
        if self._samples is not None:
            return None
        if isinstance(self._first, dict):
            now, before = self._first, self._first_values
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in now):
                return None
        return to_container(self._columns, self._schema)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if index != 0 or self._samples is not None:
            return self._taken_apart()[index]
        if self._first is None:  # a collate function looks at its type
            self._first_values = {name: column[0] for name, column in self._columns.items()}
            first = to_container(self._first_values, self._schema)
            self._first = _FirstDict(first) if isinstance(first, dict) else _FirstTuple(first)
        return self._first

    def __iter__(self) -> Iterator[Any]:
        return iter(self._taken_apart())

    def _taken_apart(self) -> list[Any]:
        if self._samples is None:
            names, rows = list(self._columns), zip(*map(rows_of, self._columns.values()), strict=True)
            self._samples = [to_container(dict(zip(names, row, strict=True)), self._schema) for row in rows]
            if self._first is not None:
                self._samples[0] = self._first
        return self._samples


def _collate_marked(samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """Collate samples of which the first is that of a `SampleBatch`. The default collate calls this."""
    if isinstance(samples, SampleBatch) and (whole := samples.whole()) is not None:
        # The default collate makes lists of tuples.
        return list(whole) if isinstance(whole, tuple) else whole
    plain = dict if isinstance(samples[0], dict) else tuple
    return collate_with([plain(samples[0]), *samples[1:]], collate_fn_map=collate_fn_map)


default_collate_fn_map.update(dict.fromkeys((_FirstDict, _FirstTuple), _collate_marked))


def rows_of(column: Any) -> Sequence[Any]:
    """The values of a field for each sample of a batch; tensors are views."""
    rows: Sequence[Any] = column.unbind(0) if isinstance(column, torch.Tensor) else column
    return rows


def collate(samples: Sequence[Any]) -> Any:
    """Samples of an `EpochDataset` as one batch, for `DataLoader(collate_fn=cs.collate)`.

    The layout is that of `EpochLoader`: fields of one shape become tensors `[batch, *shape]`; fields whose
    shape varies, str and bytes become lists; dicts and tuples stay dicts and tuples. Samples that come
    straight from the dataset are not copied again.
    """
    if isinstance(samples, SampleBatch) and (whole := samples.whole()) is not None:
        return whole
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
