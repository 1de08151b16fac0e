"""The bound for one object: how many bytes are read of it, and come of it when it is unpacked, at most.

An object is what is held in memory as one: a file, the files of a sample in a tar, a record, the arrays of an archive, the
pixels of an image. The bound is that of its source (`max_object_size`), and never above the limit of the cache that is filled.
"""

from __future__ import annotations

import threading
from typing import Final

from cachestream.config import format_size

DEFAULT_BYTES: Final = 2 * 10**9
_limit_bytes = 1 << 62  # of the cache that this process fills


class TooLargeError(ValueError):
    """An object above the bound: it is skipped and counted, as one that is malformed is."""


class _PerThread(threading.local):
    """The bound of the source that a thread reads."""

    asked_bytes = DEFAULT_BYTES


_per_thread = _PerThread()


def limit_to(nbytes: int) -> None:
    """Set the bound for all objects that this process reads: the limit of its cache."""
    global _limit_bytes
    _limit_bytes = nbytes


def enter(asked_bytes: int) -> None:
    """Set the bound for what this thread reads and decodes from now on: that of its source."""
    _per_thread.asked_bytes = asked_bytes


def smaller(asked_bytes: int) -> int:
    """The bound for the objects of a source that asks for `asked_bytes`."""
    return min(asked_bytes, _limit_bytes)


def most_bytes() -> int:
    """The bound for what this thread reads and decodes."""
    return smaller(_per_thread.asked_bytes)


def check(nbytes: int, most: int | None = None) -> None:
    """Raise TooLargeError if `nbytes` of one object are more than `most` (None: the bound of this thread)."""
    most = most_bytes() if most is None else most
    if nbytes > most:
        what = "the cache's size_limit" if most == _limit_bytes else "max_object_size= of the source"
        raise TooLargeError(f"more than {format_size(most)} in one object; raise {what} to read it")
