"""Arguments of the command line: types with help, objects by name, KEY=VALUE pairs, sizes in pixels."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cachestream.errors import ConfigError
from cachestream.sources.open import open_source

_PIXELS: Final = re.compile(r"(\d+)(?:x(\d+))?")


def load(name: str | None, what: str) -> Any:
    """The object that "module:name" names, looked for in the current folder too; None for None."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    with suppress(FileNotFoundError):  # it is gone: nothing can be loaded from there
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):  # the module may print, and a program may read our output
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what}={name!r} cannot be loaded: {error}; give module:name") from error


def source_of(
    text: str,
    source_options: Sequence[str] | None,
    storage_options: Sequence[str] | None,
    **named: str | None,
) -> Any:
    """A URL or path as a source, or the object that "module:name" names.

    `source_options` and `storage_options` are KEY=VALUE pairs; `named` are options with flags of their own,
    sizes in pixels as text. Raises ConfigError for text that cannot be parsed.
    """
    options = pairs_of(source_options or (), "--source-option")
    if storage_options:
        options["storage_options"] = pairs_of(storage_options, "--storage-option")
    for name, value in named.items():
        if value is not None:
            options[name] = _pixels(name, value) if name in ("resize", "crop") else value
    module, colon, name = text.partition(":")
    is_name = bool(colon) and name.isidentifier() and all(p.isidentifier() for p in module.split("."))
    what = load(text, "SOURCE") if is_name and not os.path.exists(text) else text
    return open_source(what, **options)


def pairs_of(pairs: Sequence[str], what: str) -> dict[str, Any]:
    """KEY=VALUE pairs as a dict; values are read as JSON where they are, dots in a key nest."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"{what}: give KEY=VALUE")  # not what was given: it may be a secret
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *path, last = key.split(".")
        inner = found
        for name in path:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"{what}: {name!r} has a value already, and cannot have keys of its own as well"
                )
        inner[last] = value
    return found


def finite(value: float | None) -> float | None:
    """A number on the command line; infinity and NaN, which pass a `min` of typer's, are refused."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("give a finite number")
    return value


def _pixels(name: str, text: str) -> int | tuple[int, int]:
    """A number of pixels, or "240x320" as height and width."""
    match = _PIXELS.fullmatch(text)
    if match is None:
        raise ConfigError(f"--{name} {text!r}: give pixels, such as 224, or HEIGHTxWIDTH, such as 240x320")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="URL, path or wildcard; or module:name of a source.")
]
CacheArgument = Annotated[
    str, typer.Argument(metavar="CACHE", envvar="CACHESTREAM_CACHE", help="The cache's directory.")
]
StorageOption = Annotated[
    list[str] | None, typer.Option(help="KEY=VALUE for the storage driver, such as anon=true; repeatable.")
]
SourceOption = Annotated[
    list[str] | None, typer.Option(help="KEY=VALUE for the source, such as extensions=.jpg; repeatable.")
]
FormatOption = Annotated[
    str | None, typer.Option(help="The format, where no file ending tells it: mds, litdata, files, ….")
]
ResizeOption = Annotated[
    str | None, typer.Option(metavar="PIXELS", help="Images: the shorter side, or HEIGHTxWIDTH.")
]
CropOption = Annotated[
    str | None, typer.Option(metavar="PIXELS", help="Images: a square from the middle, or HEIGHTxWIDTH.")
]
SecondsOption = Annotated[float, typer.Option(min=0.1, callback=finite, help="How long to measure.")]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Sampling processes; by default one per core, at most 4.")
]
SizeLimitOption = Annotated[
    str | None,
    typer.Option(
        help='The most that CACHE takes, such as "200GB"; by default unchanged, or 80 % of the free disk for '
        "a new cache."
    ),
]
ShardSizeOption = Annotated[
    str | None, typer.Option(help="The size of a full shard; by default 64MB, or less in a small cache.")
]
OrderOption = Annotated[
    str, typer.Option(help="shuffle or sequential; or module:name of weights, a sampler, a curriculum.")
]
PartitionOption = Annotated[
    str | None, typer.Option(metavar="I/N", help="Only the share of node I of N, counted from 0.")
]
HoldoutOption = Annotated[
    float | None, typer.Option(help="The share of the samples that is held out of training.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON for a program to read.")]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", help="Write a timeline for Perfetto into this file, a .json.")
]
TransformOption = Annotated[str | None, typer.Option(help="module:function, run before caching.")]
