"""Judging the deaths of processes: suspects, pauses and giving up (pure functions)."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BREAKER_CRASHES: Final = 5
BREAKER_ISOLATIONS: Final = 16  # two a unit: eight bad ones in a row
BREAKER_KILLS: Final = 25
BREAKER_WINDOW_S: Final = 600.0
START_DEADLINE_S: Final = 120.0
TROUBLE_S: Final = 60.0
_QUIET_S: Final = 5.0  # housekeeping, which causes most system errors, runs more often
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0

# Weights of a death, of a position in flight with others or alone; a sum of 12 quarantines a position. A
# SIGKILL may well have come from outside, from a person or from the out-of-memory killer.
_SHARED, _ALONE, _SHARED_KILL, _ALONE_KILL = 4, 8, 1, 3


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a sampling process; `returncode` as in subprocess (-9: by SIGKILL).

    `hanging`: the watchdog killed it; `stopped`: it hung because it had been stopped (SIGSTOP). `orderly`: it
    ended by itself and said so: no unit is to blame. `progressed`: it had committed something since its
    start. `suspects`: the number of positions that it was working on.
    """

    at_s: float
    returncode: int
    hanging: bool = False
    stopped: bool = False
    orderly: bool = False
    progressed: bool = False
    suspects: int = 0

    @property
    def is_kill(self) -> bool:
        """True if the death came from outside, as far as can be told."""
        if self.hanging:
            return self.stopped
        return self.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    @property
    def isolates(self) -> bool:
        """True if the death narrows down the unit that is to blame."""
        return self.suspects > 0 and not self.is_kill and not self.orderly

    def __str__(self) -> str:
        if self.hanging:
            return "had been stopped" if self.stopped else "hung"
        if self.returncode < 0:
            return f"ended the process by {_signal_name(-self.returncode)}"
        return f"ended the process with exit code {self.returncode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class Trouble:
    """System errors that follow one another closely: no descriptors for a moment, or a disk that fails."""

    since_s: float = -math.inf
    last_s: float = -math.inf

    def again(self, now_s: float) -> Trouble:
        """The trouble after one more error; a quiet time before it ends the old trouble."""
        return Trouble(self.since_s if now_s - self.last_s <= _QUIET_S else now_s, now_s)

    @property
    def is_lasting(self) -> bool:
        """True if the errors have gone on for so long that it is time to give up."""
        return self.last_s - self.since_s > TROUBLE_S


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A position that may have caused a death, and the weight of that."""

    position: int
    weight: int


def suspicions(death: Death, positions: Sequence[int]) -> list[Suspicion]:
    """The suspicions on the `positions` that a process was working on at its `death`."""
    if death.orderly:
        return []
    when_alone, when_shared = (_ALONE_KILL, _SHARED_KILL) if death.is_kill else (_ALONE, _SHARED)
    distinct = sorted(set(positions))
    weight = when_alone if len(distinct) == 1 else when_shared
    return [Suspicion(position, weight) for position in distinct]


def hanging_positions(
    now_s: float,
    timeout_s: float,
    main: tuple[float, int | None],
    flights: Sequence[tuple[float, int]],
) -> list[int] | None:
    """The positions on which a process hangs (empty if it hangs elsewhere); None if it is alive.

    `main`: the last beat of the main thread, and the position that it transforms. `flights`: the last beats
    of the fetching threads, and the positions that they read.
    """
    hanging = [position for beat_s, position in flights if now_s - beat_s > timeout_s]
    main_hangs = now_s - main[0] > timeout_s
    if main_hangs and main[1] is not None:
        hanging.append(main[1])
    return hanging if hanging or main_hangs else None


def was_away(gap_s: float, timeout_s: float) -> bool:
    """True if a gap between two ticks of the supervisor means that all processes were stopped.

    A tick may take long by itself: a gap much shorter than `timeout_s` changes nothing.
    """
    return gap_s > timeout_s / 2


def is_crash_loop(deaths: Sequence[Death], now_s: float, processes: int) -> bool:
    """True if it is time to give up: too many recent deaths of processes that had not committed anything.

    More deaths are allowed if they narrow down a bad unit, as each process may meet bad units first, and
    still more if they are kills from outside.
    """
    recent: list[Death] = []
    for death in reversed(deaths):
        if death.progressed or now_s - death.at_s > BREAKER_WINDOW_S:
            break
        recent.append(death)
    kills = sum(death.is_kill for death in recent)
    isolations = sum(death.isolates for death in recent)
    crashes = len(recent) - kills - isolations
    return (
        crashes >= BREAKER_CRASHES
        or isolations >= max(BREAKER_ISOLATIONS, 3 * processes)
        or kills >= BREAKER_KILLS
    )


def longest_pause_s(deaths: Sequence[Death]) -> float:
    """The longest pause before the last process is restarted; the pause itself is drawn below that."""
    if deaths[-1].progressed or deaths[-1].isolates:
        return _FIRST_PAUSE_S
    failures = 0
    for death in reversed(deaths):
        if death.progressed:
            break
        failures += 1
    return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures - 1, 16)))
