"""Snapshots: which shards the next epoch is drawn from, chosen and leased in one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from cachestream.errors import NotEnoughSamplesError
from cachestream.model import IntArray, Schema, Snapshot
from cachestream.split import Split
from cachestream.storage.leases import Lease, Leases, ranges_of
from cachestream.storage.tables import Tables

__all__ = ["retake_snapshot", "select_shards", "take_snapshot"]


@dataclass(frozen=True, slots=True, eq=False)
class _Shelf:
    """What is cached: int64 arrays `[num_shards]`, by ascending id. `counts` are samples of the `split`, or all."""

    ids: IntArray
    counts: IntArray
    sizes: IntArray
    schema_ids: IntArray
    uses: IntArray
    split: Split | None

    @classmethod
    def of(cls, tables: Tables, split: Split | None) -> _Shelf:
        ids, sizes, schema_ids, uses = tables.shard_columns("id", "num_samples", "schema_id", "uses")
        counts = sizes
        if split is not None:
            held_out = tables.held_out_counts()
            # A shard that came since they were counted is for the next epoch.
            counts = np.where(held_out < 0, 0, held_out if split.held_out else sizes - held_out)
        return cls(ids, counts, sizes, schema_ids, uses, split)


def select_shards(
    ids: IntArray, counts: IntArray, uses: IntArray, excluded: IntArray, epoch_size: int | None
) -> IntArray:
    """The indices of the shards for an epoch, ascending.

    All that have samples but `excluded`, or with an `epoch_size` below that the least used first, older before newer,
    until they cover it.
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
    """Choose, lease and count as used the shards of an epoch."""
    shelf = _Shelf.of(tables, split)
    if not len(shelf.ids):
        raise NotEnoughSamplesError(
            f"the cache at {root} is empty; start a worker (cs.start_worker, or 'cachestream worker'), "
            "and wait for samples with cache.wait(min_samples, timeout_s)"
        )
    chosen = select_shards(shelf.ids, shelf.counts, shelf.uses, excluded, epoch_size)
    if split is not None and not len(chosen):
        raise NotEnoughSamplesError(
            f"of the {int(shelf.sizes.sum())} samples that the cache at {root} holds none is of the split '{split.name}' "
            f"(holdout={split.holdout:g}); wait for more, or hold out another share"
        )
    return _hold(tables, leases, root, shelf, chosen, epoch_size)


def retake_snapshot(
    tables: Tables,
    leases: Leases,
    root: str,
    wanted: tuple[IntArray, IntArray],
    epoch_size: int | None,
    split: Split | None = None,
) -> tuple[Snapshot, Lease, list[int]]:
    """Lease those of the shards `wanted` (ids, counts) that are still there; also the ids that are gone."""
    shelf = _Shelf.of(tables, split)
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
        if shelf.split is None or not shelf.split.held_out:
            tables.mark_used(ranges)  # nothing is trained on what is held out
        cache_id = tables.meta("cache_id")
    except BaseException:
        lease.release()
        raise
    ids, counts = shelf.ids[chosen], shelf.counts[chosen]
    sizes = None if shelf.split is None else shelf.sizes[chosen]
    return Snapshot(cache_id, root, lease.path, schema, ids, counts, epoch_size, shelf.split, sizes), lease
