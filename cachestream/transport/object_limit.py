"""The limit for one object: the most bytes that are read of it, or that decompressing it may give.

An object is held in memory as a whole: a file, the files of a sample in a tar, a record, the arrays of an
archive, the pixels of an image. The limit is the source's `max_object_size`, at most the cache's size limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Final

from cachestream.config import format_size

DEFAULT_BYTES: Final = 2 * 10**9
_cache_bytes = 1 << 62  # the size limit of the cache that this process fills
_source_bytes: Final[ContextVar[int]] = ContextVar("max_object_size", default=DEFAULT_BYTES)


class TooLargeError(ValueError):
    """An object is above the limit. It is skipped and counted, like a malformed one."""


def set_cache_limit(nbytes: int) -> None:
    """Set the size limit of the cache that this process fills, which no object may exceed."""
    global _cache_bytes
    _cache_bytes = nbytes


@contextmanager
def applied(source_bytes: int) -> Iterator[None]:
    """Apply the `max_object_size` of a source to the objects that are read and decoded in the block."""
    token = _source_bytes.set(source_bytes)
    try:
        yield
    finally:
        with suppress(ValueError):  # an abandoned generator may be closed in another context
            _source_bytes.reset(token)


def limit_bytes(source_bytes: int | None = None) -> int:
    """Return the limit for objects of a source with this `max_object_size` (None: the applied one)."""
    return min(_source_bytes.get() if source_bytes is None else source_bytes, _cache_bytes)


def check(nbytes: int, most: int | None = None) -> None:
    """Raise TooLargeError if an object of `nbytes` is above `most` (None: the limit that is applied)."""
    most = limit_bytes() if most is None else most
    if nbytes > most:
        what = "the cache's size_limit" if most == _cache_bytes else "max_object_size= of the source"
        raise TooLargeError(f"more than {format_size(most)} in one object; raise {what} to read it")
