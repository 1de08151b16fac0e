"""The shard file: a safetensors file, one tensor a column, described and checksummed by itself.

Written by hand rather than through the safetensors library (which reads these files, and which the
tests hold them against), because publishing needs the file descriptor for fsync, and reserving needs
the exact size before the first byte is written.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.errors import CorruptShardError
from cachestream.model import KEY_FIELD, Field, Schema

__all__ = ["Column", "ColumnData", "MappedShard", "ShardContent", "encode_header", "shard_path", "storage_of"]

FORMAT_VERSION: Final = 1
SUFFIX: Final = ".safetensors"
_MAX_HEADER_BYTES: Final = 100 * 2**20
_UNSIGNED_HASH: Final = "0" * 16
_HEADER_HASH: Final = '"header_xxh3":"%s"'

# torch dtype → (safetensors dtype, numpy dtype of what is stored)
_STORAGE: Final[dict[str, tuple[str, np.dtype[Any]]]] = {
    "bool": ("BOOL", np.dtype("?")),
    "uint8": ("U8", np.dtype("<u1")),
    "int8": ("I8", np.dtype("<i1")),
    "int16": ("I16", np.dtype("<i2")),
    "uint16": ("U16", np.dtype("<u2")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype("<u2")),
    "int32": ("I32", np.dtype("<i4")),
    "uint32": ("U32", np.dtype("<u4")),
    "float32": ("F32", np.dtype("<f4")),
    "int64": ("I64", np.dtype("<i8")),
    "uint64": ("U64", np.dtype("<u8")),
    "float64": ("F64", np.dtype("<f8")),
    "complex64": ("C64", np.dtype("<c8")),
    "complex128": ("F64", np.dtype("<f8")),  # safetensors has no C128: a trailing axis of 2
}
_NUMPY: Final = {name: dtype for key, (name, dtype) in _STORAGE.items() if key != "bfloat16"} | {
    "BF16": np.dtype("<u2")
}


def storage_of(dtype: str) -> tuple[str, np.dtype[Any]]:
    """The safetensors dtype and the numpy dtype that a field of torch dtype `dtype` is stored as."""
    return _STORAGE[dtype]


def shard_path(root: str, shard_id: int) -> str:
    """Where shard `shard_id` of the cache at `root` lies."""
    return os.path.join(root, "shards", f"{shard_id:012d}{SUFFIX}")


@dataclass(frozen=True, slots=True)
class ColumnData:
    """A column to be written: `data` is contiguous uint8 `[nbytes]`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ShardContent:
    """All that goes into one shard. `fill` says which part of the remote it holds (JSON values)."""

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
    hashes = {c.name: xxhash.xxh3_64_hexdigest(c.data.data) for c in content.columns}
    metadata = {
        "format": "cachestream",
        "version": str(FORMAT_VERSION),
        "num_samples": str(content.num_samples),
        "schema": content.schema.to_json(),
        "fill": json.dumps(content.fill, separators=(",", ":")),
        "xxh3": json.dumps(hashes, separators=(",", ":")),
        "header_xxh3": _UNSIGNED_HASH,
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
    signature = xxhash.xxh3_64_hexdigest(text)
    unsigned = (_HEADER_HASH % _UNSIGNED_HASH).encode()
    text = text.replace(unsigned, (_HEADER_HASH % signature).encode(), 1)
    return struct.pack("<Q", len(text)) + text


class MappedShard:
    """One shard, mapped read-only and immutable; its pages are the kernel's page cache.

    Opening checks the header against its checksum and the file's size; `verify` checks the data.
    Raises CorruptShardError for a file that is missing, truncated or damaged.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.size_bytes = os.fstat(fd).st_size
                if self.size_bytes < 8:
                    raise self._corrupt("the file is truncated")
                self._map = mmap.mmap(fd, self.size_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
            finally:
                os.close(fd)
        except FileNotFoundError as error:
            raise CorruptShardError(
                f"{path}: the shard is missing; run 'cachestream verify CACHE --repair'"
            ) from error
        except OSError as error:
            raise CorruptShardError(f"{path}: cannot be read ({error.strerror})") from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._corrupt(f"the header makes no sense ({error})") from error

    def _corrupt(self, reason: str) -> CorruptShardError:
        return CorruptShardError(f"{self.path}: {reason}; run 'cachestream verify CACHE --repair'")

    def _read_header(self) -> None:
        (length,) = struct.unpack_from("<Q", self._map, 0)
        if length > min(_MAX_HEADER_BYTES, self.size_bytes - 8):
            raise ValueError("its length passes the end of the file")
        text = self._map[8 : 8 + length]
        raw = json.loads(text)
        metadata = raw.pop("__metadata__")
        signature = metadata["header_xxh3"]
        unsigned = text.replace(
            (_HEADER_HASH % signature).encode(), (_HEADER_HASH % _UNSIGNED_HASH).encode(), 1
        )
        if xxhash.xxh3_64_hexdigest(unsigned) != signature:
            raise ValueError("its checksum does not match")
        if metadata["version"] != str(FORMAT_VERSION):
            raise ValueError(f"format version {metadata['version']} is not {FORMAT_VERSION}")
        self.num_samples = int(metadata["num_samples"])
        self.schema = Schema.from_json(metadata["schema"])
        self.fill: dict[str, Any] = json.loads(metadata["fill"])
        self.checksums: dict[str, str] = json.loads(metadata["xxh3"])
        self.columns = _read_columns(raw, 8 + length, self.size_bytes)
        _check_schema(self.schema, self.num_samples, self.columns)

    @property
    def address(self) -> int:
        """The address of the file's first byte in this process."""
        return int(self._bytes.ctypes.data)

    def array(self, name: str) -> npt.NDArray[Any]:
        """The column `name`, read-only, without a copy."""
        column = self.columns[name]
        data = self._bytes[column.offset : column.offset + column.nbytes]
        return data.view(column.dtype).reshape(column.shape)

    def keys(self) -> list[str]:
        """The samples' keys, in order."""
        text = self.array(KEY_FIELD).tobytes()
        offsets = self.array(f"{KEY_FIELD}#offsets").tolist()
        return [
            text[start:stop].decode("utf-8", "surrogatepass") for start, stop in itertools.pairwise(offsets)
        ]

    def verify(self) -> None:
        """Check every column against its checksum; raises CorruptShardError naming the column."""
        for name, column in self.columns.items():
            data = self._bytes[column.offset : column.offset + column.nbytes]
            if xxhash.xxh3_64_hexdigest(data.data) != self.checksums.get(name):
                raise self._corrupt(f"checksum mismatch in column '{name}'")

    def close(self) -> None:
        """Unmap, unless arrays on the map are still alive (then with the last of them)."""
        del self._bytes
        try:
            self._map.close()
        except BufferError:
            pass

    def __repr__(self) -> str:
        return f"<MappedShard {self.path} {self.num_samples} samples, {self.size_bytes} bytes>"


def _read_columns(raw: Mapping[str, Any], data_start: int, file_bytes: int) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    end = 0
    for name, entry in raw.items():
        start, stop = entry["data_offsets"]
        dtype = _NUMPY[entry["dtype"]]
        shape = tuple(entry["shape"])
        if start != end or stop < start or any(n < 0 for n in shape):
            raise ValueError(f"column '{name}' has offsets {start} to {stop}")
        if math.prod(shape) * dtype.itemsize != stop - start:
            raise ValueError(f"column '{name}' of shape {shape} has {stop - start} bytes")
        columns[name] = Column(name, dtype, shape, data_start + start, stop - start)
        end = stop
    if data_start + end != file_bytes:
        raise ValueError(f"the file has {file_bytes} bytes instead of {data_start + end}")
    return columns


def _check_schema(schema: Schema, num_samples: int, columns: Mapping[str, Column]) -> None:
    for name, shape in _expected(schema, num_samples):
        if columns[name].shape[: len(shape)] != shape:
            raise ValueError(f"column '{name}' has shape {columns[name].shape} instead of {shape}")


def _expected(schema: Schema, num_samples: int) -> Sequence[tuple[str, tuple[int, ...]]]:
    key = Field(KEY_FIELD, "str", "uint8", 1, None)
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for field in (*schema.fields, key):
        if field.shape is not None:
            shapes.append((field.name, (num_samples, *field.shape)))
            continue
        shapes.append((f"{field.name}#offsets", (num_samples + 1,)))
        if field.kind == "tensor":
            shapes.append((f"{field.name}#shapes", (num_samples, field.ndim)))
    return shapes
