"""`open_source`: the choice of a source for a URL, a path or an object; and `mix`, for several of them."""

from __future__ import annotations

import inspect
import math
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from cachestream.config import check_mapping, reject_unknown
from cachestream.errors import ConfigError
from cachestream.listing.file_list import FileList
from cachestream.listing.manifest import Manifest, start_of
from cachestream.listing.patterns import extension_of, kind_of
from cachestream.sources.arrays import ArraySource, array_at, split_dataset
from cachestream.sources.base import Source, is_source
from cachestream.sources.datasets import (
    CallableSource,
    DatasetSource,
    IterableSource,
    is_iterable,
    is_map_style,
)
from cachestream.sources.decode.compression import decompressed
from cachestream.sources.mix import MixSource
from cachestream.sources.registry import SOURCES, file_sources, load_plugin, plugin_ending, plugin_formats
from cachestream.transport.remote_errors import redact
from cachestream.transport.remote_object import open_stream

_ARRAY, _FILES = "array", "files"  # formats of any ending
# The options of all sources.
SOURCE_OPTIONS: Final = (
    *("storage_options", "label", "extensions", "recursive", "num_units", "thread_safe"),
    *("format", "resize", "crop", "columns", "decoders", "samples_per_visit", "manifest", "shards"),
    *("window", "windows", "stride", "jitter", "dataset", "features", "nulls", "decode_images"),
    *("first_names", "check_crc", "check_hashes", "compression", "fields", "encoding", "max_object_size"),
    *("delimiter", "raw", "dtype"),
)
_PROTOCOL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")
_NAME: Final = re.compile(r"[A-Za-z][\w-]{0,31}", re.ASCII)  # of a source in a mix
# Names such as "train-00000-of-00002", without an ending that tells the format.
_NUMBERED: Final = re.compile(r"[^.]*-\d{4,}-of-\d{4,}")
# Suffixes after an ending: wildcards, and the numbers of TensorFlow Datasets ("-00000-of-00010").
_NUMBERS: Final = r"[\d?*{}\[\].,]+"
_SUFFIXES: Final = re.compile(rf"(-{_NUMBERS}(-of-{_NUMBERS})?|[/*])+$")


@dataclass(frozen=True, slots=True)
class Unopened:
    """The arguments of a later call of `open_source`. Both may hold secrets, which no repr shows."""

    what: Any = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)


def protocols_of(what: Any) -> tuple[str, ...]:
    """Return the fsspec protocols needed to read `what`, judged by its first URL; no driver is loaded."""
    if isinstance(what, Unopened):
        return protocols_of(what.what)
    if isinstance(what, Manifest):
        return protocols_of(what.url)
    if _is_list_of_urls(what):
        return protocols_of(what[0])
    if not isinstance(what, str):
        return ()
    return tuple(found[1] for part in what.split("::") if (found := _PROTOCOL.match(part)))


def open_source(what: Any, **options: Any) -> Source:
    """Open the source for `what`. `options` are those of the class that is chosen.

    - A path, a URL, a wildcard or a list of these: by its ending, else by the files listed there, else a
      `FileSource`. With `window=`, or for a dict of URLs by name, an `ArraySource`. `format=` chooses by
      name: "tar", "parquet", "arrow", "lines", "tfrecord", "array", "files", "cache", and "mds" and
      "litdata", which have no ending of their own. The folder of another cache: a `CacheSource`. A name of a
      format, or an ending, that is not built in may come from a plug-in (`cachestream.sources.registry`).
    - A `Manifest`, or with `manifest=True` (or a dict of its options) the path or URL of one: the files that
      it lists, by the ending of the first.
    - A function `fn(rng) -> sample`: a `CallableSource`.
    - An object with `what[i]` and `len(what)`, such as a map-style torch Dataset: a `DatasetSource`.
    - Another object that can be iterated repeatedly, such as an IterableDataset, a WebDataset or a Hugging
      Face stream: an `IterableSource`.
    - A Source: itself.

    For paths, URLs and manifests, `max_object_size` ("2GB" unless given) bounds one object after
    decompression: a file, the files of a sample in a tar, a record. Larger objects are skipped and counted.
    Raises ConfigError for other values of `what`, and for invalid options.
    """
    if isinstance(what, Unopened):
        return open_source(what.what, **what.options)
    if is_source(what):
        return _without_options(what, options)
    if (listed := options.pop("manifest", None)) not in (None, False):
        what = _as_manifest(what, listed)
    if isinstance(what, str | os.PathLike | Manifest) or _is_list_of_urls(what):
        return _open_urls(what, _bounded(options))
    if "format" in options:
        raise ConfigError(f"format={options['format']!r} is for paths and URLs")
    if isinstance(what, Mapping) and what and all(map(_is_url_or_list, what.values())):
        return _make(ArraySource, what, _bounded(options))
    if is_iterable(what):
        return _make(IterableSource, what, options)
    if is_map_style(what) and not (isinstance(what, list | tuple) and not what):
        return _make(DatasetSource, what, options)
    if callable(what) and not isinstance(what, type):
        return _make(CallableSource, what, options)
    raise ConfigError(f"open_source() cannot read {_describe(what)}")


def mix(sources: Mapping[Any, Any] | Iterable[tuple[Any, float]], **options: Any) -> MixSource:
    """Mix several sources, given as `{source: weight}`, as pairs, or as `{name: (source, weight)}`, in
    proportion to their weights.

    A source is a Source, or anything that `open_source` takes, which is opened with `options`. The proportion
    is that of units: a tar counts as one unit, as does a file. Units take turns, so that any number of first
    units has the sources in proportion but for a few units. In the shuffled order the proportion holds for a
    whole pass.

    A pass is so long that every unit of every source comes at least once; units of shorter sources come
    again. If one source is endless so is the mix, and the others are repeated, each time in another order.
    Keys begin with the name of the source, or its number, "0/", and from the second time on also with
    the number of times that the unit came before: "0.1/". All sources must have the same fields.

    Raises ConfigError for weights that are not above 0 and for names of other than letters, digits, "-" and
    "_", and the errors of `open_source`.
    """
    pairs: list[Any] = []
    names: list[Any] = []
    if isinstance(sources, Iterable):
        pairs = list(sources.items()) if isinstance(sources, Mapping) else list(sources)
    if isinstance(sources, Mapping) and any(isinstance(value, tuple | list) for value in sources.values()):
        names, pairs = list(sources), list(sources.values())
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ConfigError("mix() takes {source: weight}, or a list of pairs (source, weight), at least one")
    for _, weight in pairs:
        number = isinstance(weight, int | float | np.number) and not isinstance(weight, bool)
        if not number or not 0 < weight < math.inf:
            raise ConfigError(
                f"mix(): the weight {weight!r} must be a number above 0; leave out what has none"
            )
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        raise ConfigError(f"mix(): names are a letter and up to 31 letters, digits, '-' and '_': {names}")
    opened = [what if is_source(what) else open_source(what, **options) for what, _ in pairs]
    return MixSource(opened, [float(weight) for _, weight in pairs], names)


def _bounded(options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with max_object_size among the storage_options, from where objects are read."""
    most = options.pop("max_object_size", None)
    if most is not None:
        check_mapping("storage_options", options.get("storage_options"), "{'anon': True}")
        options["storage_options"] = {**(options.get("storage_options") or {}), "max_object_size": most}
    return options


def _without_options(source: Source, options: Mapping[str, Any]) -> Source:
    if options:
        raise ConfigError(
            f"open_source() takes no options beside a Source: {', '.join(options)}; "
            f"give them where {source!r} is made"
        )
    return source


def _open_urls(what: Any, options: dict[str, Any]) -> Source:
    wanted = options.pop("format", None)
    if wanted is not None:
        names = [*sorted((_ARRAY, *file_sources())), *plugin_formats()]
        if wanted not in names:
            known = ", ".join(map(repr, names))
            raise ConfigError(f"format={wanted!r}: give one of {known}, or install the package that adds it")
        return _make(_source(wanted), what, options)
    if isinstance(what, Manifest):
        first = start_of(what, options.get("storage_options"))
    else:
        first = os.fspath(what if isinstance(what, str | os.PathLike) else what[0])
    found = _ARRAY if "window" in options else _by_ending(first)
    if found == _ARRAY and isinstance(what, Manifest):
        raise ConfigError(
            f"{what.shown}: arrays are given as a list of URLs: open_source(list(Manifest(…)), …)"
        )
    return (
        _by_listing(what, redact(first), options) if found == _FILES else _make(_source(found), what, options)
    )


def _by_listing(what: Any, shown: str, options: dict[str, Any]) -> Source:
    """Return the source for `what`, chosen by its listing: "s3://bucket/train/", say, does not name a format.

    Only the listing is examined: looking up an index file would cost a request for each URL.
    """
    for_files = _options_of(_source(_FILES))
    others = {name: value for name, value in options.items() if name not in for_files}
    if others and not plugin_formats():  # a plug-in's source has options of its own
        kinds: list[Any] = [ArraySource, *file_sources().values()]
        known = {name for kind in kinds for name in _options_of(kind)}
        reject_unknown("open_source", others, known)
    by_name = {"storage_options", "extensions", "recursive", "first_names"}
    files = FileList(
        what,
        owner="FileSource",
        labelled=True,
        **{"first_names": "auto", **{name: value for name, value in options.items() if name in by_name}},
    )
    if any(one.reads.needs_last(files.key(0)) for one in file_sources().values()):
        files.complete()
    ends = files.key(0), files.key(len(files) - 1)
    claimed = _claimed(files, ends, shown) or _by_head(files, ends)
    # Spark leaves a file _SUCCESS beside its tables.
    by_ending = {_by_ending(name) for name in ends if not posixpath.basename(name).startswith(("_", "."))}
    formats = {claimed} if claimed else by_ending
    for name in sorted(formats - {_FILES}):
        if name == _ARRAY:
            continue
        kind = _source(name)
        if name not in file_sources():  # of a plug-in
            if len(formats) == 1:
                return _make(kind, what, options)
            continue
        takes, is_only = set(options) <= set(_options_of(kind)), len(formats) == 1
        if kind.reads.holds_many and (others or takes):
            if not is_only:
                _refuse_among_others(name, files, ends, shown)
            return _make(kind, what, options)
        if is_only and (takes or claimed):
            return _make(kind, what, options)
    reject_unknown("open_source", others, for_files)
    return _make(_source(_FILES), files, options)


def _refuse_among_others(name: str, files: FileList, ends: tuple[str, str], shown: str) -> None:
    file_sources()[name].reads.check_list(files)
    raise ConfigError(
        f"{shown} holds {name} files beside others ({ends[0]}, {ends[1]}): give format={name!r} "
        "to read those, extensions= for others, or format='files' for the bytes of each"
    )


def _source(name: str) -> Any:
    """Return the class for the files of a format, or the plug-in of this name or ending."""
    if name == _ARRAY:
        return ArraySource
    return file_sources()[name] if name in file_sources() else load_plugin(SOURCES, name)


def _claimed(files: FileList, ends: tuple[str, str], shown: str) -> str | None:
    """Return the format that claims the folder of these files, or None.

    Raises ConfigError for one that must be asked for.
    """
    names = files.names if not files.remote.has_queries else [files.key(i) for i in range(len(files))]
    for name, kind in file_sources().items():
        if kind.reads.claims(names):
            if kind.reads.is_found:
                return name
            folder = ends[0].rpartition("/")[0]
            where, that = (f", in {folder}/", "that folder and ") if folder else ("", "")
            raise ConfigError(
                f"{shown} holds shards of {name}{where}: give {that}format={name!r}, or format='files'"
            )
    return None


def _by_head(files: FileList, ends: tuple[str, str]) -> str | None:
    """Return the format of numbered files without an ending, by the first bytes of the first; else None."""
    if not all(_NUMBERED.fullmatch(posixpath.basename(name)) for name in ends):
        return None
    with open_stream(files.remote, files.path(0), files.where(0)) as stream:
        head = bytes(decompressed(stream).read(512))
    return next((name for name, kind in file_sources().items() if kind.reads.begins(head)), None)


def _as_manifest(what: Any, options: Any) -> Manifest:
    if not isinstance(what, str | os.PathLike) or not (options is True or isinstance(options, Mapping)):
        raise ConfigError(
            f"manifest= is a {type(options).__name__} beside a {type(what).__name__}: give True, or a dict "
            "of the options of Manifest, beside one path or URL"
        )
    given = {} if options is True else dict(options)
    reject_unknown("Manifest", given, _options_of(Manifest))
    return Manifest(what, **given)


def _make(kind: Callable[..., Source], what: Any, options: Mapping[str, Any]) -> Source:
    if all(one.kind is not one.VAR_KEYWORD for one in inspect.signature(kind).parameters.values()):
        reject_unknown("open_source", options, _options_of(kind))
    return kind(what, **options)


def _options_of(kind: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters of `kind` after the first one, which is the data."""
    return list(inspect.signature(kind).parameters)[1:]


def _is_list_of_urls(what: Any) -> bool:
    return (
        isinstance(what, list | tuple)
        and bool(what)
        and all(isinstance(url, str | os.PathLike) for url in what)
    )


def _is_url_or_list(what: Any) -> bool:
    return isinstance(what, str | os.PathLike) or _is_list_of_urls(what)


def _by_ending(url: str) -> str:
    """Return the format of a URL by its ending, or the ending of a plug-in; "files" for any other ending."""
    name = _SUFFIXES.sub("", redact(url)).lower()
    array = array_at(name)
    if (array is not None and not array.is_sample) or split_dataset(name)[1] is not None:
        return _ARRAY
    endings = {ending: name for name, kind in file_sources().items() for ending in kind.reads.endings}
    found = max(filter(name.endswith, endings), key=len, default=None)
    if found is not None:
        return endings[found]
    unknown = extension_of(name) and kind_of(extension_of(name)) == "data"
    return (unknown and plugin_ending(name)) or _FILES


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
            f"an iterator ({kind}), which can be gone through only once; give an object whose iter() begins "
            "anew, or IterableSource(make) of a function make(shard, shards)"
        )
    return (
        f"{kind}; give a path, a URL, a list of them, a map-style dataset, "
        "a function fn(rng) -> sample or a Source"
    )
