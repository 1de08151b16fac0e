"""The units of the current pass: handed out to the sampling processes, and recorded as they are done.

The supervisor alone uses this. Units that are cached already are passed over here. A suspect, a unit that was
being read when a process died, is handed out alone, so that the next death has one cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.storage.progress import PassRow, PositionQueue, Suspect
from cachestream.storage.tables import FailureRow
from cachestream.worker.cached_units import KnownOrders
from cachestream.worker.job import Job
from cachestream.worker.listings import Listings
from cachestream.worker.order import PassPlan, is_whole
from cachestream.worker.units import Unit

if TYPE_CHECKING:
    from cachestream.listing.names import StoredNames
    from cachestream.storage.cache import Cache

QUARANTINE_AT: Final = 12  # a sum of weights of deaths, see health.suspects_of
_PASSED_OVER: Final = 16_384  # cached units in one look: the supervisor has other work


@dataclass(frozen=True, slots=True)
class Assignment:
    """Units for one sampling process, of the pass `row`. `alone`: the process is to read nothing beside
    them.
    """

    row: PassRow
    units: tuple[Unit, ...]
    alone: bool = False


class Planner:
    """Hands out the units of the open pass of `cache`, and keeps account of them."""

    def __init__(self, job: Job, cache: Cache, *, is_shared: bool) -> None:
        self._job, self._cache, self._is_shared = job, cache, is_shared
        self.orders = KnownOrders(job, cache)
        self._names: StoredNames | None = Listings(cache.directory).load() if job.growing else None
        self._row: PassRow | None = None
        self.plan: PassPlan | None = None
        self._queue = PositionQueue(0, 0)
        self._suspects: dict[int, Suspect] = {}
        self._alone: dict[int, int] = {}  # owner → the suspect that it reads
        self.failures: list[FailureRow] = []  # of units that are given up, to be recorded
        self.is_dirty = False  # what was passed over, or was suspected, is not recorded yet
        self.passed_over = False  # the last look found cached units: another look may find others
        self.wants_idle = False  # the last process asked is to publish what it has, and then reads a suspect

    def begin(self) -> None:
        """Take up the current pass as the catalogue records it."""
        row = self._cache.filling.state().last_pass
        self._row, self._alone, self.failures, self.is_dirty = row, {}, [], False
        self.plan = None if row is None else PassPlan.from_json(row.plan)
        if row is not None:
            self._queue = PositionQueue.of(row, is_shared=self._is_shared)
            self._suspects = {suspect.position: suspect for suspect in row.suspects}
        if self._is_shared:
            self._queue.share()
            self.is_dirty = True
        self.orders.look_again()

    @property
    def row(self) -> PassRow:
        """The current pass with its progress."""
        assert self._row is not None
        queue = self._queue
        return replace(
            self._row,
            next_position=queue.next_position,
            open=queue.open,
            undecided=tuple(queue.undecided or ()),
            suspects=tuple(self._suspects.values()),
        )

    @property
    def queue(self) -> PositionQueue:
        return self._queue

    @property
    def is_open(self) -> bool:
        """True if something of the pass is left to do."""
        return self.plan is not None and (self.plan.growing or not self._queue.is_done)

    @property
    def is_handed_out(self) -> bool:
        """True if nothing of the pass is left to hand out, now or later, unless a process dies."""
        return self.plan is None or (not self.plan.growing and self._queue.is_handed_out)

    # --- handing out

    def take(self, owner: int, most: int) -> Assignment | None:
        """Hand out up to `most` units to the process `owner`; None if there are none for it now."""
        self.passed_over = self.wants_idle = False
        if self._row is None or owner in self._alone or not (self._queue.has_more or self._grow()):
            return None
        units, suspects = self._take(owner, most + len(self._suspects), most)
        if not units and not suspects and self._queue.has_more:
            units, suspects = self._take(owner, _PASSED_OVER, most)
        if units:
            return Assignment(self.row_without_progress, tuple(units))
        return self._take_suspect(owner, suspects) if suspects else None

    def _take(self, owner: int, positions: int, most: int) -> tuple[list[Unit], list[int]]:
        """Up to `most` units at the next `positions`, and the suspects among these, which wait on."""
        taken = self._queue.take(owner, positions)
        suspects = [one for one in taken if one[0] in self._suspects]
        self._queue.put_back(owner, suspects)
        units = self._wanted(owner, [one for one in taken if one[0] not in self._suspects])
        self._queue.put_back(owner, [(unit.position, unit.first) for unit in units[most:]])
        return units[:most], [position for position, _ in suspects]

    @property
    def row_without_progress(self) -> PassRow:
        """The current pass, as shards name it."""
        assert self._row is not None
        return replace(self._row, next_position=self._queue.next_position, open=(), undecided=(), suspects=())

    def _take_suspect(self, owner: int, positions: Sequence[int]) -> Assignment | None:
        for position in positions:
            if (suspect := self._suspects[position]).deaths >= QUARANTINE_AT:
                self._give_up(owner, suspect)
                return None
        if self._queue.handed.get(owner):
            self.wants_idle = True
            return None
        units = self._wanted(owner, [self._queue.take_at(owner, positions[0])])
        if not units:
            return None
        self._alone[owner] = positions[0]
        return Assignment(self.row_without_progress, tuple(units), alone=True)

    def _give_up(self, owner: int, suspect: Suspect) -> None:
        """Leave out a unit that has killed too many processes."""
        (taken,) = self._wanted_units([self._queue.take_at(owner, suspect.position)])
        self._queue.finish(owner, suspect.position)
        del self._suspects[suspect.position]
        reason = f"reading it {suspect.reason}, again and again"
        self.failures.append(FailureRow("quarantined", reason, 1, f"unit {taken.number}"))
        self.is_dirty = self.passed_over = True

    def _wanted(self, owner: int, taken: Sequence[tuple[int, int]]) -> list[Unit]:
        """The units at the positions `taken`, but for those that the cache holds already."""
        wanted = []
        for unit in self._wanted_units(taken):
            if unit.cached and is_whole(unit.cached):
                self._queue.finish(owner, unit.position)
                self._suspects.pop(unit.position, None)
                self.is_dirty = self.passed_over = True
            else:
                wanted.append(unit)
        return wanted

    def _wanted_units(self, taken: Sequence[tuple[int, int]]) -> list[Unit]:
        if not taken:
            return []
        assert self.plan is not None
        numbers = self.orders.of(self.plan).units(np.array([position for position, _ in taken], np.int64))
        cached = self.orders.cached(self.row_without_progress, self.plan, numbers)
        return [
            Unit(position, number, first, ranges, tuple(parts))
            for (position, first), number, (ranges, *parts) in zip(
                taken, numbers.tolist(), cached, strict=True
            )
        ]

    def _grow(self) -> bool:
        """Extend a pass whose listing goes on by what was listed since; False if nothing was."""
        if self.plan is None or not self.plan.growing or self._queue.next_position != self._queue.length:
            return False
        assert self._names is not None
        assert self._row is not None
        mark = self._names.look()
        if mark is None or not self.plan.should_grow(mark.count, is_complete=mark.is_complete):
            return False
        plan = self.plan.grown(mark.count, self._names.digest, is_complete=mark.is_complete)
        self._cache.filling.replace_plan(
            self._row, plan.to_json(), plan.length, is_listing=not mark.is_complete
        )
        self._follow(plan)
        return self._queue.has_more

    def _follow(self, plan: PassPlan) -> None:
        assert self._row is not None
        self.plan, self._row = plan, replace(self._row, plan=plan.to_json(), length=plan.length)
        self._queue.length = plan.length
        self.orders.look_again()  # by the names that have come

    def follow_pass(self, ordinal: int) -> None:
        """Make the pass another one over the same units; nothing of it may be done."""
        assert self.plan is not None
        self.reorder(replace(self.plan, ordinal=ordinal))

    def reorder(self, plan: PassPlan) -> None:
        """Give the pass a plan that has other units from a position on that was not handed out yet."""
        self._cache.filling.replace_plan(self.row, plan.to_json(), plan.length, is_listing=False)
        self._follow(plan)

    # --- progress

    @contextmanager
    def noted(
        self, owner: int, finished: Iterable[int], advanced: Iterable[tuple[int, int]]
    ) -> Iterator[None]:
        """Note what the process `owner` has done: whole units, and others up to an offset.

        An error in the block undoes that: it was not recorded.
        """
        before = dict(self._queue.handed.get(owner, {}))
        alone, suspects = dict(self._alone), dict(self._suspects)
        for position in finished:
            self._queue.finish(owner, position)
            if self._alone.get(owner) == position:
                del self._alone[owner]
                self._suspects.pop(position, None)  # it was read without a crash
        for position, offset in advanced:
            self._queue.advance(owner, position, offset)
        try:
            yield
        except BaseException:
            self._queue.handed[owner], self._alone, self._suspects = before, alone, suspects
            raise

    def has_died(self, owner: int, suspects: Iterable[Suspect] = ()) -> None:
        """Have the units of a process that has ended handed out again, and note which may have ended it."""
        handed = self._queue.handed.get(owner, {})
        for suspect in suspects:
            if suspect.position in handed:
                before = self._suspects.get(suspect.position)
                deaths = suspect.deaths + (0 if before is None else before.deaths)
                self._suspects[suspect.position] = replace(suspect, deaths=deaths)
                self.is_dirty = True
        self._queue.give_back(owner)
        self._alone.pop(owner, None)
