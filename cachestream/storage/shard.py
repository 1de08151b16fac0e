"""The shard file on the local disk: its path, mapping it, its columns, and its identity in any cache."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.errors import CacheError, ConfigError, CorruptShardError
from cachestream.linux import FileMap
from cachestream.schema import KEY_FIELD, Field, IntArray, Snapshot
from cachestream.shard_format import KEYS, LENGTH_BYTES, SUFFIX, ShardData, header_bytes
from cachestream.storage.os_errors import disk_error

# Errors of reading from a failing disk, and of opening a path that is not a regular file.
_DAMAGE: Final = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ELOOP, errno.EISDIR, errno.ENXIO})


def shard_path(root: str, shard_id: int) -> str:
    """The path of shard `shard_id` in the cache at `root`."""
    return os.path.join(root, "shards", f"{shard_id:012d}{SUFFIX}")


class MappedShard(ShardData):
    """One shard, mapped read-only; its pages are the kernel's page cache.

    Holds no file descriptor. `verify` checks the data. Raises CorruptShardError for a file that is missing,
    truncated, damaged or foreign, and CacheError where the process may not or cannot open more files.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                size_bytes = _file_size(fd)
                # Read, not mapped: a failing disk raises an error here instead of a SIGBUS.
                text = _read_header(fd, size_bytes)
                self._map = FileMap(fd, size_bytes)
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
        try:
            super().__init__(text, self._map.array())
        except ValueError as error:
            raise self._corrupt(str(error)) from error

    def _corrupt(self, reason: str) -> CorruptShardError:
        return CorruptShardError(f"{self.path}: {reason}; run 'cachestream verify CACHE --repair'")

    @property
    def address(self) -> int:
        """The address of the file's first byte in this process."""
        return self._map.address

    def key_hashes(self) -> npt.NDArray[np.uint64]:
        """The xxh3 hashes of the samples' keys, uint64 `[num_samples]`.

        Raises CorruptShardError for damaged keys.
        """
        self.verify(KEY_FIELD, f"{KEY_FIELD}#offsets")
        return np.array([xxhash.xxh3_64_intdigest(key) for key in self._raw_keys()], np.uint64)

    def verify(self, *names: str) -> None:
        """Compare the columns `names`, or all, with their checksums.

        Raises CorruptShardError naming the column.
        """
        try:
            for column in map(self.columns.__getitem__, names or self.columns):
                self._map.bring_in(column.offset, column.offset + column.nbytes)
        except OSError as error:
            raise self._corrupt(f"cannot be read ({error.strerror})") from error
        try:
            self.check(*names)
        except ValueError as error:
            raise self._corrupt(str(error)) from error

    def expect_random(self) -> None:
        """Disable the kernel's readahead: samples are read at random, and requested before that."""
        self._map.expect_random()

    def close(self) -> None:
        """Unmap, unless arrays on the map are still alive (then with the last of them)."""
        self.__dict__.pop("_bytes", None)
        self.__dict__.pop("_map", None)

    def __repr__(self) -> str:
        return f"<MappedShard {self.path} {self.num_samples} samples, {self.size_bytes} bytes>"


class ShardColumns(Mapping[str, npt.NDArray[Any]]):
    """The columns of one shard's samples by field, for a condition; a column is read when it is asked for.

    A field of one shape is an array `[num_samples, *shape]` that must not be changed (bfloat16 as float32);
    str fields and the keys, "__key__", are arrays of Python str `[num_samples]`. Of bytes and of tensors
    whose shape varies there are only `lengths`. Raises ConfigError for other names, CorruptShardError for
    damage.
    """

    def __init__(self, shard: MappedShard) -> None:
        self._shard = shard
        self._fields = {field.name: field for field in (*shard.schema.fields, KEYS)}
        self.num_samples = shard.num_samples

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        field, shard = self._field(name), self._shard
        if field.shape is None and field.kind != "str":
            raise ConfigError(
                f"the length of {name!r} varies between samples, so it is no column: "
                f"columns.lengths({name!r}) has the lengths"
            )
        shard.verify(*columns_of(shard, [name]))
        if name == KEY_FIELD or field.kind == "str":
            return np.array([*shard.values(field, 0, self.num_samples), None], object)[:-1]
        values = np.asarray(shard.values(field, 0, self.num_samples))
        if field.dtype == "bfloat16":
            return (values["bfloat16"].astype(np.uint32) << 16).view(np.float32)
        return values

    def lengths(self, name: str) -> IntArray:
        """The sizes of the first dimension of `name`, of str and bytes the bytes: int64 `[num_samples]`.

        Raises ConfigError for a field of numbers.
        """
        field, shard = self._field(name), self._shard
        if not field.ndim and field.kind == "tensor":
            raise ConfigError(f"{name!r} is one number in each sample, which has no length")
        if field.shape is not None:
            return np.full(self.num_samples, field.shape[0], np.int64)
        column = f"{name}#shapes" if field.kind == "tensor" else f"{name}#offsets"
        shard.verify(column)
        found = shard.array(column)
        return found[:, 0].copy() if field.kind == "tensor" else np.diff(found)

    def shapes(self, name: str) -> IntArray:
        """The shapes of the tensors `name`, int64 `[num_samples, ndim]`. Raises ConfigError for str and
        bytes.
        """
        field, shard = self._field(name), self._shard
        if field.kind != "tensor":
            raise ConfigError(f"{name!r} is {field.kind}, which has no shape")
        if field.shape is not None:
            return np.tile(np.array(field.shape, np.int64), (self.num_samples, 1))
        shard.verify(f"{name}#shapes")
        return shard.array(f"{name}#shapes").copy()

    def _field(self, name: str) -> Field:
        if name not in self._fields:
            raise ConfigError(f"the samples have no field {name!r}: they have {sorted(self._fields)}")
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"<ShardColumns {self.num_samples} samples, {sorted(self._fields)}>"


class ShardValues:
    """A value of each sample, read once a shard and forgotten when the shard is in no snapshot any more.

    `read` gives those of a whole shard, `[num_samples]`. Of the last snapshot, `of_shards` has the values by
    shard id, and `damaged` the (position, error) of the other shards. Used by one thread.
    """

    def __init__(self, read: Callable[[MappedShard], npt.NDArray[Any]], absent: np.generic) -> None:
        self._read, self._absent = read, absent
        self.of_shards: dict[int, npt.NDArray[Any]] = {}
        self.damaged: list[tuple[int, CorruptShardError]] = []

    def of(self, snapshot: Snapshot) -> npt.NDArray[Any]:
        """The values of the samples of `snapshot`, `[num_samples]`; `absent` for those of damaged shards."""
        known, self.of_shards, self.damaged = self.of_shards, {}, []
        parts = [np.empty(0, self._absent.dtype)]
        starts = (np.cumsum(snapshot.counts) - snapshot.counts).tolist()
        pairs = zip(snapshot.shard_ids.tolist(), snapshot.counts.tolist(), strict=True)
        for position, (shard_id, count) in enumerate(pairs):
            try:
                found = known.get(shard_id)
                found = self._of(snapshot, shard_id, starts[position], count) if found is None else found
                self.of_shards[shard_id] = found
            except CorruptShardError as error:
                self.damaged.append((position, error))
                found = np.full(count, self._absent)
            parts.append(found)
        return np.concatenate(parts)

    def _of(self, snapshot: Snapshot, shard_id: int, start: int, count: int) -> npt.NDArray[Any]:
        shard = MappedShard(shard_path(snapshot.root, shard_id))
        values = self._read(shard)
        if snapshot.rows is not None:
            return values[snapshot.rows[start : start + count]]
        return values if snapshot.split is None else values[snapshot.split.rows(shard.key_hashes())]


def columns_of(shard: MappedShard, names: Iterable[str]) -> list[str]:
    """The columns that hold the fields `names` in the file of `shard`."""
    parts = (f"{name}{part}" for name in names for part in ("", "#offsets", "#shapes"))
    return [column for column in parts if column in shard.columns]


def _file_size(fd: int) -> int:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("it is not a file")
    return info.st_size


def _read_header(fd: int, file_bytes: int) -> bytes:
    """The JSON of the header, padding included."""
    length = header_bytes(os.pread(fd, LENGTH_BYTES, 0), file_bytes)
    text = os.pread(fd, length, LENGTH_BYTES)
    if len(text) != length:
        raise ValueError("the file is truncated")
    return text


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
