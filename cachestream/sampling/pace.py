"""The pace of a sampling process: when a shard is published, how many units are read at once (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["Concurrency", "is_due", "max_age_s", "target_bytes"]

FIRST_BYTES: Final = 256 * 1024
FIRST_AGE_S: Final = 0.25
USUAL_AGE_S: Final = 2.0
LONGEST_AGE_S: Final = 60.0
_AGE_GROWTH: Final = 0.02  # of the time since the start: later the cache is large, and freshness relative
_RAMP_S: Final = 10.0
FIRST_READS: Final = 4
TURN_S: Final = 0.3
GAIN: Final = 1.3
STARVED: Final = 0.5
REST_TURNS: Final = 30
RECOVERY_TURNS: Final = 3  # about a second, from one read more to the next


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


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many units a process reads at once, found by trying: doubled for as long as that pays.

    Where latency sets the speed, twice the reads bring nearly twice the samples; where the processor,
    the disk or the bandwidth does, more threads only take the interpreter from each other.
    `settled` reads brought `rate`; `active` are being tried; `rest` turns until the next try.

    A remote that asks to slow down (503, 429) gets half as many at once, and then one more a second, up to
    `goal`, as many as there were: additive increase, multiplicative decrease, by which all who share the
    remote come to equal shares (Chiu and Jain, "Analysis of the Increase and Decrease Algorithms for
    Congestion Avoidance in Computer Networks", 1989; TCP's, RFC 5681).
    """

    active: int
    settled: int
    rate: float = 0.0
    rest: int = 0
    goal: int = 0

    def next(self, rate: float, waiting: float, most: int, *, throttled: bool = False) -> Concurrency:
        """What to do after a turn that brought `rate` (samples a second), of which the packing spent the
        share `waiting` on waiting for samples; `throttled`: the remote asked to slow down.
        """
        # What was under way when the number was halved may still be refused in the turn after.
        if throttled and not (self.goal and self.rest == RECOVERY_TURNS):
            fewer = max(1, self.active // 2)
            return Concurrency(fewer, fewer, rate, RECOVERY_TURNS, max(self.goal, self.active))
        if self.goal:
            return self._recover(rate, waiting)
        if self.active > self.settled and rate < GAIN * self.rate:
            return Concurrency(self.settled, self.settled, self.rate, REST_TURNS)
        if self.rest:
            return replace(self, rate=rate, rest=self.rest - 1)
        more = min(most, 2 * self.active) if waiting >= STARVED else self.active
        return Concurrency(more, self.active, rate)

    def _recover(self, rate: float, waiting: float) -> Concurrency:
        if self.rest > 1:
            return replace(self, rate=rate, rest=self.rest - 1)
        if self.active >= self.goal:
            return Concurrency(self.active, self.active, rate, REST_TURNS)
        more = self.active + (waiting >= STARVED)
        return Concurrency(more, more, rate, RECOVERY_TURNS - 1, self.goal)
