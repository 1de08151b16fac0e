"""The bound for one object: the most bytes that are read of it, or that decompressing it may give.

An object is held in memory as a whole: a file, the files of a sample in a tar, a record, the arrays of an
archive, the pixels of an image. Its bound is `max_object_size` of the source, and at most the cache's limit.
"""

from __future__ import annotations

import threading
from typing import Final

from cachestream.config import format_size

DEFAULT_BYTES: Final = 2 * 10**9
_limit_bytes = 1 << 62  # the size limit of the cache that this process fills


class TooLargeError(ValueError):
    """An object is above the bound. It is skipped and counted, like a malformed one."""


class _PerThread(threading.local):
    """The bound of the source that the current thread reads."""

    asked_bytes = DEFAULT_BYTES


_per_thread = _PerThread()


def limit_to(nbytes: int) -> None:
    """Set the bound for all objects that this process reads to `nbytes`, the limit of its cache."""
    global _limit_bytes
    _limit_bytes = nbytes


def enter(asked_bytes: int) -> None:
    """Set the bound for the objects that this thread reads and decodes from now on."""
    _per_thread.asked_bytes = asked_bytes


def smaller(asked_bytes: int) -> int:
    """Return the bound for the objects of a source whose own bound is `asked_bytes`."""
    return min(asked_bytes, _limit_bytes)


def most_bytes() -> int:
    """Return the bound for the objects that this thread reads and decodes."""
    return smaller(_per_thread.asked_bytes)


def check(nbytes: int, most: int | None = None) -> None:
    """Raise TooLargeError if an object of `nbytes` is above `most` (None: the bound of this thread)."""
    most = most_bytes() if most is None else most
    if nbytes > most:
        what = "the cache's size_limit" if most == _limit_bytes else "max_object_size= of the source"
        raise TooLargeError(f"more than {format_size(most)} in one object; raise {what} to read it")
