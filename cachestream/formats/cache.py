"""The shards of another cache, on any remote of fsspec: a cache that is itself a source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from cachestream.schema import Schema
from cachestream.shard_format import LENGTH_BYTES, SUFFIX, ShardData, header_bytes
from cachestream.sources.api import (
    ConfigError,
    File,
    FileList,
    FilesSource,
    Format,
    Item,
    Part,
    Rows,
    SampleError,
    SourceError,
    SourceUnavailableError,
    Url,
    redact,
    size_of,
)

ROWS_BYTES: Final = 8 << 20


class CacheFormat(Format):
    """Shards of a cache; a sample keeps its key."""

    name = "cache"
    nouns = ("shard", "shard")

    @classmethod
    def claims(cls, names: Sequence[str]) -> bool:
        return names[0] == "cache.json" and any(name.startswith("shards/") for name in names)

    def find(self, urls: Any, storage_options: Mapping[str, Any] | None, owner: str) -> FileList:
        if not isinstance(urls, str | os.PathLike) or not os.fspath(urls):
            found = "an empty path" if isinstance(urls, str | os.PathLike) else f"a {type(urls).__name__}"
            raise ConfigError(
                f"{owner} takes the path or URL of one cache, not {found}; several are read by mix()"
            )
        return _list_shards(os.fspath(urls).rstrip("/"), storage_options)

    def prefix(self, file: File, part: Part) -> str:
        return ""

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the samples of a shard in order, as `Rows` where they are dicts without fields of varying
        shape.
        """
        shard = _load(file)
        keys = shard.keys()
        step = max(1, shard.num_samples * ROWS_BYTES // max(1, shard.size_bytes))
        for start in range(0, shard.num_samples, step):
            stop = min(start + step, shard.num_samples)
            columns = {field.name: shard.values(field, start, stop) for field in shard.schema.fields}
            if _is_columnar(shard.schema):
                yield Rows(keys[start:stop], columns)
                continue
            for key, values in zip(keys[start:stop], zip(*columns.values(), strict=True), strict=True):
                yield key, _sample(shard.schema, values)


class CacheSource(FilesSource):
    """The samples of another cache, read from its shards; a unit is a shard.

    url: the folder of the cache, the one with `cache.json` and `shards/`: where a node fills it, on a disk
    that nodes share or by `sftp://`, or a copy of it, in a bucket. Its catalogue is not read, and nothing is
    locked or written there.

    Samples, fields, dtypes and keys are those of the cache, samples that are held out there included. To a
    `transform`, a value of bfloat16 is an array of the dtype `[("bfloat16", "<u2")]`: its bits.

    The shards are listed once, here; one that is evicted before it is read is skipped and counted, as is one
    that does not match its checksums. storage_options are passed to fsspec's driver. Raises ConfigError for
    invalid arguments, SourceError for a folder that holds no cache or an empty one, and
    SourceUnavailableError for a remote that does not answer.
    """

    reads = CacheFormat

    def __init__(self, url: Url, *, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(CacheFormat(), url, storage_options)
        is_local = self._files.remote.is_local
        self.cache_folder = os.path.realpath(f"{self._files.path(0)}/../..") if is_local else None


def _load(file: File) -> ShardData:
    """Fetch a shard and check it. Raises SampleError for one that is gone or damaged."""
    data = file.whole()
    try:
        stop = LENGTH_BYTES + header_bytes(bytes(data[:LENGTH_BYTES]), len(data))
        shard = ShardData(bytes(data[LENGTH_BYTES:stop]), np.frombuffer(data, np.uint8))
        shard.check()
    except ValueError as error:
        raise SampleError(
            f"{file.where}: {error}; run 'cachestream verify CACHE --repair' where this cache is filled"
        ) from error
    return shard


def _list_shards(root: str, storage_options: Mapping[str, Any] | None) -> FileList:
    try:
        return FileList(
            f"{root}/shards/", storage_options, owner="CacheSource", extensions=SUFFIX, recursive=False
        )
    except SourceUnavailableError:
        raise
    except SourceError as error:
        reason = error
    try:
        settings = FileList(f"{root}/cache.json", storage_options, owner="CacheSource")
        size_of(settings.remote, settings.path(0), settings.where(0))
    except SourceUnavailableError:
        raise
    except SourceError:
        raise SourceError(
            f"{redact(root)}: no cache is found there ({reason}); "
            "give its folder, the one with cache.json and shards/"
        ) from None
    unless = ", unless the web server lists no folders" if settings.remote.is_web else ""
    raise SourceError(
        f"{redact(root)}: the cache is still empty{unless}; wait until its worker has published a shard"
    )


def _is_columnar(schema: Schema) -> bool:
    return schema.container == "dict" and all(
        field.shape is not None or field.kind != "tensor" for field in schema.fields
    )


def _sample(schema: Schema, values: tuple[Any, ...]) -> Any:
    if schema.container == "bare":
        return values[0]
    return values if schema.container == "tuple" else dict(zip(schema.names, values, strict=True))
