"""The arguments and options that several commands take: how they are called, and what `--help` says of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

__all__ = [
    "CacheArgument",
    "Commands",
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


class Commands(TyperGroup):
    """Commands whose options have the names of their flags in the environment: CACHESTREAM_STATUS_JSON for --json."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, command in self.commands.items():
            for option in command.params:
                if option.param_type_name == "option":
                    flag = max(option.opts, key=len).removeprefix("--")
                    option.envvar = f"cachestream_{name}_{flag}".replace("-", "_").upper()


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
