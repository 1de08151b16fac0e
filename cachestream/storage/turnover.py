"""Turnover: the shards of a full cache that the next epoch leaves out, so that filling can go on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from cachestream.schema import IntArray
from cachestream.storage.eviction import chosen_by
from cachestream.storage.filling import WAITS, fill_state
from cachestream.storage.layout import Directory
from cachestream.storage.reservations import Reservations, Room
from cachestream.storage.status import state_of_filling
from cachestream.storage.tables import Tables


@dataclass(frozen=True, slots=True)
class PassProgress:
    """The progress of a pass: `done` of `length` positions (None: endless), which produced `shard_bytes`.

    `lost` when shards of this or an earlier pass have been evicted since.
    """

    done: int
    length: int | None
    shard_bytes: int
    lost: bool


def bytes_to_leave(room: Room, turnover: float, filling: PassProgress, largest_bytes: int = 0) -> int:
    """The bytes of shards that the next epoch leaves out, so that filling can go on during it.

    The filling needs a `turnover` share of the limit, free or evictable (CoorDL's and MinIO's "keep until
    full, then replace a share", arXiv:2007.06775: under whole-cache epochs plain LRU would freeze the fill,
    or evict shards that were never used), and room for one shard of `largest_bytes`: less than that is not
    free. Nothing is left out while the rest of the remote will fit anyway.
    """
    free_bytes = room.free_bytes if room.free_bytes >= largest_bytes else 0
    wanted = max(int(turnover * room.limit_bytes), largest_bytes) - max(0, free_bytes)
    if wanted <= 0 or filling.length == 0:
        return 0
    if not filling.lost and filling.length is not None and filling.done:
        remaining_bytes = filling.shard_bytes * (filling.length - filling.done) / filling.done
        if remaining_bytes < room.free_bytes:
            return 0
    return wanted


def leave_out(
    ids: IntArray, sizes: IntArray, uses: IntArray, counts: IntArray, leave_bytes: int, least: int = 0
) -> IntArray:
    """Select shards of `ids` (first to evict first) that add up to `leave_bytes`.

    `sizes`, `uses` and `counts` (samples) belong to `ids`, int64 `[n]`. Only shards that some epoch has used
    are selected, never all shards, nor so many that fewer than `least` samples remain.
    """
    used = np.flatnonzero(uses)[: max(0, len(ids) - 1)]
    if leave_bytes <= 0 or not len(used):
        return np.empty(0, np.int64)
    enough = int(np.searchsorted(np.cumsum(sizes[used]), leave_bytes)) + 1
    spare = int(np.searchsorted(np.cumsum(counts[used]), int(counts.sum()) - least, side="right"))
    return ids[used[: min(enough, spare)]]


def shards_to_leave(
    tables: Tables,
    directory: Directory,
    reservations: Reservations,
    turnover: float,
    least: int = 0,
    *,
    epoch_size: int | None = None,
    mine: Collection[str] = (),
) -> IntArray:
    """The ids of the shards that the next epoch leaves out.

    They are the surplus over a limit that was lowered, which otherwise each epoch would hold again, and the
    `turnover` share of a full cache while filling goes on. Fewer of both where the epoch would have less than
    `least` samples.

    Shards that no lease holds go first, then those with the fewest other leases, in the order of eviction:
    several trainers have to leave out the same ones. `mine` are the paths of the caller's leases, which end
    with the previous epoch and do not count.

    If the filling has waited for an epoch since the last snapshot, it will soon replace the shards that the
    previous epoch left out. Those come first, so their bytes are added to the share.
    """
    policy, room = reservations.policy(tables), reservations.room(tables)
    # Under "none" a lower limit evicts, but not a disk that other programs fill.
    limit_bytes = int(tables.meta("size_limit")) if policy == "none" else room.limit_bytes
    surplus_bytes = max(0, room.used_bytes - limit_bytes)
    turns_over = (
        turnover and policy != "none" and state_of_filling(directory, fill_state(tables)) == "filling"
    )
    if not surplus_bytes and not turns_over:
        return np.empty(0, np.int64)
    if policy == "none":
        policy = "lru"
    kept = tables.held_out_shards()
    if callable(policy):
        rows = chosen_by(policy, [row for row in tables.shards() if row.id not in kept])
        table = np.array(
            [(row.id, row.size_bytes, row.uses, row.num_samples) for row in rows], np.int64
        ).reshape(-1, 4)
        ids, sizes, uses, counts = table.T
    else:
        ids, sizes, uses, counts = tables.shard_columns(
            "id", "size_bytes", "uses", "num_samples", policy=policy
        )
    if kept:
        goes = ~np.isin(ids, list(kept))
        ids, sizes, uses, counts = ids[goes], sizes[goes], uses[goes], counts[goes]
    is_free = reservations.leases.holders(ids) == 0
    order = np.argsort(np.where(is_free, -1, reservations.leases.holders(ids, mine)), kind="stable")
    ids, sizes, uses, counts, is_free = (column[order] for column in (ids, sizes, uses, counts, is_free))
    leave_bytes = surplus_bytes
    if turns_over:
        share_bytes = _turnover_bytes(tables, room, turnover, int(sizes.max(initial=0)))
        leave_bytes += share_bytes
        if share_bytes and _has_waited(tables) and (epoch_size is None or epoch_size >= int(counts.sum())):
            # At most one share: short epochs would leave out shards faster than the filling replaces them.
            replaced_bytes = sum(tables.reserved_bytes())
            left_bytes = int(sizes[is_free & (uses > 0)].sum())
            leave_bytes += max(0, min(left_bytes, share_bytes - replaced_bytes))
    return leave_out(ids, sizes, uses, counts, leave_bytes, least)


def _has_waited(tables: Tables) -> bool:
    """Return whether the filling has waited for an epoch since the last call."""
    waits, before = int(tables.meta("epoch_waits", 0)), int(tables.meta("epoch_waits_seen", 0))
    tables.set_meta("epoch_waits_seen", waits)
    return waits > before or tables.meta("fill_message") == WAITS


def _turnover_bytes(tables: Tables, room: Room, turnover: float, largest_bytes: int) -> int:
    passes = tables.passes()
    if not passes:
        return 0
    filling = PassProgress(
        done=tables.positions_done(passes[-1]),
        length=passes[-1].length,
        shard_bytes=tables.totals()[2],
        lost=len(passes) > 1 or int(tables.meta("evicted_shards", 0)) > 0,
    )
    return bytes_to_leave(room, turnover, filling, largest_bytes)
