"""Samples that came in columns, as they are stored: no work for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError
from cachestream.model import Field, Schema
from cachestream.remote.source import Rows
from cachestream.sampling.records import as_floats, sorted_names, torch_name, widened_schema

__all__ = ["Table", "to_table"]

_Column = npt.NDArray[np.uint8] | list[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Samples of one schema: `columns[i]` has field i of all of them, uint8 `[n, nbytes]`, or the bytes of each
    for str and bytes.
    """

    schema: Schema
    keys: list[bytes]
    columns: tuple[_Column, ...]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Of all values and keys."""
        columns = sum(
            column.nbytes if isinstance(column, np.ndarray) else sum(map(len, column))
            for column in self.columns
        )
        return columns + sum(map(len, self.keys))

    def cut(self, start: int, stop: int) -> Table:
        """The samples `start` to `stop`."""
        return Table(self.schema, self.keys[start:stop], tuple(column[start:stop] for column in self.columns))

    def widened(self, wanted: Schema) -> Table:
        """The samples with floats in place of integers where `wanted` has them."""
        schema, changed = widened_schema(self.schema, wanted)
        columns = list(self.columns)
        for i, before in changed:
            columns[i] = as_floats(np.asarray(columns[i], np.uint8), before, schema.fields[i].dtype)
        return Table(schema, self.keys, tuple(columns))

    def take(self, indices: Sequence[int]) -> Table:
        """The samples at `indices`."""
        columns = [
            column[np.asarray(indices, np.int64)]
            if isinstance(column, np.ndarray)
            else [column[i] for i in indices]
            for column in self.columns
        ]
        return Table(self.schema, [self.keys[i] for i in indices], tuple(columns))


def to_table(rows: Rows) -> Table:
    """`rows` as they are stored. Raises SampleError that names the field for what cannot be."""
    names = sorted_names(tuple(rows.fields))
    found = [_column(name, rows.fields[name], len(rows.keys)) for name in names]
    if not all(isinstance(key, str) for key in rows.keys):
        raise SampleError("a key of its rows is no str")
    keys = [key.encode("utf-8", "surrogatepass") for key in rows.keys]
    return Table(Schema(tuple(field for field, _ in found)), keys, tuple(column for _, column in found))


def _column(
    name: str, values: npt.NDArray[Any] | Sequence[str] | Sequence[bytes], count: int
) -> tuple[Field, _Column]:
    if len(values) != count:
        raise SampleError(f"field '{name}' has {len(values)} values for {count} keys")
    if not isinstance(values, np.ndarray):
        if all(isinstance(value, str) for value in values):
            texts = [value.encode("utf-8", "surrogatepass") for value in values]  # type: ignore[union-attr]
            return Field(name, "str", "uint8", 1, None), texts
        if all(isinstance(value, bytes) for value in values):
            return Field(name, "bytes", "uint8", 1, None), list(values)  # type: ignore[arg-type]
        raise SampleError(f"field '{name}': rows hold arrays, or lists of str alone or bytes alone")
    dtype = torch_name(values.dtype)
    if dtype is None:
        raise SampleError(f"field '{name}' is an array of dtype {values.dtype}: store numbers or bools")
    shape = values.shape[1:]
    stored = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    data = stored.reshape(-1).view(np.uint8)
    return Field(name, "tensor", dtype, len(shape), shape), data.reshape(count, len(data) // max(1, count))
