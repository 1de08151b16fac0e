"""The shards of another cache, on any remote of fsspec: a cache that is itself a source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from cachestream.errors import ConfigError, SampleError, SourceError, SourceUnavailableError
from cachestream.listing.file_list import FileList, Url
from cachestream.schema import Schema
from cachestream.shard_format import LENGTH_BYTES, SUFFIX, ShardData, header_bytes
from cachestream.sources.base import Rows, one_by_one
from cachestream.sources.fields import Defaults
from cachestream.sources.sample_files import FileUnits, SampleFiles
from cachestream.transport.remote_errors import map_errors, redact
from cachestream.transport.remote_object import fetch, size_of

ROWS_BYTES: Final = 8 << 20


class CacheSource(SampleFiles):
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

    def __init__(self, url: Url, *, storage_options: Mapping[str, Any] | None = None) -> None:
        given: Any = url
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            found = "an empty path" if isinstance(given, str | os.PathLike) else f"a {type(given).__name__}"
            raise ConfigError(
                f"CacheSource takes the path or URL of one cache, not {found}; several are read by mix()"
            )
        files = _list_shards(os.fspath(url).rstrip("/"), storage_options)
        self.cache_folder = os.path.realpath(f"{files.path(0)}/../..") if files.remote.is_local else None
        super().__init__("cache", files, (), Defaults(None))
        self._set_units(FileUnits(np.ones(len(files))), files.names)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the samples of a shard in order. Raises as `Source.read`."""
        return one_by_one(self.read_rows(unit, rng))

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        """Yield the same samples, as `Rows` where they are dicts without fields of varying shape."""
        index, _ = self._locate(unit)
        shard = self._load(index)
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

    def _load(self, index: int) -> ShardData:
        """Fetch shard `index` and check it. Raises SampleError for one that is gone or damaged."""
        files, where = self._files, self._files.where(index)
        with map_errors(where, one_of_many=True, secrets=files.remote.secrets):
            data = fetch(files.remote, files.path(index))
        try:
            stop = LENGTH_BYTES + header_bytes(bytes(data[:LENGTH_BYTES]), len(data))
            shard = ShardData(bytes(data[LENGTH_BYTES:stop]), np.frombuffer(data, np.uint8))
            shard.check()
        except ValueError as error:
            raise SampleError(
                f"{where}: {error}; run 'cachestream verify CACHE --repair' where this cache is filled"
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
