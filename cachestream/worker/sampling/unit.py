"""Units on their way: as they are handed out, and as they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachestream.worker.order import Offsets, gaps, is_covered

if TYPE_CHECKING:
    from cachestream.worker.sampling.encode import SampleChunk


@dataclass(frozen=True)  # no slots: Units that go to actors are pickled several times slower with them
class Unit:
    """The unit at a position of the pass. All samples before the offset `first` are done.

    `cached`: the ranges of offsets that are cached. `parts`: where samples are held out, the cached ranges of
    the train split and of the held-out split.
    """

    position: int
    number: int
    first: int = 0
    cached: Offsets = ()
    parts: Sequence[Offsets] = ()

    @property
    def end(self) -> int:
        """The offset after the last sample that is wanted; END if that is known only when the unit ends.

        0 if none is wanted.
        """
        wanted = gaps(self.cached, self.first)
        return wanted[-1][1] if wanted else 0

    def is_wanted(self, offset: int) -> bool:
        return offset >= self.first and not (self.cached and is_covered(self.cached, offset))


@dataclass(frozen=True, slots=True)
class Stall:
    """The time since when a unit has brought nothing, and the last error as the `reason`."""

    since_s: float
    reason: str

    def is_too_long(self, now_s: float, hang_timeout_s: float) -> bool:
        """True if the unit is to be left out, provided that its remote answers."""
        return now_s - self.since_s >= 4 * hang_timeout_s


@dataclass(slots=True, eq=False)
class UnitRead:
    """The reading of one unit.

    `chunks` have been read and not delivered. The next sample to be read is at `next_offset`; all before the
    offset `done` are packed, dropped or skipped. A unit that is `finished` was read up to its last wanted
    sample, or failed with `error`.

    `heard_s`: the time at which its reading began, or last brought something; None before it began.
    `requested_s`: the time of a request that the remote has not answered yet; 0 without one. A unit that does
    not answer has a `stall`, and `retries` counts the attempts since its last answer.
    """

    unit: Unit
    done: int = field(init=False)
    finished: bool = False
    error: BaseException | None = None
    chunks: deque[SampleChunk] = field(default_factory=deque)
    waiting_bytes: int = 0
    fetched_bytes: int = 0
    next_offset: int = 0
    heard_s: float | None = None
    requested_s: float = 0.0
    stall: Stall | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        self.done = self.unit.first

    @property
    def is_awaited(self) -> bool:
        """True if there is nothing to deliver yet."""
        return not self.chunks and not self.finished

    def is_silent(self, now_s: float, patience_s: float) -> bool:
        """True if the reading has brought nothing for `patience_s`."""
        return self.is_awaited and self.heard_s is not None and now_s - self.heard_s > patience_s

    def received(self, chunk: SampleChunk) -> None:
        """Note that `chunk` came: the remote answers."""
        self.next_offset = chunk.offsets[-1] + 1
        self.stall, self.retries = None, 0
