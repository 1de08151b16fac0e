"""The units of the current pass: handed out to the sampling processes, and recorded as they are done.

The supervisor alone uses this. Units that are cached already are passed over here. A suspect, a unit that was
being read when a process died, is handed out alone, so that the next death has one cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from cachestream.schema import IntArray, span_array
from cachestream.storage.progress import PassRow, PositionQueue, Suspect
from cachestream.storage.tables import FailureRow
from cachestream.worker.cached_units import Held, KnownOrders
from cachestream.worker.job import Job
from cachestream.worker.listings import Listings
from cachestream.worker.order import END, PassPlan, intersection
from cachestream.worker.outdated import Outdated, pieces_of, whole_units
from cachestream.worker.sampling.messages import Publication
from cachestream.worker.sampling.unit import Unit

if TYPE_CHECKING:
    from cachestream.listing.names import StoredNames
    from cachestream.storage.cache import Cache

QUARANTINE_AT: Final = 12  # a sum of weights of deaths, see health.suspects_of
_SEGMENT: Final = 65_536  # units that are planned at once, in some 20 ms: the supervisor has other work


@dataclass(frozen=True, slots=True)
class Assignment:
    """Units for one sampling process, of the pass `row`. `alone`: the process is to read nothing beside
    them.
    """

    row: PassRow
    units: tuple[Unit, ...]
    alone: bool = False


class PlannedUnits:
    """Units that are planned ahead: those at `positions`, which ascend.

    `held`: the samples that are cached of them: of all samples, or of those of each split. What is evicted
    after the planning comes again in a later pass. `wanted`: the positions of units that are not all cached.
    """

    def __init__(self, positions: IntArray, numbers: IntArray, held: Sequence[Held]) -> None:
        self.positions, self._numbers, self._held = positions, numbers, held
        self._is_whole = np.logical_and.reduce([one.whole for one in held])
        self.wanted: IntArray = positions[~self._is_whole]
        self._in_part = {place for one in held for place in one.ranges}
        self._in_part.update(np.flatnonzero(np.logical_or.reduce([one.whole for one in held])).tolist())

    def has(self, positions: IntArray) -> npt.NDArray[np.bool_]:
        """For each of `positions`: True if its unit is planned here."""
        if not len(self.positions):
            return np.zeros(len(positions), np.bool_)
        places = np.minimum(np.searchsorted(self.positions, positions), len(self.positions) - 1)
        found: npt.NDArray[np.bool_] = self.positions[places] == positions
        return found

    def units(self, taken: Sequence[tuple[int, int]]) -> list[tuple[Unit, bool]]:
        """The units at positions, each with the offset before which all is done; True for one that is cached."""
        places = np.searchsorted(self.positions, [position for position, _ in taken])
        numbers, whole = self._numbers[places].tolist(), self._is_whole[places].tolist()
        found = []
        for (position, first), place, number, is_whole in zip(
            taken, places.tolist(), numbers, whole, strict=True
        ):
            if place not in self._in_part:
                found.append((Unit(position, number, first), False))
                continue
            ranges = [one[place] for one in self._held]
            parts = tuple(ranges) if len(ranges) > 1 else ()
            cached = intersection(*ranges) if parts else ranges[0]
            found.append((Unit(position, number, first, cached, parts), is_whole))
        return found


_NONE: Final = np.empty(0, np.int64)
NOTHING_PLANNED: Final = PlannedUnits(_NONE, _NONE, [Held(np.empty(0, np.bool_), {})])


class Planner:
    """Hands out the units of the open pass of `cache`, and keeps account of them."""

    def __init__(self, job: Job, cache: Cache, *, is_shared: bool) -> None:
        self._job, self._cache, self._is_shared = job, cache, is_shared
        self.orders = KnownOrders(job, cache)
        self._names: StoredNames | None = Listings(cache.directory).load() if job.growing else None
        self._row: PassRow | None = None
        self.plan: PassPlan | None = None
        self._queue = PositionQueue(0, 0)
        self._next = self._again = NOTHING_PLANNED  # of positions not handed out yet, and of others
        self.outdated: Outdated | None = None  # shards of other transforms, which are replaced
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
        self._next = self._again = NOTHING_PLANNED
        if self._is_shared:
            self.share()
        self.outdated = None
        if self.plan is not None and self._job.replaces:
            outdated = self.orders.outdated(self.plan)
            self.outdated = outdated if outdated.shards else None

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
        taken = self._queue.take(owner, most + len(self._suspects), self._ahead)
        suspects = [one for one in taken if one[0] in self._suspects]
        self._queue.put_back(owner, suspects)
        units = self._wanted(owner, [one for one in taken if one[0] not in self._suspects])
        self._queue.put_back(owner, [(unit.position, unit.first) for unit in units[most:]])
        if units:
            return Assignment(self.row_without_progress, tuple(units[:most]))
        return self._take_suspect(owner, [position for position, _ in suspects]) if suspects else None

    def _ahead(self, start: int, most: int) -> tuple[list[int], int]:
        """The next positions that are not cached, of the segment that begins at or before `start`."""
        if not self._next.has(np.array([start])).all():
            stop = min(start + _SEGMENT, self._queue.length or END)
            self._next = self._planned(np.arange(start, stop))
        wanted = self._next.wanted[np.searchsorted(self._next.wanted, start) :][:most].tolist()
        stop = wanted[-1] + 1 if len(wanted) == most else int(self._next.positions[-1]) + 1
        if stop - start > len(wanted):
            self.is_dirty = self.passed_over = True
        return wanted, stop

    def _planned(self, positions: IntArray) -> PlannedUnits:
        assert self.plan is not None
        order = self.orders.of(self.plan)
        numbers = order.units(positions)
        held = self.orders.held(self.plan, numbers)
        if self.plan.is_permutation:
            for one in held:
                one.whole[order.come_again(positions, numbers)] = True
        return PlannedUnits(positions, numbers, held)

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
        ((taken, _),) = self._units([self._queue.take_at(owner, suspect.position)])
        self._queue.finish(owner, suspect.position)
        del self._suspects[suspect.position]
        reason = f"reading it {suspect.reason}, again and again"
        self.failures.append(FailureRow("quarantined", reason, 1, f"unit {taken.number}"))
        self.is_dirty = self.passed_over = True

    def _wanted(self, owner: int, taken: Sequence[tuple[int, int]]) -> list[Unit]:
        """The units at the positions `taken`, but for those that the cache holds already."""
        wanted = []
        for unit, is_cached in self._units(taken):
            if is_cached:
                self._queue.finish(owner, unit.position)
                self._suspects.pop(unit.position, None)
                self.is_dirty = self.passed_over = True
            else:
                wanted.append(unit)
        return wanted

    def _units(self, taken: Sequence[tuple[int, int]]) -> list[tuple[Unit, bool]]:
        """The units at the positions `taken`, in their order; True for one that is cached by now."""
        positions = np.array([position for position, _ in taken], np.int64)
        is_next = self._next.has(positions)
        before = [one for one, is_ahead in zip(taken, is_next.tolist(), strict=True) if not is_ahead]
        if not before:
            return self._next.units(taken)
        if not self._again.has(positions[~is_next]).all():
            # They were handed out before, to a process that has ended, or a group of caches decided on them.
            waiting = chain.from_iterable(range(start, stop) for start, _, stop in self._queue.waiting)
            planned = chain(positions[~is_next].tolist(), islice(waiting, _SEGMENT))
            self._again = self._planned(np.unique(np.fromiter(planned, np.int64)))
        ahead = [one for one, is_ahead in zip(taken, is_next.tolist(), strict=True) if is_ahead]
        return self._again.units(before) + self._next.units(ahead)

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
        self._next = self._again = NOTHING_PLANNED

    def follow_pass(self, ordinal: int) -> None:
        """Make the pass another one over the same units; nothing of it may be done."""
        assert self.plan is not None
        self.reorder(replace(self.plan, ordinal=ordinal))

    def reorder(self, plan: PassPlan) -> None:
        """Give the pass a plan that has other units from a position on that was not handed out yet."""
        self._cache.filling.replace_plan(self.row, plan.to_json(), plan.length, is_listing=False)
        self._follow(plan)

    def share(self) -> None:
        """Have a group of caches decide on all units that no process has; what is cached is looked at again."""
        self._queue.share()
        self._next = self._again = NOTHING_PLANNED
        self.is_dirty = True

    # --- replacing

    def replaced_by(self, publication: Publication) -> list[int]:
        """The outdated shards whose samples are made anew by those of `publication`.

        A transform may drop all samples of a unit. Nothing is replaced by samples that were only skipped.
        """
        if self.outdated is None or (publication.failures and not publication.shards):
            return []
        assert self.plan is not None
        pieces = pieces_of(span_array(publication.spans))
        pieces[:, 0] = self.orders.of(self.plan).units(pieces[:, 0])
        return self.outdated.replaced_by(pieces, sum(shard.num_samples for shard in publication.shards))

    def outdated_in_hand(self, size_bytes: int) -> list[int]:
        """The fewest outdated shards of `size_bytes` whose units the sampling processes have."""
        if self.outdated is None:
            return []
        assert self.plan is not None
        positions = sorted(position for handed in self._queue.handed.values() for position in handed)
        units = self.orders.of(self.plan).units(np.array(positions, np.int64))
        return self.outdated.fewest(self.outdated.holding(whole_units(units)), size_bytes)

    def outdated_twice(self) -> list[int]:
        """The outdated shards of which other shards hold samples: a catalogue that was lost had noted it."""
        if self.outdated is None:
            return []
        assert self.plan is not None
        units = self.outdated.units
        pieces = []
        for held in self.orders.held(self.plan, units):
            parts = [(int(units[place]), *one) for place, ranges in held.ranges.items() for one in ranges]
            pieces += [whole_units(units[held.whole]), np.array(parts, np.int64).reshape(-1, 3)]
        return self.outdated.holding(np.concatenate(pieces))

    def forget_outdated(self, shard_ids: Sequence[int], num_samples: int = 0) -> None:
        """Note that these outdated shards have left the cache, as `num_samples` new samples came."""
        if self.outdated is not None:
            self.outdated.forget(shard_ids, num_samples)

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
