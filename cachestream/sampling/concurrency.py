"""How many units a sampling process reads at once (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["Concurrency"]

FIRST_READS: Final = 4  # as many as soon as units come whole: then they are small
TURN_S: Final = 0.3
GAIN: Final = 1.3
STARVED: Final = 0.5
REST_TURNS: Final = 30
RECOVERY_TURNS: Final = 3  # about a second, from one read more to the next
KEEP: Final = 0.95  # of the speed, for half as many reads to be as good
BUSY: Final = 0.7  # of one processor: the interpreter may be what the reads wait for


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many units a process reads at once, found by trying: doubled for as long as that pays.

    Where latency sets the speed, twice the reads bring nearly twice the samples; where the processor,
    the disk or the bandwidth does, more threads only take the interpreter from each other. So a process that
    keeps a processor busy tries fewer, too, and stays there if they bring as much. Bytes count as they are fetched,
    not samples as they are packed: large units that share a slow network come all at once, and late.
    `settled` reads brought `rate`; `active` are being tried; `rest` turns until the next try. It begins with one:
    several large units that share a slow network would bring the first sample as many times later.

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

    def next(
        self, rate: float, waiting: float, most: int, *, busy: float = 0.0, throttled: bool = False
    ) -> Concurrency:
        """What to do after a turn that brought `rate` (bytes a second), of which the packing spent the
        share `waiting` on waiting for samples; `busy`: how many processors the process kept at work;
        `throttled`: the remote asked to slow down.
        """
        # What was under way when the number was halved may still be refused in the turn after.
        if throttled and not (self.goal and self.rest == RECOVERY_TURNS):
            fewer = max(1, self.active // 2)
            return Concurrency(fewer, fewer, rate, RECOVERY_TURNS, max(self.goal, self.active))
        if self.goal:
            return self._recover(rate, waiting)
        if not self.rate:  # the first turn in which anything comes is but a part of one
            return replace(self, rate=rate)
        if self.active > self.settled and rate < GAIN * self.rate:
            return self._fewer(self.settled, self.rate, busy)
        if self.active < self.settled:
            if rate < KEEP * self.rate:
                return Concurrency(self.settled, self.settled, self.rate, REST_TURNS)
            return self._fewer(self.active, rate, busy)
        if self.rest:
            return replace(self, rate=rate, rest=self.rest - 1)
        more = min(most, 2 * self.active) if waiting >= STARVED else self.active
        return Concurrency(more, self.active, rate)

    def came(self, most: int) -> Concurrency:
        """What to do when a unit came whole: twice the reads, up to `FIRST_READS`, before any more were tried."""
        if self.active >= min(FIRST_READS, most) or self.active != self.settled or self.rest or self.goal:
            return self
        more = min(2 * self.active, FIRST_READS, most)
        return Concurrency(more, more)

    @staticmethod
    def _fewer(settled: int, rate: float, busy: float) -> Concurrency:
        """Half of `settled` reads, which brought `rate`, if they may be too many."""
        if settled > 1 and busy >= BUSY:
            return Concurrency(settled // 2, settled, rate)
        return Concurrency(settled, settled, rate, REST_TURNS)

    def _recover(self, rate: float, waiting: float) -> Concurrency:
        if self.rest > 1:
            return replace(self, rate=rate, rest=self.rest - 1)
        if self.active >= self.goal:
            return Concurrency(self.active, self.active, rate, REST_TURNS)
        more = self.active + (waiting >= STARVED)
        return Concurrency(more, more, rate, RECOVERY_TURNS - 1, self.goal)
