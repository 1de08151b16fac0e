"""Whether a process's samples have to come from the disk: judged by its page faults and by what is in memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Final

from cachestream.mapping import count_cached
from cachestream.model import IntArray

__all__ = ["Coldness"]

_ENOUGH: Final = 256  # pages in memory, one after the other, after which nothing is missing any more
_UNSEEN: Final = 1


def count_faults() -> int:
    """How often this process has waited for a page from the disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class Coldness:
    """Whether pages are missing. It is to be seen at the first look; then, from when the process has waited for the
    disk, until `_ENOUGH` pages that were asked for were there, one after the other.
    """

    def __init__(self, faults: Callable[[], int] = count_faults) -> None:
        self._faults = faults
        self._seen = -1
        self._left = _UNSEEN

    def look(self) -> bool:
        """Whether to see what is missing now."""
        before, self._seen = self._seen, self._faults()
        if 0 <= before < self._seen:
            self._left = _ENOUGH
        return self._left > 0

    @property
    def is_first(self) -> bool:
        """Whether nothing has been seen yet."""
        return self._left == _UNSEEN

    def note(self, pages: int, cached: int) -> None:
        """`cached` of `pages` that will be needed are in memory."""
        if cached < pages:
            self._left = _ENOUGH
        else:
            self._left = max(0, self._left - pages)

    def see(self, addresses: IntArray, most: int) -> None:
        """Note of up to `most` of these addresses, int64 `[n]`, whether they are in memory."""
        some = addresses[:: -(-len(addresses) // most) or 1]
        self.note(len(some), count_cached(some))
