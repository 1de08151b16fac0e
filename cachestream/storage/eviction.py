"""Eviction policies, the choice of victims, and of the shards that retire: pure functions."""

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


# --- turnover: the shards of a full cache that the filling replaces next


@dataclass(frozen=True, slots=True)
class Room:
    """The limit in force, and the bytes that count against it."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


def bytes_to_retire(room: Room, turnover: float, remaining_bytes: float, largest_bytes: int = 0) -> int:
    """The bytes of shards that retire, so that filling can go on during the next epoch.

    With what is free they make a `turnover` share of the limit, and room for one shard of `largest_bytes`:
    less than that is not free. (CoorDL's and MinIO's "keep until full, then replace a share",
    arXiv:2007.06775: under whole-cache epochs plain LRU would freeze the fill, or evict shards that were
    never used.) Nothing retires while the `remaining_bytes` of the remote fit anyway.
    """
    if remaining_bytes < max(1, room.free_bytes):
        return 0
    free_bytes = 0 if 0 <= room.free_bytes < largest_bytes else room.free_bytes
    return max(0, max(int(turnover * room.limit_bytes), largest_bytes) - free_bytes)


def choose_retiring(
    ids: IntArray,
    sizes: IntArray,
    uses: IntArray,
    counts: IntArray,
    need_bytes: int,
    min_samples: int = 0,
    kept_samples: int = 0,
) -> IntArray:
    """Select shards of `ids` (first to evict first) that add up to `need_bytes`.

    `sizes`, `uses` and `counts` (samples) belong to `ids`, int64 `[n]`. Only shards that some epoch has used
    are selected, and not so many that fewer than `min_samples` remain, or none, with the `kept_samples` of
    the shards that may not be evicted.
    """
    used = np.flatnonzero(uses)
    if need_bytes <= 0 or not len(used):
        return np.empty(0, np.int64)
    enough = int(np.searchsorted(np.cumsum(sizes[used]), need_bytes)) + 1
    spare_samples = int(counts.sum()) + kept_samples - max(1, min_samples)
    spare = int(np.searchsorted(np.cumsum(counts[used]), spare_samples, side="right"))
    return ids[used[: min(enough, spare)]]
