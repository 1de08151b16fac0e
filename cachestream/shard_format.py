"""The format of a shard file: safetensors, one tensor per column, with a description and checksums.

Written by hand rather than through the safetensors library (which reads these files, as the tests check),
because publishing needs the file descriptor for fsync, and a reservation needs the exact size before the
first byte is written. Nothing here does I/O.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.schema import BFLOAT16, KEY_FIELD, STORAGE, Field, Schema

FORMAT_VERSION: Final = 1
SUFFIX: Final = ".safetensors"
LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100 * 2**20
_MAX_REASON: Final = 300
KEYS: Final = Field(KEY_FIELD, "str", "uint8", 1, None)
_BLANK_HASH: Final = "0" * 16
_HEADER_HASH: Final = '"header_xxh3":"%s"'

# torch dtype → (safetensors dtype, numpy dtype of what is stored)
_NUMPY: Final = {name: dtype for key, (name, dtype) in STORAGE.items() if key != "bfloat16"} | {
    "BF16": np.dtype("<u2")
}


@dataclass(frozen=True, slots=True)
class ColumnData:
    """A column to write: `data` is contiguous uint8 `[nbytes]`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ShardContent:
    """The content of one shard. `fill` describes the part of the remote that it holds (JSON values)."""

    schema: Schema
    num_samples: int
    columns: tuple[ColumnData, ...]
    fill: Mapping[str, Any]

    @property
    def data_bytes(self) -> int:
        return sum(len(column.data) for column in self.columns)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of an open shard: `offset` and `nbytes` place it in the file."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def encode_header(content: ShardContent) -> bytes:
    """The bytes before the data: length, JSON, padded so that the data starts at a multiple of 64."""
    text, checksum = _header(content)
    blank = (_HEADER_HASH % _BLANK_HASH).encode()
    text = text.replace(blank, (_HEADER_HASH % checksum).encode(), 1)
    return struct.pack("<Q", len(text)) + text


def content_hash(content: ShardContent) -> str:
    """The `ShardData.content_hash` of a file with `content`."""
    return _header(content)[1]


def _header(content: ShardContent) -> tuple[bytes, str]:
    """The padded JSON of the header without its checksum, and that checksum."""
    hashes = {c.name: xxhash.xxh3_64_hexdigest(c.data.data) for c in content.columns}
    metadata = {
        "format": "cachestream",
        "version": str(FORMAT_VERSION),
        "num_samples": str(content.num_samples),
        "schema": content.schema.to_json(),
        "fill": json.dumps(content.fill, separators=(",", ":")),
        "xxh3": json.dumps(hashes, separators=(",", ":")),
        "header_xxh3": _BLANK_HASH,
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for column in content.columns:
        stop = offset + len(column.data)
        entries[column.name] = {
            "dtype": column.dtype,
            "shape": column.shape,
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return text, xxhash.xxh3_64_hexdigest(text)


def header_bytes(length: bytes, file_bytes: int) -> int:
    """The size of the header's JSON, by the file's first 8 bytes. Raises ValueError for a shorter file."""
    if file_bytes < LENGTH_BYTES:
        raise ValueError("the file is truncated")
    (found,) = struct.unpack("<Q", length)
    if found > min(_MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise ValueError("the header's length passes the end of the file")
    return int(found)


class ShardData:
    """A shard whose bytes are in memory, or mapped: `data` is the whole file, uint8 `[nbytes]`.

    `text` is the JSON of its header, which is checked against its checksum, the schema and the file's size.
    `content_hash` identifies the file's content: it covers the header, which holds the checksums of all
    columns. Raises ValueError for a header that is damaged or foreign.
    """

    def __init__(self, text: bytes, data: npt.NDArray[np.uint8]) -> None:
        self._bytes, self.size_bytes = data, len(data)
        try:
            self._parse(text)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the header makes no sense ({str(error)[:_MAX_REASON]})") from error

    def _parse(self, text: bytes) -> None:
        raw = json.loads(text)
        metadata = raw.pop("__metadata__")
        checksum = metadata["header_xxh3"]
        blank = text.replace((_HEADER_HASH % checksum).encode(), (_HEADER_HASH % _BLANK_HASH).encode(), 1)
        if xxhash.xxh3_64_hexdigest(blank) != checksum:
            raise ValueError("its checksum does not match")
        if metadata["version"] != str(FORMAT_VERSION):
            raise ValueError(f"format version {metadata['version']} is not {FORMAT_VERSION}")
        self.content_hash = str(checksum)
        self.num_samples = _count(int(metadata["num_samples"]))
        self.schema = Schema.from_json(metadata["schema"])
        self.fill: dict[str, Any] = json.loads(metadata["fill"])
        self.checksums: dict[str, str] = json.loads(metadata["xxh3"])
        self.columns = _read_columns(raw, LENGTH_BYTES + len(text), self.size_bytes)
        _check_schema(self.schema, self.num_samples, self.columns)

    def check(self, *names: str) -> None:
        """Compare the columns `names`, or all, with their checksums. Raises ValueError naming the column."""
        for name in names or self.columns:
            column = self.columns[name]
            data = self._bytes[column.offset : column.offset + column.nbytes]
            if xxhash.xxh3_64_hexdigest(data.data) != self.checksums.get(name):
                raise ValueError(f"checksum mismatch in column '{name}'")

    def take(self, rows: npt.NDArray[np.int64], fill: Mapping[str, Any]) -> ShardContent:
        """The content of a shard that has only the samples `rows`, int64 `[n]`, at least one."""
        taken: dict[str, ColumnData] = {}
        for field in (*self.schema.fields, KEYS):
            name, dtype = field.name, STORAGE[field.dtype][0]
            flat = self.array(name)
            if field.shape is not None:
                taken[name] = column_data(name, dtype, flat[rows])
                continue
            offsets = self.array(f"{name}#offsets")
            values = np.concatenate([flat[offsets[row] : offsets[row + 1]] for row in rows])
            ends = np.cumsum([0, *np.diff(offsets)[rows]], dtype="<i8")
            taken[name] = column_data(name, dtype, values)
            taken[f"{name}#offsets"] = column_data(f"{name}#offsets", "I64", ends)
            if field.kind == "tensor":
                shapes = self.array(f"{name}#shapes")[rows]
                taken[f"{name}#shapes"] = column_data(f"{name}#shapes", "I64", shapes)
        return ShardContent(self.schema, len(rows), tuple(taken[name] for name in self.columns), fill)

    def array(self, name: str) -> npt.NDArray[Any]:
        """The column `name`, without a copy."""
        column = self.columns[name]
        data = self._bytes[column.offset : column.offset + column.nbytes]
        return data.view(column.dtype).reshape(column.shape)

    def keys(self) -> list[str]:
        """The samples' keys, in order."""
        return [key.decode("utf-8", "surrogatepass") for key in self._raw_keys()]

    def _raw_keys(self) -> Iterator[bytes]:
        text = self.array(KEY_FIELD).tobytes()
        offsets = self.array(f"{KEY_FIELD}#offsets").tolist()
        return (text[start:stop] for start, stop in itertools.pairwise(offsets))

    def values(self, field: Field, start: int, stop: int) -> npt.NDArray[Any] | list[Any]:
        """The values of `field` in the samples `start` to `stop`, without a copy of arrays.

        An array `[n, ...]`; a list of arrays if their shape varies, or of str or bytes. bfloat16 as
        `schema.BFLOAT16`.
        """
        dtype = BFLOAT16 if field.dtype == "bfloat16" else field.numpy_dtype
        flat = self.array(field.name)
        if field.shape is not None:
            return flat[start:stop].view(dtype).reshape(stop - start, *field.shape)
        parts = [
            flat[i:j] for i, j in itertools.pairwise(self.array(f"{field.name}#offsets")[start : stop + 1])
        ]
        if field.kind == "tensor":
            shapes = self.array(f"{field.name}#shapes")[start:stop].tolist()
            return [part.view(dtype).reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        raw = [part.tobytes() for part in parts]
        return [one.decode("utf-8", "surrogatepass") for one in raw] if field.kind == "str" else raw


def column_data(name: str, dtype: str, values: npt.NDArray[Any]) -> ColumnData:
    """A column of `values`, which are stored little-endian as the safetensors dtype `dtype`."""
    data = np.ascontiguousarray(values)
    return ColumnData(name, dtype, data.shape, data.reshape(-1).view(np.uint8))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a size or an offset is not a count")
    return value


def _read_columns(raw: Mapping[str, Any], data_start: int, file_bytes: int) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    end = 0
    for name, entry in raw.items():
        start, stop = map(_count, entry["data_offsets"])
        shape = tuple(map(_count, entry["shape"]))
        dtype = _NUMPY[entry["dtype"]]
        if start != end or stop < start:
            raise ValueError(f"column '{name}' has offsets {start} to {stop}")
        if math.prod(shape) * dtype.itemsize != stop - start:
            raise ValueError(f"column '{name}' of shape {shape} has {stop - start} bytes")
        columns[name] = Column(name, dtype, shape, data_start + start, stop - start)
        end = stop
    if data_start + end != file_bytes:
        raise ValueError(f"the file has {file_bytes} bytes instead of {data_start + end}")
    return columns


def _check_schema(schema: Schema, num_samples: int, columns: Mapping[str, Column]) -> None:
    """Raise ValueError unless the columns are exactly those that `schema` requires.

    Readers take addresses from the columns and dtypes from the schema.
    """
    expected = dict(_expected_columns(schema, num_samples))
    if expected.keys() != columns.keys():
        raise ValueError(f"it has columns {sorted(columns)} instead of {sorted(expected)}")
    for name, (dtype, shape) in expected.items():
        column = columns[name]
        if column.dtype != dtype or (column.shape != shape if shape else len(column.shape) != 1):
            raise ValueError(f"column '{name}' is {column.dtype} {column.shape} instead of {dtype} {shape}")


def _expected_columns(
    schema: Schema, num_samples: int
) -> Iterator[tuple[str, tuple[np.dtype[Any], tuple[int, ...]]]]:
    """Each column's dtype and shape; () for a flat column of any length."""
    offsets = np.dtype("<i8")
    for field in (*schema.fields, KEYS):
        dtype = STORAGE[field.dtype][1]
        if field.shape is not None:
            trailing = (2,) if field.dtype == "complex128" else ()
            yield field.name, (dtype, (num_samples, *field.shape, *trailing))
            continue
        yield field.name, (dtype, ())
        yield f"{field.name}#offsets", (offsets, (num_samples + 1,))
        if field.kind == "tensor":
            yield f"{field.name}#shapes", (offsets, (num_samples, field.ndim))
