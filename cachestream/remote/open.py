"""`open_source`: from whatever names the data to the source that reads it."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from cachestream.config import reject_unknown
from cachestream.errors import ConfigError
from cachestream.remote.arrays import ARRAY_ENDINGS, ArraySource
from cachestream.remote.datasets import DatasetSource, is_map_style
from cachestream.remote.files import FileSource
from cachestream.remote.functions import CallableSource
from cachestream.remote.iterables import IterableSource, is_iterable
from cachestream.remote.litdata import LitDataSource
from cachestream.remote.locate import is_zarr, split_dataset
from cachestream.remote.mds import MDSSource
from cachestream.remote.retry import redact
from cachestream.remote.source import Source
from cachestream.remote.tables import PARQUET_ENDINGS, ParquetSource
from cachestream.remote.tars import TAR_ENDINGS, TarSource
from cachestream.remote.tfrecords import TFRECORD_ENDINGS, TFRecordSource

__all__ = ["open_source"]

# How paths and URLs end → the source for them; all others are plain files.
_BY_ENDING: Final[dict[str, Callable[..., Source]]] = {
    **dict.fromkeys(TAR_ENDINGS, TarSource),
    **dict.fromkeys(ARRAY_ENDINGS, ArraySource),
    **dict.fromkeys(PARQUET_ENDINGS, ParquetSource),
    **dict.fromkeys(TFRECORD_ENDINGS, TFRecordSource),
    ".npy": FileSource,  # small arrays, a sample each; windows of large ones are asked for by window=
}
_AFTER_NAME: Final = re.compile(r"[/*]+$")


def open_source(what: Any, **options: Any) -> Source:
    """The source for `what`.

    A path, a URL, a wildcard or a list of them: by its ending, else a `FileSource`; with `window=`,
    or as a dict of them by name, an `ArraySource`. A function
    `fn(rng) -> sample`: a `CallableSource`. Anything with `what[i]` and `len(what)`, such as a
    map-style torch Dataset: a `DatasetSource`. Anything else that can be iterated again and again, such
    as an IterableDataset, a WebDataset or a Hugging Face stream: an `IterableSource`. A Source:
    itself. `options` are those of the class that is chosen. Raises ConfigError for what none of them can read.
    """
    if isinstance(what, Source) and not isinstance(what, type):
        if options:
            raise ConfigError(f"open_source() takes no options beside a Source: {', '.join(options)}")
        return what
    if isinstance(what, str | os.PathLike) or _is_list_of_urls(what):
        first = os.fspath(what if isinstance(what, str | os.PathLike) else what[0])
        return _make(ArraySource if "window" in options else _by_ending(first), (what,), options)
    if isinstance(what, Mapping) and what and all(map(_is_url_or_list, what.values())):
        return _make(ArraySource, (what,), options)
    if is_iterable(what):
        return _make(IterableSource, (what,), options)
    if is_map_style(what) and not (isinstance(what, list | tuple) and not what):
        return _make(DatasetSource, (what,), options)
    if callable(what) and not isinstance(what, type):
        return _make(CallableSource, (what,), options)
    raise ConfigError(f"open_source() cannot read {_describe(what)}")


def _make(kind: Callable[..., Source], args: tuple[Any, ...], options: Mapping[str, Any]) -> Source:
    known = [
        name
        for position, (name, parameter) in enumerate(inspect.signature(kind).parameters.items())
        if position >= len(args) and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    reject_unknown(
        "open_source", {name: value for name, value in options.items() if name not in known}, known
    )
    return kind(*args, **options)


def _is_list_of_urls(what: Any) -> bool:
    return (
        isinstance(what, list | tuple)
        and bool(what)
        and all(isinstance(url, str | os.PathLike) for url in what)
    )


def _is_url_or_list(what: Any) -> bool:
    return isinstance(what, str | os.PathLike) or _is_list_of_urls(what)


def _by_ending(url: str) -> Callable[..., Source]:
    name = _AFTER_NAME.sub("", redact(url)).lower()
    if is_zarr(name) or split_dataset(url)[1] is not None:  # inside of a store or a file
        return ArraySource
    for ending in sorted(_BY_ENDING, key=len, reverse=True):
        if name.endswith(ending):
            return _BY_ENDING[ending]
    return FileSource


def _describe(what: Any) -> str:
    kind = type(what).__name__
    if isinstance(what, bytes | bytearray):
        return f"{kind}; give a path or URL as str"
    if isinstance(what, list | tuple):
        return f"an empty {kind}; give at least one path or URL"
    if hasattr(type(what), "iloc"):
        return f"a table ({kind}); wrap it in a map-style dataset whose [i] returns row i as a dict"
    if isinstance(what, Mapping | set | frozenset):
        return f"a {kind}; give a list, a map-style dataset or a function fn(rng) -> sample"
    if isinstance(what, Iterator):
        return (
            f"an iterator ({kind}), which can be gone through only once; give an object whose iter() begins anew, or "
            "IterableSource(make) of a function make(shard, shards)"
        )
    return f"{kind}; give a path, a URL, a list of them, a map-style dataset, a function fn(rng) -> sample or a Source"
