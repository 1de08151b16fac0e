"""Samples into columns: an open shard in memory, with buffers that are reused from shard to shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SchemaMismatchError
from cachestream.model import KEY_FIELD, Field, Schema
from cachestream.sampling.records import Record, item_bytes, stored_shape
from cachestream.storage.shard import ColumnData, ShardContent, storage_of

__all__ = ["Packer"]

_FIRST_BYTES: Final = 64 * 1024


class _Bytes:
    """Bytes that grow at the end; `clear` keeps the memory, so no shard but the first pays page faults."""

    def __init__(self) -> None:
        self._data = np.empty(_FIRST_BYTES, np.uint8)
        self.size = 0

    def append(self, data: npt.NDArray[np.uint8]) -> None:
        stop = self.size + len(data)
        if stop > len(self._data):
            grown = np.empty(max(stop, 2 * len(self._data)), np.uint8)
            grown[: self.size] = self._data[: self.size]
            self._data = grown
        self._data[self.size : stop] = data
        self.size = stop

    def clear(self) -> None:
        self.size = 0

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return self._data[: self.size]


class _ColumnBuilder:
    """One field of the open shard: all values in a row, and where each of them ends."""

    def __init__(self) -> None:
        self._data = _Bytes()
        self._ends: list[int] = []
        self._shapes: list[tuple[int, ...]] = []

    def append(self, value: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> None:
        self._data.append(value)
        self._ends.append(self._data.size)
        self._shapes.append(shape)

    def clear(self) -> None:
        self._data.clear()
        self._ends.clear()
        self._shapes.clear()

    def columns(self, field: Field) -> list[ColumnData]:
        """The field's columns; one `[N, ...]` where all its values have one shape."""
        dtype, _ = storage_of(field.dtype)
        count = len(self._ends)
        if field.shape is not None:
            shape = stored_shape(field.dtype, field.shape)
            return [ColumnData(field.name, dtype, (count, *shape), self._data.view)]
        width = item_bytes(field.dtype)
        offsets = np.array([0, *self._ends], np.int64) // width
        columns = [
            ColumnData(field.name, dtype, (self._data.size // width,), self._data.view),
            _integers(f"{field.name}#offsets", offsets),
        ]
        if field.kind == "tensor":
            shapes = np.array(self._shapes, np.int64).reshape(count, field.ndim)
            columns.append(_integers(f"{field.name}#shapes", shapes))
        return columns


class Packer:
    """Collects the samples of one shard. Not thread-safe."""

    def __init__(self) -> None:
        self._builders: dict[str, _ColumnBuilder] = {}
        self._keys = _ColumnBuilder()
        self._schema: Schema | None = None
        self.num_samples = 0
        self.size_bytes = 0

    def add(self, key: str, record: Record, known: Schema | None) -> None:
        """Add a sample; raises SchemaMismatchError if it fits neither the shard nor `known`, the cache's."""
        if known is not None:
            known.merge(record.schema)
        # Within a shard the schema is that of its own samples, so that a shard stays fixed-shape
        # where its samples allow, whatever others in the cache look like.
        self._schema = record.schema if self._schema is None else self._schema.merge(record.schema)
        for field, value, shape in zip(record.schema.fields, record.values, record.shapes, strict=True):
            builder = self._builders.get(field.name)
            if builder is None:
                builder = self._builders[field.name] = _ColumnBuilder()
            builder.append(value, shape)
        name = np.frombuffer(key.encode("utf-8", "surrogatepass"), np.uint8)
        self._keys.append(name, ())
        self.num_samples += 1
        self.size_bytes += record.nbytes + len(name) + 8

    @property
    def schema(self) -> Schema:
        """The schema of the samples so far."""
        if self._schema is None:
            raise SchemaMismatchError("an empty shard has no schema; add a sample first")
        return self._schema

    def content(self, fill: Mapping[str, Any]) -> ShardContent:
        """The shard so far: views of the packer's buffers, valid until `clear` or the next `add`."""
        columns: list[ColumnData] = []
        for field in self.schema.fields:
            columns.extend(self._builders[field.name].columns(field))
        columns.extend(self._keys.columns(Field(KEY_FIELD, "str", "uint8", 1, None)))
        # Wide elements first: every column then starts at a multiple of its own width.
        columns.sort(key=lambda column: -_width(column.dtype))
        return ShardContent(self.schema, self.num_samples, tuple(columns), fill)

    def clear(self) -> None:
        """Start the next shard."""
        for builder in (*self._builders.values(), self._keys):
            builder.clear()
        self._schema = None
        self.num_samples = 0
        self.size_bytes = 0


def _integers(name: str, values: npt.NDArray[np.int64]) -> ColumnData:
    data = np.ascontiguousarray(values, "<i8")
    return ColumnData(name, "I64", data.shape, data.reshape(-1).view(np.uint8))


def _width(dtype: str) -> int:
    digits = "".join(ch for ch in dtype if ch.isdigit())
    return int(digits) // 8 if digits else 1
