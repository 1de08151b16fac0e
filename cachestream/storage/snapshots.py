"""Snapshots: which shards the next epoch is drawn from, chosen and leased in one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from cachestream.errors import NotEnoughSamplesError
from cachestream.model import IntArray, Schema, Snapshot
from cachestream.storage.leases import Lease, Leases, ranges_of
from cachestream.storage.tables import Tables

__all__ = ["retake_snapshot", "select_shards", "take_snapshot"]


@dataclass(frozen=True, slots=True, eq=False)
class _Shelf:
    """What is cached: int64 arrays `[num_shards]`, by ascending id."""

    ids: IntArray
    counts: IntArray
    schema_ids: IntArray
    uses: IntArray

    @classmethod
    def of(cls, tables: Tables) -> _Shelf:
        return cls(*tables.shard_columns("id", "num_samples", "schema_id", "uses"))


def select_shards(
    ids: IntArray, counts: IntArray, uses: IntArray, excluded: IntArray, epoch_size: int | None
) -> IntArray:
    """The indices of the shards for an epoch, ascending.

    All but `excluded`, or with an `epoch_size` below that the least used first, older before newer,
    until they cover it.
    """
    chosen = np.flatnonzero(~np.isin(ids, excluded))
    if epoch_size is None or int(counts[chosen].sum()) <= epoch_size:
        return chosen
    by_use = chosen[np.argsort(uses[chosen], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(counts[by_use]), epoch_size)) + 1
    return np.sort(by_use[:enough])


def take_snapshot(
    tables: Tables, leases: Leases, root: str, epoch_size: int | None, excluded: IntArray
) -> tuple[Snapshot, Lease]:
    """Choose, lease and count as used the shards of an epoch."""
    shelf = _Shelf.of(tables)
    if not len(shelf.ids):
        raise NotEnoughSamplesError(
            f"the cache at {root} is empty; start a worker (cs.start_worker, or 'cachestream worker'), "
            "and wait for samples with cache.wait(min_samples, timeout_s)"
        )
    chosen = select_shards(shelf.ids, shelf.counts, shelf.uses, excluded, epoch_size)
    return _hold(tables, leases, root, shelf, chosen, epoch_size)


def retake_snapshot(
    tables: Tables, leases: Leases, root: str, wanted: tuple[IntArray, IntArray], epoch_size: int | None
) -> tuple[Snapshot, Lease, list[int]]:
    """Lease those of the shards `wanted` (ids, counts) that are still there; also the ids that are gone."""
    shelf = _Shelf.of(tables)
    order = np.argsort(wanted[0], kind="stable")
    ids, counts = wanted[0][order], wanted[1][order]
    place = np.minimum(np.searchsorted(ids, shelf.ids), len(ids) - 1) if len(ids) else np.empty(0, np.int64)
    same = (ids[place] == shelf.ids) & (counts[place] == shelf.counts) if len(ids) else np.empty(0, np.bool_)
    chosen = np.flatnonzero(same)
    gone = np.setdiff1d(ids, shelf.ids[chosen]).tolist()
    if not len(chosen):
        raise NotEnoughSamplesError(
            f"none of the {len(ids)} shards of this epoch is cached in {root} any more; begin a new epoch"
        )
    snapshot, lease = _hold(tables, leases, root, shelf, chosen, epoch_size)
    return snapshot, lease, gone


def _hold(
    tables: Tables, leases: Leases, root: str, shelf: _Shelf, chosen: IntArray, epoch_size: int | None
) -> tuple[Snapshot, Lease]:
    schema_ids = np.unique(shelf.schema_ids[chosen]).tolist()
    schema = reduce(Schema.merge, tables.schemas(schema_ids))
    ranges = ranges_of(shelf.ids, chosen)
    lease = leases.create(ranges)
    try:
        tables.mark_used(ranges)
        cache_id = tables.meta("cache_id")
    except BaseException:
        lease.release()
        raise
    ids, counts = shelf.ids[chosen], shelf.counts[chosen]
    return Snapshot(cache_id, root, lease.path, schema, ids, counts, epoch_size), lease
