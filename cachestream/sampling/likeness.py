"""Telling whether a transform is another than the one that a cache was filled with, to warn of a mixture.

A guess by the code of the function itself: what it calls, closes over or reads from files may have changed unseen.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import xxhash

from cachestream.storage.cache import Cache

__all__ = ["has_changed", "likeness"]

_KEY: Final = "transform"


def has_changed(cache: Cache, transform: Callable[..., Any] | None) -> bool:
    """Note `transform` in the catalogue; whether samples are cached that another one made, as far as that is seen."""
    mark = likeness(transform)
    with cache.catalogue.reading() as tables:
        known, samples = tables.meta(_KEY), tables.totals()[1]
    if known != mark:
        with cache.catalogue.transaction() as tables:
            tables.set_meta(_KEY, mark)
    # Other versions of Python compile the same function to something else.
    comparable = known is not None and mark and str(known).partition(":")[0] == mark.partition(":")[0]
    return bool(comparable and known != mark and samples)


def likeness(transform: Callable[..., Any] | None) -> str:
    """What is the same for transforms of the same code, also in another process; "" where there is none to see."""
    while isinstance(transform, functools.partial):
        transform = transform.func
    version = "{}.{}".format(*sys.version_info)
    if transform is None:
        return f"{version}:"
    function = getattr(transform, "__func__", transform)
    code = getattr(function, "__code__", None) or getattr(type(transform).__call__, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    return f"{version}:{xxhash.xxh3_64_hexdigest(repr(_parts(code)).encode())}"


def _parts(code: CodeType) -> tuple[Any, ...]:
    return code.co_name, code.co_code, code.co_names, tuple(map(_constant, code.co_consts))


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _parts(value)
    if isinstance(value, frozenset):
        return sorted(map(repr, value))  # its own order depends on the process
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    return value
