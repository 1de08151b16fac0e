"""Judging deaths: who is suspected, how long to wait, and when to give up (pure)."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Death", "Suspicion", "is_crash_loop", "is_hanging", "suspicions"]

BREAKER_CRASHES: Final = 5
BREAKER_KILLS: Final = 25
BREAKER_WINDOW_S: Final = 600.0
START_DEADLINE_S: Final = 120.0

# Weights of a death (12 quarantine a position): with others in flight, or alone. A SIGKILL may well
# have come from outside, from a person or from the kernel's memory killer.
_SHARED, _ALONE, _SHARED_KILL, _ALONE_KILL = 4, 8, 1, 3


@dataclass(frozen=True, slots=True)
class Death:
    """How a sampling process ended: `returncode` as subprocess gives it (-9: by SIGKILL).

    `hanging`: the watchdog ended it. `progressed`: it had done something since it started.
    """

    at_s: float
    returncode: int
    hanging: bool
    progressed: bool

    @property
    def is_kill(self) -> bool:
        return not self.hanging and self.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    def __str__(self) -> str:
        if self.hanging:
            return "hung"
        if self.returncode < 0:
            return f"ended the process by {signal.Signals(-self.returncode).name}"
        return f"ended the process with exit code {self.returncode}"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A position that may have caused a death, and how heavily that weighs."""

    position: int
    weight: int


def suspicions(death: Death, flights: Sequence[int], in_transform: int | None) -> list[Suspicion]:
    """Which positions are suspected after `death`: those being read, and the one being transformed.

    When the main thread hung in a transform, that one alone.
    """
    if death.hanging and in_transform is not None:
        return [Suspicion(in_transform, _ALONE)]
    positions = sorted({*flights, *([] if in_transform is None else [in_transform])})
    alone = len(positions) == 1
    when_alone, when_shared = (_ALONE_KILL, _SHARED_KILL) if death.is_kill else (_ALONE, _SHARED)
    weight = when_alone if alone else when_shared
    return [Suspicion(position, weight) for position in positions]


def is_crash_loop(deaths: Sequence[Death], now_s: float) -> bool:
    """Whether to give up: too many deaths of late, none of which had done anything."""
    recent: list[Death] = []
    for death in reversed(deaths):
        if death.progressed or now_s - death.at_s > BREAKER_WINDOW_S:
            break
        recent.append(death)
    kills = sum(death.is_kill for death in recent)
    return len(recent) - kills >= BREAKER_CRASHES or kills >= BREAKER_KILLS


def is_hanging(now_s: float, beat_s: float, flight_beats_s: Sequence[float], timeout_s: float) -> bool:
    """Whether the main thread or any fetching thread has shown no life for `timeout_s`."""
    return now_s - min([beat_s, *flight_beats_s]) > timeout_s
