"""Telling a cache that is too small for what is waited for from one that is still being filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

__all__ = ["Churn", "Look", "counts_from"]


@dataclass(frozen=True, slots=True)
class Look:
    """What was evicted up to now, and the limit; `tells` whether evictions now come from that alone: no lease and no full
    disk takes of its room, and the cache is not far below it, as it is after an eviction by hand.
    """

    evicted_samples: int
    size_limit: int
    tells: bool


def counts_from(since: Look, now: Look) -> Look:
    """The look from which on evictions count, at `now`, where they did from `since`."""
    return since if now.tells and now.size_limit == since.size_limit else now


class Churn:
    """Counts the samples that are evicted from `cache` for want of room while somebody waits for more."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._since = self._last = self._look()

    def evicted(self) -> int:
        """How many since the limit was last another, or something else last took of the room."""
        with self._cache.catalogue.reading() as tables:
            evicted, limit = int(tables.meta("evicted_samples", 0)), int(tables.meta("size_limit"))
        if (evicted, limit) != (self._last.evicted_samples, self._last.size_limit):
            self._last = self._look()
            self._since = counts_from(self._since, self._last)
        return self._last.evicted_samples - self._since.evicted_samples

    def _look(self) -> Look:
        admission = self._cache.admission
        with self._cache.catalogue.reading() as tables:
            evicted, limit = int(tables.meta("evicted_samples", 0)), int(tables.meta("size_limit"))
            room, leases = admission.room(tables), admission.leases.count()
        is_near = limit <= room.limit_bytes and room.used_bytes > limit // 2
        return Look(evicted, limit, tells=is_near and not leases)
