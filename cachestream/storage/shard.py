"""The shard file: a safetensors file with one tensor per column, a description and checksums.

Written by hand rather than through the safetensors library (which reads these files, as the tests check),
because publishing needs the file descriptor for fsync, and a reservation needs the exact size before the
first byte is written.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.errors import CacheError, CorruptShardError
from cachestream.linux import FileMap
from cachestream.schema import KEY_FIELD, STORAGE, Field, Schema
from cachestream.storage.os_errors import disk_error

FORMAT_VERSION: Final = 1
SUFFIX: Final = ".safetensors"
_MAX_HEADER_BYTES: Final = 100 * 2**20
_MAX_REASON: Final = 300
# Errors of reading from a failing disk, and of opening a path that is not a regular file.
_DAMAGE: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ELOOP, errno.EISDIR, errno.ENXIO})
_BLANK_HASH: Final = "0" * 16
_HEADER_HASH: Final = '"header_xxh3":"%s"'

# torch dtype → (safetensors dtype, numpy dtype of what is stored)
_NUMPY: Final = {name: dtype for key, (name, dtype) in STORAGE.items() if key != "bfloat16"} | {
    "BF16": np.dtype("<u2")
}


def shard_path(root: str, shard_id: int) -> str:
    """The path of shard `shard_id` in the cache at `root`."""
    return os.path.join(root, "shards", f"{shard_id:012d}{SUFFIX}")


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
    """The `MappedShard.content_hash` of a file with `content`."""
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


class MappedShard:
    """One shard, mapped read-only; its pages are the kernel's page cache.

    Opening checks the header against its checksum, the schema and the file's size; `verify` checks the data.
    Holds no file descriptor. `content_hash` identifies the file's content: it covers the header, which holds
    the checksums of all columns. Raises CorruptShardError for a file that is missing, truncated, damaged or
    foreign, and CacheError where the process may not or cannot open more files.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                self.size_bytes = _file_size(fd)
                self._map = FileMap(fd, self.size_bytes)
                # Read, not mapped: a failing disk raises an error here instead of a SIGBUS.
                text = _read_header(fd, self.size_bytes)
            finally:
                os.close(fd)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._corrupt("the shard is missing") from error
        except OSError as error:
            if error.errno in _DAMAGE:
                raise self._corrupt(f"cannot be read ({error.strerror})") from error
            raise disk_error(path, error) from error
        except ValueError as error:
            raise self._corrupt(str(error)) from error
        self._bytes = self._map.array()
        try:
            self._parse(text)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise self._corrupt(f"the header makes no sense ({str(error)[:_MAX_REASON]})") from error

    def _corrupt(self, reason: str) -> CorruptShardError:
        return CorruptShardError(f"{self.path}: {reason}; run 'cachestream verify CACHE --repair'")

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
        self.columns = _read_columns(raw, 8 + len(text), self.size_bytes)
        _check_schema(self.schema, self.num_samples, self.columns)

    @property
    def address(self) -> int:
        """The address of the file's first byte in this process."""
        return self._map.address

    def array(self, name: str) -> npt.NDArray[Any]:
        """The column `name`, read-only, without a copy."""
        column = self.columns[name]
        data = self._bytes[column.offset : column.offset + column.nbytes]
        return data.view(column.dtype).reshape(column.shape)

    def keys(self) -> list[str]:
        """The samples' keys, in order."""
        return [key.decode("utf-8", "surrogatepass") for key in self._raw_keys()]

    def key_hashes(self) -> npt.NDArray[np.uint64]:
        """The xxh3 hashes of the samples' keys, uint64 `[num_samples]`.

        Raises CorruptShardError for damaged keys.
        """
        self.verify(KEY_FIELD, f"{KEY_FIELD}#offsets")
        return np.array([xxhash.xxh3_64_intdigest(key) for key in self._raw_keys()], np.uint64)

    def _raw_keys(self) -> Iterator[bytes]:
        text = self.array(KEY_FIELD).tobytes()
        offsets = self.array(f"{KEY_FIELD}#offsets").tolist()
        return (text[start:stop] for start, stop in itertools.pairwise(offsets))

    def verify(self, *names: str) -> None:
        """Compare the columns `names`, or all, with their checksums.

        Raises CorruptShardError naming the column.
        """
        columns = {name: self.columns[name] for name in names or self.columns}
        try:
            for column in columns.values():
                self._map.bring_in(column.offset, column.offset + column.nbytes)
        except OSError as error:
            raise self._corrupt(f"cannot be read ({error.strerror})") from error
        for name, column in columns.items():
            data = self._bytes[column.offset : column.offset + column.nbytes]
            if xxhash.xxh3_64_hexdigest(data.data) != self.checksums.get(name):
                raise self._corrupt(f"checksum mismatch in column '{name}'")

    def expect_random(self) -> None:
        """Disable the kernel's readahead: samples are read at random, and requested before that."""
        self._map.expect_random()

    def close(self) -> None:
        """Unmap, unless arrays on the map are still alive (then with the last of them)."""
        self.__dict__.pop("_bytes", None)
        self.__dict__.pop("_map", None)

    def __repr__(self) -> str:
        return f"<MappedShard {self.path} {self.num_samples} samples, {self.size_bytes} bytes>"


def _file_size(fd: int) -> int:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("it is not a file")
    if info.st_size < 8:
        raise ValueError("the file is truncated")
    return info.st_size


def _read_header(fd: int, file_bytes: int) -> bytes:
    """The JSON of the header, padding included."""
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    if length > min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise ValueError("the header's length passes the end of the file")
    text = os.pread(fd, length, 8)
    if len(text) != length:
        raise ValueError("the file is truncated")
    return text


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
    for field in (*schema.fields, Field(KEY_FIELD, "str", "uint8", 1, None)):
        dtype = STORAGE[field.dtype][1]
        if field.shape is not None:
            trailing = (2,) if field.dtype == "complex128" else ()
            yield field.name, (dtype, (num_samples, *field.shape, *trailing))
            continue
        yield field.name, (dtype, ())
        yield f"{field.name}#offsets", (offsets, (num_samples + 1,))
        if field.kind == "tensor":
            yield f"{field.name}#shapes", (offsets, (num_samples, field.ndim))


# --- shards known by their content, whatever their number and their cache


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The identity of a shard: `hash` covers the whole file, `fill` describes its samples' origin."""

    shard_id: int
    num_samples: int
    hash: str
    fill: dict[str, Any]


class Contents:
    """The contents of the shards of one cache; each header is read once. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, Content] = {}

    def read(self, root: str, shard_ids: Iterable[int]) -> list[Content]:
        """The contents of `shard_ids`, which must be leased. Raises CorruptShardError and CacheError."""
        self._known = {
            shard_id: self._known.get(shard_id) or _read_content(root, shard_id) for shard_id in shard_ids
        }
        return list(self._known.values())

    def find(self, root: str, cached: Mapping[int, int], wanted: Iterable[Content]) -> dict[str, int]:
        """Map the hash of each of `wanted` to the id of a shard with this content, if one is `cached`.

        `cached` has the number of samples of each shard.
        """
        missing = {content.hash: content for content in wanted}
        # Most have kept their id. Only for the others are the remaining headers read.
        likely = {content.shard_id for content in missing.values()}
        sizes = {content.num_samples for content in missing.values()}
        candidates = [shard_id for shard_id, count in cached.items() if count in sizes]
        found: dict[str, int] = {}
        for shard_id in sorted(candidates, key=lambda shard_id: shard_id not in likely):
            if not missing:
                break
            try:
                known = self._known.get(shard_id) or _read_content(root, shard_id)
            except CacheError:
                continue  # evicted meanwhile, or damaged
            self._known[shard_id] = known
            if missing.pop(known.hash, None) is not None:
                found[known.hash] = shard_id
        return found


def _read_content(root: str, shard_id: int) -> Content:
    shard = MappedShard(shard_path(root, shard_id))
    try:
        return Content(shard_id, shard.num_samples, shard.content_hash, shard.fill)
    finally:
        shard.close()
