"""The arguments and options that several commands take: how they are called, and what `--help` says of them."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "CacheArgument",
    "CropOption",
    "FormatOption",
    "JsonOption",
    "OrderOption",
    "PartitionOption",
    "ResizeOption",
    "SizeLimitOption",
    "SourceArgument",
    "SourceOption",
    "StorageOption",
    "TransformOption",
    "WorkersOption",
]

SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE", help="URL, path or wildcard; or module:name of a source.")
]
CacheArgument = Annotated[
    str, typer.Argument(metavar="CACHE", envvar="CACHESTREAM_CACHE", help="The cache's directory.")
]
OrderOption = Annotated[
    str, typer.Option(help="shuffle or sequential; or module:name of weights, a sampler, a curriculum.")
]
PartitionOption = Annotated[
    str | None, typer.Option(metavar="I/N", help="Only the share of node I of N, counted from 0.")
]
StorageOption = Annotated[
    list[str] | None, typer.Option(help="KEY=VALUE for the storage driver, such as anon=true; repeatable.")
]
SourceOption = Annotated[
    list[str] | None, typer.Option(help="KEY=VALUE for the source, such as extensions=.jpg; repeatable.")
]
FormatOption = Annotated[str | None, typer.Option(help="Of what no ending tells: mds, litdata, files, ….")]
ResizeOption = Annotated[
    str | None, typer.Option(metavar="PIXELS", help="Images: the shorter side, or HEIGHTxWIDTH.")
]
CropOption = Annotated[
    str | None, typer.Option(metavar="PIXELS", help="Images: a square from the middle, or HEIGHTxWIDTH.")
]
WorkersOption = Annotated[int | None, typer.Option(help="Sampling processes. Else one a core, 4 at most.")]
SizeLimitOption = Annotated[
    str | None,
    typer.Option(help='Such as "200GB". Else as it was, or for a new cache 80 % of the free disk.'),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON for a program to read.")]
TransformOption = Annotated[str | None, typer.Option(help="module:function, run before caching.")]
