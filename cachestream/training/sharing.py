"""Whether a gather is shared by torch's threads, found by trying (pure).

Two threads copy 1.7 times as much as one where a core is free. Where others use the cores, each call waits until its
second thread is given one, which made it 6 to 18 times slower here. Nobody tells which it is, so the faster of the
two is used, and the other one tried now and then. A trainer that finds its batches waiting needs no second thread, which
would take its core: they spin between calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["COPIES_A_TURN", "Sharing"]

COPIES_A_TURN: Final = 4
_FIRST_PATIENCE: Final = 8
_MOST_PATIENCE: Final = 256
_SMOOTHING: Final = 0.3
_FALLEN: Final = 0.6  # of the rate at which it was chosen: something has changed


@dataclass(frozen=True, slots=True)
class Sharing:
    """`threads` are used now, one or `most`: on trial while `chosen` is 0, else chosen at that rate.

    `rate` is the smoothed rate of those that are chosen: one slow turn says nothing, since epochs are prepared in
    between. After `turns` more the other number is tried, after a trial that was lost as late as `patience` says,
    which doubles.
    """

    most: int
    threads: int
    chosen: float = 0.0
    rate: float = 0.0
    turns: int = 1
    patience: int = _FIRST_PATIENCE

    @classmethod
    def begin(cls, most: int) -> Sharing:
        """Up to `most` threads may be used."""
        return cls(most, most)

    def next(self, rate: float, hurried: bool = True) -> Sharing:
        """What to do after a turn that copied at `rate` (in any unit), `hurried` if the trainer waited for it."""
        if self.most == 1:
            return self
        if not hurried:
            return Sharing(self.most, 1, rate, rate)
        if not self.chosen and rate < self.rate:  # the trial is lost
            patience = min(_MOST_PATIENCE, 2 * self.patience)
            return replace(self._other(), chosen=self.rate, turns=self.patience, patience=patience)
        if not self.chosen:
            turns = _FIRST_PATIENCE if self.rate else 1  # the very first have had no trial
            return replace(self, chosen=rate, rate=rate, turns=turns, patience=_FIRST_PATIENCE)
        smooth = self.rate + _SMOOTHING * (rate - self.rate)
        if self.turns > 1 and smooth >= _FALLEN * self.chosen:
            return replace(self, rate=smooth, turns=self.turns - 1)
        return replace(self._other(), chosen=0.0, rate=smooth)

    def _other(self) -> Sharing:
        return replace(self, threads=self.most if self.threads == 1 else 1)
