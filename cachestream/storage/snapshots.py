"""Snapshots: the shards that the next epoch is drawn from, chosen and leased in one transaction."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.errors import CacheError, NotEnoughSamplesError
from cachestream.schema import IntArray, Schema, Snapshot, Split
from cachestream.storage.catalogue import Catalogue, Revision
from cachestream.storage.leases import Lease, Leases, ranges_of
from cachestream.storage.tables import Tables

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

_REUSE_S: Final = 10.0
_RECENT_LEASES: Final = 8  # more epochs than one loader ever has open


@dataclass(frozen=True, slots=True, eq=False)
class _CachedShards:
    """The cached shards: int64 arrays `[num_shards]` by ascending id. `counts` are samples of the `split`, or
    all.
    """

    ids: IntArray
    counts: IntArray
    sizes: IntArray
    schema_ids: IntArray
    uses: IntArray
    split: Split | None

    @classmethod
    def of(cls, tables: Tables, split: Split | None) -> _CachedShards:
        ids, sizes, schema_ids, uses = tables.shard_columns("id", "num_samples", "schema_id", "uses")
        counts = sizes
        if split is not None:
            held_out = tables.held_out_counts()
            # A shard published since the count is for the next epoch.
            counts = np.where(held_out < 0, 0, held_out if split.held_out else sizes - held_out)
        return cls(ids, counts, sizes, schema_ids, uses, split)


def select_shards(
    ids: IntArray, counts: IntArray, uses: IntArray, excluded: IntArray, epoch_size: int | None
) -> IntArray:
    """The indices of the shards for an epoch, ascending.

    All shards with samples except `excluded`; or, with a smaller `epoch_size`, the least used first and older
    before newer, until they cover it.
    """
    chosen = np.flatnonzero(~np.isin(ids, excluded) & (counts > 0))
    if epoch_size is None or int(counts[chosen].sum()) <= epoch_size:
        return chosen
    by_use = chosen[np.argsort(uses[chosen], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(counts[by_use]), epoch_size)) + 1
    return np.sort(by_use[:enough])


def take_snapshot(
    tables: Tables,
    leases: Leases,
    root: str,
    epoch_size: int | None,
    excluded: IntArray,
    split: Split | None = None,
) -> tuple[Snapshot, Lease]:
    """Choose and lease the shards of an epoch, and count them as used."""
    cached = _CachedShards.of(tables, split)
    if not len(cached.ids):
        raise NotEnoughSamplesError(
            f"the cache at {root} is empty; start a worker (cs.start_worker, or 'cachestream worker'), "
            "and wait for samples with cache.wait(min_samples, timeout_s)"
        )
    chosen = select_shards(cached.ids, cached.counts, cached.uses, excluded, epoch_size)
    if split is not None and not len(chosen):
        raise NotEnoughSamplesError(
            f"of the {int(cached.sizes.sum())} samples that the cache at {root} holds none is of the split "
            f"'{split.name}' (holdout={split.holdout:g}); wait for more, or hold out another share"
        )
    return _lease(tables, leases, root, cached, chosen, epoch_size)


def retake_snapshot(
    tables: Tables,
    leases: Leases,
    root: str,
    wanted: tuple[IntArray, IntArray],
    epoch_size: int | None,
    split: Split | None = None,
) -> tuple[Snapshot, Lease, list[int]]:
    """Lease those of the shards `wanted` (ids, counts) that still exist; also return the other ids."""
    cached = _CachedShards.of(tables, split)
    order = np.argsort(wanted[0], kind="stable")
    ids, counts = wanted[0][order], wanted[1][order]
    place = np.minimum(np.searchsorted(ids, cached.ids), len(ids) - 1) if len(ids) else np.empty(0, np.int64)
    same = (
        (ids[place] == cached.ids) & (counts[place] == cached.counts) if len(ids) else np.empty(0, np.bool_)
    )
    chosen = np.flatnonzero(same)
    gone = np.setdiff1d(ids, cached.ids[chosen]).tolist()
    if not len(chosen):
        raise NotEnoughSamplesError(
            f"none of the {len(ids)} shards of this epoch is cached in {root} any more; begin a new epoch"
        )
    snapshot, lease = _lease(tables, leases, root, cached, chosen, epoch_size)
    return snapshot, lease, gone


def _lease(
    tables: Tables, leases: Leases, root: str, cached: _CachedShards, chosen: IntArray, epoch_size: int | None
) -> tuple[Snapshot, Lease]:
    schema_ids = np.unique(cached.schema_ids[chosen]).tolist()
    schema = reduce(Schema.merge, tables.schemas(schema_ids))
    ranges = ranges_of(cached.ids, chosen)
    lease = leases.create(ranges)
    try:
        if cached.split is None or not cached.split.held_out:
            tables.mark_used(ranges)  # held-out samples are not trained on
        cache_id = tables.meta("cache_id")
    except BaseException:
        lease.release()
        raise
    ids, counts = cached.ids[chosen], cached.counts[chosen]
    sizes = None if cached.split is None else cached.sizes[chosen]
    return Snapshot(cache_id, root, lease.path, schema, ids, counts, epoch_size, cached.split, sizes), lease


def any_cached(catalogue: Catalogue, shard_ids: Iterable[int]) -> bool:
    """Return whether any of the shards is cached."""
    with catalogue.reading() as tables:
        return any(tables.shard(shard_id) is not None for shard_id in shard_ids)


@dataclass(slots=True)
class _Reusable:
    """A snapshot of the whole cache at `revision`, with a lease of its own.

    `uncounted` is the number of times it was reused since its uses were counted.
    """

    snapshot: Snapshot
    lease: Lease
    revision: Revision
    until_s: float
    uncounted: int = 0


class StandingSnapshots:
    """The snapshots of one reader. Used by one thread.

    Epochs of a few milliseconds are shorter than the time to make a lease, which is a file, a lock, and a
    transaction that waits for the disk. A snapshot is therefore reused for ten seconds while no worker runs
    and nothing was committed: a new one would hold the same shards. Its reuses are counted together, at the
    next snapshot or by `settle`. A process that is killed loses the uses of some seconds, but not their
    order: all shards were used alike.
    """

    def __init__(
        self, cache: Cache, clock: Callable[[], float] = time.monotonic, split: Split | None = None
    ) -> None:
        self._cache = cache
        self._split = split
        self._clock = clock
        self._last: _Reusable | None = None
        self._recent_leases: list[str] = []  # paths of the leases of the last epochs

    def take(self, epoch_size: int | None, turnover: float, least: int = 0) -> tuple[Snapshot, Lease]:
        """As `Cache.take_snapshot`."""
        if epoch_size is not None or self._cache.has_worker():
            self.settle()
            return self._take(epoch_size, turnover, least)
        again = self._reuse()
        if again is not None:
            return again
        self.settle()
        self._enforce_limit()  # the shards of the epoch before last may be evicted now
        before = self._cache.catalogue.revision()
        snapshot, lease = self._take(None, turnover, least)
        now = self._cache.catalogue.revision()
        is_whole = snapshot.num_shards == self._cache.num_shards  # otherwise the rest will be evicted soon
        if is_whole and now == before.after_one() and (mine := lease.again()) is not None:
            self._last = _Reusable(snapshot, mine, now, self._clock() + _REUSE_S)
        return snapshot, lease

    def _take(self, epoch_size: int | None, turnover: float, least: int) -> tuple[Snapshot, Lease]:
        snapshot, lease = self._cache.take_snapshot(
            epoch_size, turnover, least, self._recent_leases, self._split
        )
        self._recent_leases = [*self._recent_leases[1 - _RECENT_LEASES :], lease.path]
        return snapshot, lease

    def close(self) -> None:
        """Release the snapshot, and enforce the cache's limit."""
        self.settle()
        if os.path.exists(self._cache.catalogue.path):
            self._enforce_limit()

    def _enforce_limit(self) -> None:
        """Enforce the limit where no worker does. An error is ignored: the next snapshot tries again."""
        if not self._cache.has_worker():
            with suppress(CacheError):
                self._cache.enforce_limit()

    def settle(self) -> None:
        """Count the uses that are not yet counted, and release the snapshot."""
        last, self._last = self._last, None
        if last is None:
            return
        last.lease.release()
        # A cache that was removed gets no new catalogue.
        trains = self._split is None or not self._split.held_out
        if trains and last.uncounted and os.path.exists(self._cache.catalogue.path):
            ids = last.snapshot.shard_ids
            with self._cache.catalogue.transaction() as tables:
                tables.mark_used(ranges_of(ids, np.arange(len(ids))), last.uncounted)

    def _reuse(self) -> tuple[Snapshot, Lease] | None:
        last = self._last
        if last is None or self._clock() > last.until_s or self._cache.catalogue.revision() != last.revision:
            return None
        lease = last.lease.again()
        if lease is None:
            return None
        last.uncounted += 1
        return last.snapshot, lease
