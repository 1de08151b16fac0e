"""Eviction policies, the choice of victims, and the share that an epoch leaves out: pure functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachestream.config import format_size
from cachestream.errors import ConfigError
from cachestream.schema import IntArray, ShardRow

# The order in which a policy evicts shards, in SQL. The id breaks ties: older shards are evicted first.
ORDERS: Final = {
    "lru": "last_used, id",
    "fifo": "id",
    "least-fresh": "uses DESC, last_used, id",
    # A shard that nobody has weighed counts as an average one.
    "least-weight": "coalesce(weight, (SELECT avg(weight) FROM live)), last_used, id",
    "none": "id",  # for listings: it evicts nothing
}

# A function gets the evictable rows, oldest first, and returns them (or their ids), the first to evict first.
EvictionFunction = Callable[[Sequence[ShardRow]], Sequence[ShardRow | int]]
EvictionPolicy = str | EvictionFunction


def check_policy(policy: EvictionPolicy) -> EvictionPolicy:
    """Return `policy` if it is valid; raises ConfigError naming the choices."""
    if callable(policy) or policy in tuple(ORDERS):
        return policy
    raise ConfigError(
        f"eviction={policy!r}: choose one of {', '.join(ORDERS)}, or give a function of shard rows"
    )


def chosen_by(policy: EvictionFunction, rows: Sequence[ShardRow]) -> list[ShardRow]:
    """The rows that an eviction function returns, the first to evict first.

    Raises ConfigError for a function that fails, or that returns anything but some of the rows or their ids.
    """
    if not rows:
        return []
    by_id = {row.id: row for row in rows}
    try:
        answer = policy(tuple(rows))
        if isinstance(answer, Iterator):
            answer = list(answer)  # the body of a generator fails here, too
    except Exception as error:
        raise ConfigError(f"the eviction function failed: {type(error).__name__}: {error}") from error
    wanted = "return some of the rows it gets, or their ids, first to go first"
    try:
        chosen = [row.id if isinstance(row, ShardRow) else operator.index(row) for row in answer]
    except TypeError as error:
        raise ConfigError(
            f"the eviction function returned a {type(answer).__name__} ({error}); {wanted}"
        ) from error
    unknown = [shard_id for shard_id in chosen if shard_id not in by_id]
    if unknown or len(set(chosen)) != len(chosen):
        raise ConfigError(
            f"the eviction function returned unknown or repeated shards: {unknown or chosen}; {wanted}"
        )
    return [by_id[shard_id] for shard_id in chosen]


def choose_victims(ordered: Iterable[ShardRow], need_bytes: int) -> list[ShardRow]:
    """The first of `ordered` that together free `need_bytes`; all of them if these do not."""
    victims: list[ShardRow] = []
    rows = iter(ordered)
    while need_bytes > 0 and (row := next(rows, None)) is not None:
        victims.append(row)
        need_bytes -= row.size_bytes
    return victims


def describe_shortage(need_bytes: int, limit_bytes: int, used_bytes: int, leased_bytes: int) -> str:
    """One sentence for CacheFullError and the status."""
    return (
        f"{format_size(need_bytes)} needed, {format_size(max(0, limit_bytes - used_bytes))} free of "
        f"{format_size(limit_bytes)}, {format_size(leased_bytes)} leased by epochs in use; raise the limit "
        "('cachestream limit CACHE SIZE') or close epochs"
    )


# --- turnover: what the next epoch of a full cache leaves out, so that filling can go on


@dataclass(frozen=True, slots=True)
class Room:
    """The limit in force, and the bytes that count against it."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


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


def add_what_was_left(share_bytes: int, left_bytes: int, replaced_bytes: int) -> int:
    """The bytes to leave out if the filling has waited for an epoch: the share, and what the last one left
    out.

    The shards that the previous epoch left out, `left_bytes`, come first in the order of eviction, and the
    filling will soon replace them. It has reserved `replaced_bytes` for that already. At most one share is
    added: short epochs would leave out shards faster than the filling replaces them.
    """
    return share_bytes + max(0, min(left_bytes, share_bytes - replaced_bytes))


def leave_out(
    ids: IntArray,
    sizes: IntArray,
    uses: IntArray,
    counts: IntArray,
    leave_bytes: int,
    min_samples: int = 0,
    kept_samples: int = 0,
) -> IntArray:
    """Select shards of `ids` (first to evict first) that add up to `leave_bytes`.

    `sizes`, `uses` and `counts` (samples) belong to `ids`, int64 `[n]`. Only shards that some epoch has used
    are selected, and not so many that fewer than `min_samples` remain, or none, with the `kept_samples` of
    the shards that may not be evicted.
    """
    used = np.flatnonzero(uses)
    if leave_bytes <= 0 or not len(used):
        return np.empty(0, np.int64)
    enough = int(np.searchsorted(np.cumsum(sizes[used]), leave_bytes)) + 1
    spare_samples = int(counts.sum()) + kept_samples - max(1, min_samples)
    spare = int(np.searchsorted(np.cumsum(counts[used]), spare_samples, side="right"))
    return ids[used[: min(enough, spare)]]
