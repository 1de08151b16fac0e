"""The policies of eviction, and the choice of victims, as pure functions of frozen rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cachestream.config import format_size
from cachestream.errors import ConfigError
from cachestream.schema import ShardRow

# A function gets the evictable rows, oldest first, and returns them (or their ids), the first to evict first.
EvictionFunction = Callable[[Sequence[ShardRow]], Sequence[ShardRow | int]]
EvictionPolicy = str | EvictionFunction

# The columns that SQL sorts shards by; "-" is descending. The id breaks ties: older shards are evicted first.
ORDERS: Final[dict[str, tuple[str, ...]]] = {
    "lru": ("last_used", "id"),
    "fifo": ("id",),
    "least-fresh": ("-uses", "last_used", "id"),
    "none": (),
}


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
    by_id = {row.id: row for row in rows}
    chosen = _ids_chosen_by(policy, rows)
    unknown = [shard_id for shard_id in chosen if shard_id not in by_id]
    if unknown or len(set(chosen)) != len(chosen):
        raise ConfigError(
            f"the eviction function returned unknown or repeated shards: {unknown or chosen}; "
            "return some of the rows it gets, or their ids, first to go first"
        )
    return [by_id[shard_id] for shard_id in chosen]


def _ids_chosen_by(policy: EvictionFunction, rows: Sequence[ShardRow]) -> list[int]:
    try:
        answer = policy(tuple(rows))
    except Exception as error:
        raise ConfigError(f"the eviction function failed: {type(error).__name__}: {error}") from error
    try:
        return [row.id if isinstance(row, ShardRow) else operator.index(row) for row in answer]
    except TypeError as error:
        raise ConfigError(
            f"the eviction function returned a {type(answer).__name__} ({error}); "
            "return some of the rows it gets, or their ids, first to go first"
        ) from error


def choose_victims(ordered: Iterable[ShardRow], need_bytes: int) -> list[ShardRow] | None:
    """The first of `ordered` that together free `need_bytes`; None if all of them do not."""
    victims: list[ShardRow] = []
    freed = 0
    if need_bytes <= 0:
        return victims
    for row in ordered:
        victims.append(row)
        freed += row.size_bytes
        if freed >= need_bytes:
            return victims
    return None


def describe_shortage(need_bytes: int, limit_bytes: int, used_bytes: int, leased_bytes: int) -> str:
    """One sentence for CacheFullError and the status."""
    return (
        f"{format_size(need_bytes)} needed, {format_size(max(0, limit_bytes - used_bytes))} free of "
        f"{format_size(limit_bytes)}, {format_size(leased_bytes)} leased by epochs in use; raise the limit "
        "('cachestream limit CACHE SIZE') or close epochs"
    )
