"""How fast the trainer goes, and so when the next segment has to be prepared: as late as that, so that it is fresh."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["Pace"]

_PREPARE_AT: Final = 0.75  # share of the batches gathered at which the next segment is prepared at the latest
_LEAST_AHEAD_S: Final = 1.0
_SMOOTHING: Final = 0.2
# The middle one of so many steps counts: a single long one is a validation or a checkpoint, and no pace.
_RECENT: Final = 3
# Longer than a thread waits for the GIL, twice, beside a trainer that computes in Python: woken late, it would be late.
_SLOW_S: Final = 0.012


class Pace:
    """How long the trainer takes for a batch, smoothed; not known before it has come for `least` of them. Until then
    `expected_s` is a guess at it.
    """

    def __init__(self, least: int, clock: Callable[[], float], expected_s: float | None = None) -> None:
        self._least = least
        self._clock = clock
        self._expected_s = expected_s
        self._batch_s: float | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._noted = 0
        self._last_s = 0.0
        self._last_batches = 0

    def anew(self) -> Pace:
        """The pace of an epoch that begins: only what the one before it was is known."""
        return Pace(self._least, self._clock, self._likely_s)

    @property
    def _likely_s(self) -> float | None:
        return self._batch_s if self._noted >= self._least else self._expected_s

    def note(self, batches: int) -> None:
        """The trainer has come for `batches` batches, and worked on the ones before until now."""
        now = self._clock()
        if self._noted:
            took_s = (now - self._last_s) / max(1, self._last_batches)
            self._recent.append(took_s)
            typical_s = sorted(self._recent)[len(self._recent) // 2]
            before_s = typical_s if self._batch_s is None else self._batch_s
            self._batch_s = before_s + _SMOOTHING * (typical_s - before_s)
        self._last_s, self._last_batches = now, batches
        self._noted += batches

    def moved(self, batches: int) -> None:
        """The trainer has come for `batches` more since the last note, one at a time."""
        self._last_batches = batches
        self.note(batches)

    @property
    def is_slow(self) -> bool:
        """Whether the trainer works on a batch for so long that nobody has to hurry."""
        return self._batch_s is not None and self._noted >= self._least and self._batch_s >= _SLOW_S

    def until_gone(self, batches: int) -> float:
        """How long until the trainer has come for so many more batches, and is in the midst of working on the last."""
        assert self._batch_s is not None
        left_s = self._last_s + (batches + 0.5) * self._batch_s - self._clock()
        return max(self._batch_s, left_s)

    def is_time(self, batches: int, gathered: int, waiting: int, ahead_s: float) -> bool:
        """Whether to prepare what comes after a segment of `batches`, when `gathered` are there and `waiting` of these
        wait: most are gathered, or what the trainer has left lasts no longer than `ahead_s`.
        """
        if gathered >= _PREPARE_AT * batches:
            return True
        if self._likely_s is None:
            return False
        return (batches - gathered + waiting) * self._likely_s <= max(_LEAST_AHEAD_S, ahead_s)
