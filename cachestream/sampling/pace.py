"""The pace of a sampling process: when a shard is published (pure)."""

from __future__ import annotations

from typing import Final

__all__ = ["is_due", "max_age_s", "target_bytes"]

FIRST_BYTES: Final = 256 * 1024
FIRST_AGE_S: Final = 0.1
USUAL_AGE_S: Final = 2.0
LONGEST_AGE_S: Final = 60.0
_AGE_GROWTH: Final = 0.02  # of the time since the start: later the cache is large, and freshness relative
_RAMP_S: Final = 10.0


def target_bytes(published: int, shard_bytes: int, share_bytes: int) -> int:
    """The size at which a process publishes its shard, after `published` ones before it.

    Doubles from 256 KiB up to `shard_bytes`, and takes no more than an eighth of the process's share of the
    limit: shards being written are no good to anybody, and eviction needs something to choose from.
    """
    ramp = FIRST_BYTES << min(published, 40)
    return max(1, min(ramp, shard_bytes, share_bytes // 8))


def max_age_s(elapsed_s: float) -> float:
    """How long a sample waits in an open shard, `elapsed_s` after the worker started."""
    young = FIRST_AGE_S + (USUAL_AGE_S - FIRST_AGE_S) * min(1.0, elapsed_s / _RAMP_S)
    return min(LONGEST_AGE_S, max(young, _AGE_GROWTH * elapsed_s))


def is_due(size_bytes: int, age_s: float, target: int, elapsed_s: float) -> bool:
    """Whether an open shard of `size_bytes`, whose first sample came `age_s` ago, is to be published."""
    return size_bytes >= target or age_s >= max_age_s(elapsed_s)
