"""What a batch looks like: fields stacked into tensors, or lists, in the container that the samples came in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from cachestream.errors import ConfigError
from cachestream.model import KEY_FIELD, Schema
from cachestream.training.gather import Columns
from cachestream.training.marks import Whole, marked

__all__ = ["SampleBatch", "collate", "packed"]


def packed(columns: Columns, schema: Schema) -> Any:
    """The fields as the samples had them: a dict, a tuple in the order of the fields, or the only field.

    Keys that were asked for come as the field "__key__" of a dict, and as the last of a tuple.
    """
    if schema.container == "dict":
        return columns
    values = tuple(columns[name] for name in schema.names)
    if KEY_FIELD in columns:
        return (*values, columns[KEY_FIELD])
    return values if schema.container == "tuple" else values[0]


class SampleBatch(Whole, Sequence[Any]):
    """Samples gathered together: a sequence of samples for any collate function, whole already for ours and torch's.

    The samples are views of the batch's tensors, taken only when they are asked for.
    """

    def __init__(self, columns: Columns, schema: Schema, size: int) -> None:
        self._columns = columns
        self._schema = schema
        self._size = size
        self._parts: dict[str, Sequence[Any]] | None = None

    def whole(self) -> Any:
        """The batch: tensors `[n, *shape]`, lists for str, bytes and fields whose shape varies."""
        return packed(self._columns, self._schema)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._sample(i) for i in range(*index.indices(self._size))]
        if index == 0:  # what a collate function looks at to see what it has got
            return marked(packed({name: column[0] for name, column in self._columns.items()}, self._schema))
        return self._sample(index)

    def __iter__(self) -> Iterator[Any]:
        return map(self._sample, range(self._size))

    def _sample(self, index: int) -> Any:
        if self._parts is None:
            self._parts = {
                name: column.unbind(0) if isinstance(column, torch.Tensor) else column
                for name, column in self._columns.items()
            }
        return packed({name: part[index] for name, part in self._parts.items()}, self._schema)


def collate(samples: Sequence[Any]) -> Any:
    """Samples of an `EpochDataset` as one batch, for `DataLoader(collate_fn=cs.collate)`.

    The layout is that of `EpochLoader`: fields of one shape become tensors `[batch, *shape]`; fields whose shape
    varies, str and bytes become lists; dicts and tuples stay dicts and tuples. Samples that come straight from
    the dataset are not copied again.
    """
    if isinstance(samples, SampleBatch):
        return samples.whole()
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
        return torch.as_tensor(np.array(values))
    return values
