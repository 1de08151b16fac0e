"""The units of a claim, and the state of their reading."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cachestream.worker.order import Offsets, is_covered, is_whole
from cachestream.worker.sampling.encode import SampleChunk


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of a claim. All samples before the offset `first` are done.

    `cached`: the ranges of offsets that are cached. `parts`: where samples are held out, the cached ranges of
    the train split and of the held-out split.
    """

    position: int
    number: int
    claim_id: int
    first: int = 0
    cached: Offsets = ()
    parts: Sequence[Offsets] = ()

    @property
    def is_cached(self) -> bool:
        """True if the cache holds all of the unit: it is not read."""
        return bool(self.cached) and is_whole(self.cached)

    def is_wanted(self, offset: int) -> bool:
        return offset >= self.first and not (self.cached and is_covered(self.cached, offset))


class UnitState(Enum):
    """The state of a unit between its submission to a fetcher and its delivery; see `UnitRead.enter`.

        QUEUED ──▶ READING ──▶ FINISHED
                    │   ▲
                    ▼   │
                   PAUSED

    Besides, a unit that does not answer is put aside: the units behind it are delivered first, until
    something of it arrives (`Fetcher.put_aside`).
    """

    QUEUED = "waits for a thread"
    READING = "is read by a thread"
    PAUSED = "its thread waits for the next attempt"
    FINISHED = "read to its end, or failed"


_NEXT_STATES: Final = {
    UnitState.QUEUED: (UnitState.READING,),
    UnitState.READING: (UnitState.PAUSED, UnitState.FINISHED),
    UnitState.PAUSED: (UnitState.READING,),
    UnitState.FINISHED: (),
}


@dataclass(frozen=True, slots=True)
class Stall:
    """The time since when a unit has brought nothing, and the last error as the `reason`."""

    since_s: float
    reason: str

    def is_long(self, now_s: float, hang_timeout_s: float) -> bool:
        """True if the units behind the stalled one are to go first."""
        return now_s - self.since_s >= hang_timeout_s / 3

    def is_too_long(self, now_s: float, hang_timeout_s: float) -> bool:
        """True if the unit is to be left out, provided that its remote answers."""
        return now_s - self.since_s >= 4 * hang_timeout_s


@dataclass(slots=True, eq=False)
class UnitRead:
    """The reading of one unit.

    A unit that is FINISHED when it is submitted is only delivered in its turn: the cache holds all of it, or
    it is left out because of its `error`. `claim_id` is the claim that the progress belongs to; before a unit
    is put aside it gets a claim of its own. `chunks` have been read and not delivered. The next sample to be
    read is at `next_offset`; all before the offset `done` are packed, dropped or skipped.

    `requested_s`: the time of a request that the remote has not answered yet; 0 without one. A unit that does
    not answer has a `stall`, and `retries` counts the attempts since its last answer.
    """

    unit: Unit
    claim_id: int = field(init=False)
    done: int = field(init=False)
    state: UnitState = UnitState.QUEUED
    error: BaseException | None = None
    chunks: deque[SampleChunk] = field(default_factory=deque)
    waiting_bytes: int = 0
    next_offset: int = 0
    requested_s: float = 0.0
    stall: Stall | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        self.claim_id, self.done = self.unit.claim_id, self.unit.first
        if self.unit.is_cached:
            self.state = UnitState.FINISHED

    def leave_out(self, error: BaseException) -> None:
        """Finish a unit that is not to be read, because of `error`."""
        self.error, self.state = error, UnitState.FINISHED

    def enter(self, state: UnitState) -> None:
        """Change the state; raises ValueError for one that cannot follow."""
        if state not in _NEXT_STATES[self.state]:
            raise ValueError(f"a unit that is {self.state.name} cannot become {state.name}")
        self.state = state

    @property
    def finished(self) -> bool:
        return self.state is UnitState.FINISHED

    @property
    def has_own_claim(self) -> bool:
        return self.claim_id != self.unit.claim_id

    @property
    def is_awaited(self) -> bool:
        """True if there is nothing to deliver yet."""
        return not self.chunks and not self.finished

    def is_stalled(self, now_s: float, hang_timeout_s: float) -> bool:
        """True if the unit has not answered for long, in its attempts so far or in the current one."""
        if self.stall is None and self.requested_s:
            since = Stall(self.requested_s, f"unit {self.unit.number}: no answer yet")
            self.stall = since if since.is_long(now_s, hang_timeout_s) else None
        return self.stall is not None and self.stall.is_long(now_s, hang_timeout_s)

    def received(self, chunk: SampleChunk) -> None:
        """Note that `chunk` came: the remote answers."""
        self.next_offset = chunk.offsets[-1] + 1
        self.stall, self.retries = None, 0
