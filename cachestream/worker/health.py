"""The health of sampling processes: signs of life, deaths, suspects, pauses, and giving up.

The judgements are pure functions; `SamplingProcesses` acts by them.
"""

from __future__ import annotations

import logging
import math
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cachestream.config import NO_THREADS
from cachestream.linux import is_stopped
from cachestream.storage.progress import Suspect
from cachestream.storage.telemetry import ENDED, STARTING, Board
from cachestream.worker.child_process import START_DEADLINE_S, ChildProcess
from cachestream.worker.processes import EXIT_FATAL, EXIT_LATER, EXIT_RESTART

BREAKER_CRASHES: Final = 5
BREAKER_ISOLATIONS: Final = 16  # two deaths for a bad unit: eight bad units in a row
BREAKER_KILLS: Final = 25
BREAKER_WINDOW_S: Final = 600.0
TROUBLE_S: Final = 60.0
_QUIET_S: Final = 5.0  # housekeeping, which causes most system errors, runs more often
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
LATER_PAUSE_S: Final = 2.0  # until the disk or the catalogue may be free

# The weight of a death for a position that was read with others, or alone; a position with a sum of 12 is
# quarantined. A SIGKILL may well have come from outside, from a person or from the out-of-memory killer.
_SHARED, _ALONE, _SHARED_KILL, _ALONE_KILL = 4, 8, 1, 3

logger = logging.getLogger("cachestream.worker")


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a sampling process; `returncode` as in subprocess (-9: by SIGKILL).

    `hanging`: the process was killed because it hung; `stopped`: it hung because of SIGSTOP. `orderly`: it
    ended by itself and showed that on the board, so no unit is to blame. `progressed`: it had committed
    something since its start. `suspects`: the number of positions that it was working on.
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
        """True if the death helps to find the unit that is to blame."""
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
class SystemErrors:
    """System errors in close succession, such as a lack of descriptors for a moment, or a disk that fails."""

    since_s: float = -math.inf
    last_s: float = -math.inf

    def again(self, now_s: float) -> SystemErrors:
        """Add an error; after a time without errors the count begins anew."""
        return SystemErrors(self.since_s if now_s - self.last_s <= _QUIET_S else now_s, now_s)

    @property
    def is_lasting(self) -> bool:
        """True if the errors have gone on for so long that it is time to give up."""
        return self.last_s - self.since_s > TROUBLE_S


def suspects_of(death: Death, positions: Sequence[int]) -> list[Suspect]:
    """The suspects among the `positions` that a process was working on at its `death`, with their weights."""
    if death.orderly:
        return []
    when_alone, when_shared = (_ALONE_KILL, _SHARED_KILL) if death.is_kill else (_ALONE, _SHARED)
    distinct = sorted(set(positions))
    weight = when_alone if len(distinct) == 1 else when_shared
    return [Suspect(position, weight, str(death)) for position in distinct]


def hanging_positions(
    now_s: float,
    timeout_s: float,
    main: tuple[float, int | None],
    reads: Sequence[tuple[float, int]],
) -> list[int] | None:
    """The positions on which a process hangs (empty if it hangs elsewhere); None if it is alive.

    `main`: the last beat of the main thread, and the position that it transforms. `reads`: the last beats
    of the fetching threads, and the positions that they read.
    """
    hanging = [position for beat_s, position in reads if now_s - beat_s > timeout_s]
    main_hangs = now_s - main[0] > timeout_s
    if main_hangs and main[1] is not None:
        hanging.append(main[1])
    return hanging if hanging or main_hangs else None


def was_suspended(gap_s: float, timeout_s: float) -> bool:
    """True if a gap between two ticks of the supervisor means that all processes were stopped.

    A tick may take long by itself, but hardly half of `timeout_s`.
    """
    return gap_s > timeout_s / 2


def recent_deaths(deaths: Sequence[Death], now_s: float) -> list[Death]:
    """The last of `deaths`, newest first: within ten minutes, of processes that had committed nothing."""
    recent: list[Death] = []
    for death in reversed(deaths):
        if death.progressed or now_s - death.at_s > BREAKER_WINDOW_S:
            break
        recent.append(death)
    return recent


def is_crash_loop(deaths: Sequence[Death], now_s: float, processes: int) -> bool:
    """True if it is time to give up: too many recent deaths of processes that had not committed anything.

    More deaths are allowed if they help to find a bad unit, as each process may meet bad units first, and
    still more if they are kills from outside.
    """
    recent = recent_deaths(deaths, now_s)
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


class GiveUpError(Exception):
    """The filling cannot go on; `output`, the last output of a process, is for the user."""

    def __init__(self, output: str, message: str = "") -> None:
        super().__init__(message or last_error(output))
        self.output = output


def last_error(output: str) -> str:
    """The message of the error at the end of `output`."""
    lines = output.strip().splitlines()
    if not lines:
        return "the worker cannot go on"
    message = lines[-1].partition(": ")[2] or lines[-1]
    return f"{message}: {NO_THREADS}" if "can't start new thread" in message else message


class SamplingProcess:
    """The sampling process in slot `index` of the board: started, watched and reaped."""

    def __init__(self, index: int, process: ChildProcess, board: Board) -> None:
        self.index, self.process = index, process
        self._board, self._slot = board, board.slot(index)
        self._committed_before = 0
        self._hung: list[int] | None = None
        self._was_stopped = False

    def start_if_due(self, now_s: float) -> None:
        """Start the process if it is due; it stays due if the system refuses."""
        if self.process.start_at_s is None or now_s < self.process.start_at_s:
            return
        self._board.clear_reads(self.index)
        self._slot["state"], self._slot["beat_s"] = STARTING, now_s
        self._committed_before = int(self._slot["committed"])
        self._hung, self._was_stopped = None, False
        self.process.start(now_s)

    def _reads(self) -> list[tuple[float, int]]:
        """The fetching threads' last beats, and the positions they read."""
        beats, positions = self._slot["read_beats_s"].tolist(), self._slot["reads"].tolist()
        return [(beat_s, one - 1) for beat_s, one in zip(beats, positions, strict=True) if one]

    def _in_transform(self) -> int | None:
        """The position of the sample that is being transformed."""
        return int(self._slot["transforming"]) - 1 if self._slot["transforming"] else None

    def kill_if_hanging(self, now_s: float, resumed_s: float, timeout_s: float) -> None:
        """Kill the process if it shows no life.

        Time before `resumed_s`, when all processes continued after a stop, does not count.
        """
        if not self.process.running or self._hung is not None:
            return
        if int(self._slot["state"]) == STARTING:
            if now_s - max(self.process.started_s, resumed_s) > START_DEADLINE_S:
                self._hung = []
        elif now_s - resumed_s > timeout_s:
            main = (float(self._slot["beat_s"]), self._in_transform())
            self._hung = hanging_positions(now_s, timeout_s, main, self._reads())
        if self._hung is not None:
            pid = self.process.pid
            self._was_stopped = pid is not None and is_stopped(pid)
            self.process.kill()

    def reap(self, now_s: float) -> tuple[Death, list[Suspect]] | None:
        """The death of the process, and the positions that are suspected of it; None while it runs."""
        code = self.process.reap()
        if code is None:
            return None
        positions = self._hung
        if positions is None:
            in_transform = self._in_transform()
            positions = [position for _, position in self._reads()]
            positions += [] if in_transform is None else [in_transform]
        death = Death(
            now_s,
            code,
            hanging=self._hung is not None,
            stopped=self._was_stopped,
            # A process that did not show its end was ended by what it worked on, whatever its exit code.
            orderly=int(self._slot["state"]) == ENDED,
            progressed=int(self._slot["committed"]) > self._committed_before,
            suspects=len(set(positions)),
        )
        self._board.clear_reads(self.index)
        return death, suspects_of(death, positions)


class SamplingProcesses:
    """All sampling processes of a job: those that die are started again, unless it is time to give up.

    `on_end(index, suspects)` is called for each process that has ended, before another one is started.
    """

    def __init__(
        self,
        children: Sequence[SamplingProcess],
        board: Board,
        hang_timeout_s: float,
        on_end: Callable[[int, list[Suspect]], None],
    ) -> None:
        self._children, self._board, self._hang_timeout_s = children, board, hang_timeout_s
        self._on_end = on_end
        self._deaths: list[Death] = []

    @property
    def running(self) -> list[int]:
        """The indices of the processes that run."""
        return [child.index for child in self._children if child.process.running]

    @property
    def have_ended(self) -> bool:
        """True if no process runs, and none is to be started: there is nothing left to hand out."""
        return all(child.process.is_over for child in self._children)

    def begin(self, now_s: float) -> None:
        """Start all processes that do not run, by the next `start_due` at the latest."""
        for child in self._children:
            if child.process.is_over:
                child.process.start_at_s = now_s

    def start_due(self, now_s: float) -> None:
        """Start the processes that are due; raises OSError if the system refuses: they stay due."""
        for child in self._children:
            child.start_if_due(now_s)

    def check(self, now_s: float, resumed_s: float) -> None:
        """Kill hanging processes, and reap dead ones; raises GiveUpError if another start would not help."""
        for child in self._children:
            child.kill_if_hanging(now_s, resumed_s, self._hang_timeout_s)
            self._reap(child, now_s)

    def end(self) -> None:
        """Kill all processes: what they were doing is void."""
        for child in self._children:
            child.process.end()
            child.process.start_at_s = None

    def _reap(self, child: SamplingProcess, now_s: float) -> None:
        ended = child.reap(now_s)
        if ended is None:
            return
        death, suspects = ended
        code, words = death.returncode if death.orderly else None, child.process.last_output
        self._on_end(child.index, suspects)
        if code == 0:
            return
        if code in (EXIT_RESTART, EXIT_LATER):
            is_later = code == EXIT_LATER or not death.progressed
            child.process.start_at_s = now_s + (LATER_PAUSE_S if is_later else 0.0)
            return
        logger.warning("sampling process %d %s", child.index, death)
        if code == EXIT_FATAL:
            raise GiveUpError(words)
        self._deaths.append(death)
        if is_crash_loop(self._deaths, now_s, len(self._children)):
            how = last_error(words) if death.orderly else f"what they read {death}"
            raise GiveUpError(words, f"the sampling processes died {len(self._deaths)} times: {how}")
        self._board.count_restart()
        child.process.start_at_s = now_s + random.uniform(0.0, longest_pause_s(self._deaths))
