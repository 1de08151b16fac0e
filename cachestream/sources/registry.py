"""The formats that are there: modules of `cachestream.formats`, and those of other packages, found by entry
points.

A module there is a format by its own name: `format="tar"`. It holds one public subclass of FilesSource, or
one of ArrayFile, which `ArraySource` reads windows of. Entry points are looked up once in a process, for what
is not built in; a plug-in is imported when it is used.

| group | name | object |
|-|-|-|
| `cachestream.sources` | of a format ("video"), or an ending (".mp4") | `fn(urls, **options) -> Source` |
| `cachestream.decoders` | an ending (".flac") | `fn(data: bytes) -> value`, a dict for several fields |
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import collection_paused
from cachestream.errors import ConfigError

if TYPE_CHECKING:
    from cachestream.sources.array_windows import ArrayFile
    from cachestream.sources.files_source import FilesSource

_FORMATS: Final = "cachestream.formats"
SOURCES: Final = "cachestream.sources"
DECODERS: Final = "cachestream.decoders"


# --- built in ----------------------------------------------------------------------------------


@cache
def _modules() -> Mapping[str, ModuleType]:
    package = import_module(_FORMATS)
    names = sorted(one.name for one in pkgutil.iter_modules(package.__path__) if one.name[0] != "_")
    return {name: import_module(f"{_FORMATS}.{name}") for name in names}


def _classes(attribute: str) -> dict[str, Any]:
    """Return the class of each module that has an attribute of its own, by the name of the module."""
    return {
        name: one
        for name, module in _modules().items()
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__ and attribute in vars(one)
    }


@cache
def file_sources() -> Mapping[str, type[FilesSource]]:
    """Return the sources of files, by the names of their formats."""
    return _classes("reads")


@cache
def array_files() -> Mapping[str, type[ArrayFile]]:
    """Return the classes of arrays that can be read in windows, by the names of their formats."""
    return _classes("array_endings")


# --- of other packages -------------------------------------------------------------------------


@lru_cache(maxsize=2)
def _installed(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name; distributions seen twice on the path count once."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        known = found.setdefault(point.name.lower(), [])
        if (_package(point), point.value) not in [(_package(one), one.value) for one in known]:
            known.append(point)
    return found


def plugin_formats() -> list[str]:
    """Return the names of the formats that plug-ins add."""
    return sorted(name for name in _installed(SOURCES) if not name.startswith("."))


def plugin_ending(name: str) -> str | None:
    """Return the longest ending of `name`, in lower case, that a plug-in's source reads, or None."""
    endings = [one for one in _installed(SOURCES) if one.startswith(".") and name.endswith(one)]
    return max(endings, key=len, default=None)


def plugin_decoders() -> tuple[str, ...]:
    """Return the endings that plug-ins decode."""
    return tuple(sorted(_installed(DECODERS)))


def expect_decoders(extensions: Iterable[str]) -> None:
    """Make files with one of `extensions` an error here, and not bytes, unless their plug-in is installed."""
    for extension in extensions:
        _installed(DECODERS).setdefault(extension, [])


def plugin_decoder(extension: str) -> Callable[[bytes], Any] | None:
    """Return a plug-in's decoder for files with `extension` (".flac"), or None. Raises as `load_plugin`."""
    return load_plugin(DECODERS, extension) if extension in _installed(DECODERS) else None


@lru_cache(maxsize=256)
@collection_paused()
def load_plugin(group: str, name: str) -> Callable[..., Any]:
    """Import and return the object of the entry point `name`.

    Raises ConfigError with the package if that fails, and for a name of several packages or of none.
    """
    points = _installed(group)[name]
    if not points:
        raise ConfigError(
            f"{name!r} in {group!r} is of a package that this node lacks: install it on all nodes of the "
            "cluster"
        )
    point, *others = points
    if others:
        packages = ", ".join(map(_package, points))
        raise ConfigError(f"{name!r} in {group!r} is of several packages ({packages}): uninstall all but one")
    what = f"{_package(point)}: its plug-in {name!r} in {group!r} ({point.value})"
    try:
        found: Any = point.load()
    except Exception as error:
        raise ConfigError(
            f"{what} cannot be imported: {type(error).__name__}: {error}; mend or uninstall it"
        ) from error
    if not callable(found):
        raise ConfigError(f"{what} is a {type(found).__name__}, which cannot be called; mend or uninstall it")
    return found  # type: ignore[no-any-return]


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
