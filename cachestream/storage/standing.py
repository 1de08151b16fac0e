"""A snapshot that stands: given out again while nobody changes the cache.

Epochs of a few milliseconds follow one another faster than leases are made, each of which is a file, a lock, and a
transaction that waits for the disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.errors import CacheError
from cachestream.model import Snapshot
from cachestream.split import Split
from cachestream.storage.catalogue import Revision
from cachestream.storage.leases import Lease, ranges_of

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

__all__ = ["Standing"]

_STANDS_S: Final = 10.0
_GIVEN: Final = 8  # more epochs than one loader ever has open


@dataclass(slots=True)
class _Taken:
    """A snapshot of the whole cache, at `revision`, and a lease that is nobody else's; `uncounted` times it was given out
    again since it was counted.
    """

    snapshot: Snapshot
    lease: Lease
    revision: Revision
    until_s: float
    uncounted: int = 0


class Standing:
    """The snapshots of one reader. Used by one thread.

    For ten seconds, a snapshot is the last one again, if no worker runs and nothing was committed since: then a new one
    would hold the same. Its further uses are counted together, at the next one or by `settle`. A process that is killed
    takes the uses of some seconds with it, but not their order: all shards were used alike.
    """

    def __init__(
        self, cache: Cache, clock: Callable[[], float] = time.monotonic, split: Split | None = None
    ) -> None:
        self._cache = cache
        self._split = split
        self._clock = clock
        self._last: _Taken | None = None
        self._given: list[str] = []  # paths of the leases of the last epochs

    def take(self, epoch_size: int | None, turnover: float, least: int = 0) -> tuple[Snapshot, Lease]:
        """As `Cache.take_snapshot`."""
        if epoch_size is not None or self._cache.has_worker():
            self.settle()
            return self._take(epoch_size, turnover, least)
        again = self._again()
        if again is not None:
            return again
        self.settle()
        self._enforce_limit()  # what the epoch before last held may go now
        before = self._cache.catalogue.revision()
        snapshot, lease = self._take(None, turnover, least)
        now = self._cache.catalogue.revision()
        is_whole = snapshot.num_shards == self._cache.num_shards  # else the rest is to be evicted soon
        if is_whole and now == before.after_one() and (mine := lease.again()) is not None:
            self._last = _Taken(snapshot, mine, now, self._clock() + _STANDS_S)
        return snapshot, lease

    def _take(self, epoch_size: int | None, turnover: float, least: int) -> tuple[Snapshot, Lease]:
        snapshot, lease = self._cache.take_snapshot(epoch_size, turnover, least, self._given, self._split)
        self._given = [*self._given[1 - _GIVEN :], lease.path]
        return snapshot, lease

    def close(self) -> None:
        """Let the snapshot go, and what is over the cache's limit with it."""
        self.settle()
        if os.path.exists(self._cache.catalogue.path):
            self._enforce_limit()

    def _enforce_limit(self) -> None:
        """As a worker does, where there is one. What cannot go now goes later: nobody trains worse for it."""
        if not self._cache.has_worker():
            with suppress(CacheError):
                self._cache.enforce_limit()

    def settle(self) -> None:
        """Count what is not yet counted, and let the snapshot go."""
        last, self._last = self._last, None
        if last is None:
            return
        last.lease.release()
        # Whoever has removed the cache wants no new catalogue there.
        trains = self._split is None or not self._split.held_out
        if trains and last.uncounted and os.path.exists(self._cache.catalogue.path):
            ids = last.snapshot.shard_ids
            with self._cache.catalogue.transaction() as tables:
                tables.mark_used(ranges_of(ids, np.arange(len(ids))), last.uncounted)

    def _again(self) -> tuple[Snapshot, Lease] | None:
        last = self._last
        if last is None or self._clock() > last.until_s or self._cache.catalogue.revision() != last.revision:
            return None
        lease = last.lease.again()
        if lease is None:
            return None
        last.uncounted += 1
        return last.snapshot, lease
