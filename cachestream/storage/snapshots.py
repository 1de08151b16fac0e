"""Snapshots: which shards the next epoch is drawn from, chosen and leased in one transaction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from cachestream.errors import NotEnoughSamplesError
from cachestream.model import IntArray, Schema, Snapshot
from cachestream.storage.admission import Room
from cachestream.storage.leases import Lease, Leases
from cachestream.storage.tables import Tables

__all__ = ["Filling", "bytes_to_leave", "retake_snapshot", "select_shards", "take_snapshot"]


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """Shards of a snapshot to be: int64 arrays `[num_shards]`."""

    ids: IntArray
    counts: IntArray
    schema_ids: IntArray


@dataclass(frozen=True, slots=True)
class Filling:
    """How far the filling is: `done` of `length` positions of the pass (None: endless), which brought
    `shard_bytes`; `lost` when some of that, or of an earlier pass, has been evicted since.
    """

    done: int
    length: int | None
    shard_bytes: int
    lost: bool


def bytes_to_leave(room: Room, turnover: float, filling: Filling) -> int:
    """How many bytes of shards the next epoch leaves out, so that filling can go on during it.

    The filling needs a `turnover` share of the limit, free or evictable (CoorDL's and MinIO's "keep
    until full, then replace a share", arXiv:2007.06775: under whole-cache epochs plain LRU would
    freeze the fill, or evict what was never seen). Nothing is left out while the rest of the remote
    will fit anyway.
    """
    wanted = int(turnover * room.limit_bytes) - max(0, room.free_bytes)
    if wanted <= 0 or filling.length == 0:
        return 0
    if not filling.lost and filling.length is not None and filling.done:
        remaining_bytes = filling.shard_bytes * (filling.length - filling.done) / filling.done
        if remaining_bytes < room.free_bytes:
            return 0
    return wanted


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


def leave_out(rows: list[tuple[int, int, int]], leave_bytes: int) -> IntArray:
    """The ids among `rows` (id, bytes, uses; first to go first) that make up `leave_bytes`.

    Only shards that some epoch has used, and never all of them.
    """
    left: list[int] = []
    for shard_id, size_bytes, uses in rows:
        if leave_bytes <= 0 or len(left) >= len(rows) - 1:
            break
        if uses:
            left.append(shard_id)
            leave_bytes -= size_bytes
    return np.array(left, np.int64)


def take_snapshot(
    tables: Tables, leases: Leases, root: str, epoch_size: int | None, excluded: IntArray
) -> tuple[Snapshot, Lease]:
    """Choose, lease and count as used the shards of an epoch."""
    rows = list(tables.shards())
    ids, counts, schema_ids = tables.shard_counts()
    if not len(ids):
        raise NotEnoughSamplesError(
            f"the cache at {root} is empty; start a worker (cs.start_worker, or 'cachestream worker'), "
            "and wait for samples with cache.wait(min_samples, timeout_s)"
        )
    uses = np.array([row.uses for row in rows], np.int64)
    chosen = select_shards(ids, counts, uses, excluded, epoch_size)
    return _hold(tables, leases, root, _Chosen(ids[chosen], counts[chosen], schema_ids[chosen]), epoch_size)


def retake_snapshot(
    tables: Tables, leases: Leases, root: str, wanted: tuple[IntArray, IntArray], epoch_size: int | None
) -> tuple[Snapshot, Lease, list[int]]:
    """Lease those of the shards `wanted` (ids, counts) that are still there; also the ids that are gone."""
    ids, counts, schema_ids = tables.shard_counts()
    expected = dict(zip(wanted[0].tolist(), wanted[1].tolist(), strict=True))
    same = [expected.get(key) == count for key, count in zip(ids.tolist(), counts.tolist(), strict=True)]
    present = np.flatnonzero(same)
    gone = sorted(set(expected) - set(ids[present].tolist()))
    if not len(present):
        raise NotEnoughSamplesError(
            f"none of the {len(expected)} shards of this epoch is cached in {root} any more"
        )
    chosen = _Chosen(ids[present], counts[present], schema_ids[present])
    snapshot, lease = _hold(tables, leases, root, chosen, epoch_size)
    return snapshot, lease, gone


def _hold(
    tables: Tables, leases: Leases, root: str, chosen: _Chosen, epoch_size: int | None
) -> tuple[Snapshot, Lease]:
    schema = reduce(Schema.merge, tables.schemas(np.unique(chosen.schema_ids).tolist()))
    lease = leases.create(chosen.ids)
    tables.mark_used(chosen.ids, tables.add("clock", 1))
    cache_id = tables.meta("cache_id")
    return Snapshot(cache_id, root, lease.path, schema, chosen.ids, chosen.counts, epoch_size), lease
