"""Telling a cache that is too small for what is waited for from one that is still being filled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cachestream.storage.admission import Admission
from cachestream.storage.catalogue import Catalogue

__all__ = ["Churn", "Look", "counts_from"]

_LOOKS: Final = 10


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
    """Tells whoever waits for more samples that no more fit.

    That is so once the most that was held meanwhile has been evicted for want of room. It takes several looks at
    evictions: between two of them a shard may have come, and made it enough for a moment, and another one gone.
    """

    def __init__(self, catalogue: Catalogue, admission: Admission) -> None:
        self._catalogue = catalogue
        self._admission = admission
        self._since = self._last = self._look()
        self._looks = self._most = 0

    def is_over(self, have: int) -> bool:
        """Whether no more fit than the `have` samples of now, or the most of earlier calls."""
        self._most = max(self._most, have)
        with self._catalogue.reading() as tables:
            evicted, limit = int(tables.meta("evicted_samples", 0)), int(tables.meta("size_limit"))
        if (evicted, limit) != (self._last.evicted_samples, self._last.size_limit):
            self._last = self._look()
            since = counts_from(self._since, self._last)
            self._looks = self._looks + 1 if since is self._since else 0
            self._since = since
        return (
            self._looks >= _LOOKS and self._last.evicted_samples - self._since.evicted_samples >= self._most
        )

    def _look(self) -> Look:
        with self._catalogue.reading() as tables:
            evicted, limit = int(tables.meta("evicted_samples", 0)), int(tables.meta("size_limit"))
            room, leases = self._admission.room(tables), self._admission.leases.count()
        is_near = limit <= room.limit_bytes and room.used_bytes > limit // 2
        return Look(evicted, limit, tells=is_near and not leases)
