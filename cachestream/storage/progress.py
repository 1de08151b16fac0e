"""The progress of a pass over the remote: the set of its positions that are done, kept as the ranges that are
not.

The supervisor of a cache hands positions out to its sampling processes, in any order, and records what they
finish. A unit that does not answer holds back nobody. The recorded form names what is open below the first
position that was never handed out, so that it stays small, whatever the length of the pass.
"""

from __future__ import annotations

import bisect
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cachestream.storage.os_errors import CatalogueDamagedError

OpenRange = tuple[int, int, int]  # position, offset, stop: of the first unit all before the offset is done
Positions = tuple[int, int]  # start, stop
# Of the positions from `start` on, up to `most` that are not done already, and the first that was not looked
# at.
Wanted = Callable[[int, int], tuple[Sequence[int], int]]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A position that was being read when processes died; `deaths` is the sum of these deaths' weights
    (`worker/health.py`).
    """

    position: int
    deaths: int
    reason: str


@dataclass(frozen=True, slots=True)
class PassRow:
    """One pass over the remote, as recorded.

    `plan` (JSON) gives the order of units. Positions below `next_position` were handed out, and are done
    unless they are among the `open` ones, or those on which a group of caches has yet to decide.
    `evicted_before` is the number of shards that were ever evicted when the pass began; -1 for a pass that
    was restored from its shards, of which that is unknown.
    """

    id: int
    plan: str
    length: int | None
    next_position: int
    evicted_before: int
    open: tuple[OpenRange, ...] = ()
    undecided: tuple[Positions, ...] = ()
    suspects: tuple[Suspect, ...] = ()

    @property
    def positions_done(self) -> int:
        open_positions = sum(stop - position for position, _, stop in self.open)
        return self.next_position - open_positions - sum(stop - start for start, stop in self.undecided)

    @property
    def is_done(self) -> bool:
        """True if nothing of the pass is left, as far as it goes by now."""
        return self.length is not None and self.positions_done >= self.length

    def to_json(self) -> str:
        """The ranges and the suspects."""
        suspects = [[one.position, one.deaths, one.reason] for one in self.suspects]
        return json.dumps([self.open, self.undecided, suspects], separators=(",", ":"))


def parse_progress(text: str) -> tuple[tuple[OpenRange, ...], tuple[Positions, ...], tuple[Suspect, ...]]:
    """The ranges and the suspects of `PassRow.to_json`; none for "". Raises CatalogueDamagedError for
    anything else.
    """
    if not text:
        return (), (), ()
    try:
        opened, undecided, suspects = json.loads(text)
        return (
            tuple((int(position), int(offset), int(stop)) for position, offset, stop in opened),
            tuple((int(start), int(stop)) for start, stop in undecided),
            tuple(Suspect(int(position), int(deaths), str(reason)) for position, deaths, reason in suspects),
        )
    except (TypeError, ValueError) as error:
        raise CatalogueDamagedError(
            f"the progress {text[:100]!r} of a pass makes no sense ({error}); start a worker: it rebuilds "
            "the catalogue"
        ) from error


class Statements:
    """Statements of one transaction. Valid only inside the `with` block that yielded it.

    A statement with unfetched rows keeps its lock past the end of the transaction, so all rows are fetched
    at once; those of `scans` are not, and are closed with the transaction.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany
        self.scans: list[sqlite3.Cursor] = []

    def close(self) -> None:
        """Finish the statements that were left."""
        for cursor in self.scans:
            cursor.close()


class ProgressTables(Statements):
    """The passes, within one transaction."""

    def passes(self) -> list[PassRow]:
        """All passes, by id; raises CatalogueDamagedError for progress that makes no sense."""
        rows = self.execute(
            "SELECT id, plan, length, next_position, evicted_before, progress FROM passes ORDER BY id"
        )
        return [
            PassRow(key, plan, length, next_position, evicted_before, *parse_progress(text))
            for key, plan, length, next_position, evicted_before, text in rows.fetchall()
        ]

    def last_pass(self) -> PassRow | None:
        """The current pass; None before the first."""
        return next(reversed(self.passes()), None)

    def insert_pass(self, plan: str, length: int | None, evicted_before: int) -> int:
        # The id is above 0 even if all known passes are earlier ones, with ids below 0.
        cursor = self.execute(
            "INSERT INTO passes SELECT max(0, coalesce(max(id), 0)) + 1, ?, ?, 0, ?, '' FROM passes",
            (plan, length, evicted_before),
        )
        return int(cursor.lastrowid or 0)

    def earlier_pass(self, plan: str, length: int | None) -> int:
        """Return the id of the pass with this plan. An unknown one is inserted before all others."""
        known = self.pass_id(plan)
        if known is not None:
            return known
        # Below 0, because 0 means no pass. The pass with the highest id stays the current one.
        cursor = self.execute(
            "INSERT INTO passes SELECT min(0, coalesce(min(id), 0)) - 1, ?, ?, 0, -1, '' FROM passes",
            (plan, length),
        )
        return int(cursor.lastrowid or 0)

    def pass_id(self, plan: str) -> int | None:
        row = self.execute("SELECT id FROM passes WHERE plan = ?", (plan,)).fetchone()
        return None if row is None else int(row[0])

    def replace_plan(self, pass_id: int, plan: str, length: int | None) -> None:
        """Replace the plan of a pass that has grown, or whose units are ordered anew.

        A pass with the same plan that was rebuilt from shards is the same pass: the two are merged.
        """
        same = self.pass_id(plan)
        if same not in (None, pass_id):
            self.execute("UPDATE shards SET pass_id = ? WHERE pass_id = ?", (pass_id, same))
            self.execute("DELETE FROM passes WHERE id = ?", (same,))
        self.execute("UPDATE passes SET plan = ?, length = ? WHERE id = ?", (plan, length, pass_id))

    def record_progress(self, row: PassRow) -> None:
        """Record what of a pass is done."""
        self.execute(
            "UPDATE passes SET next_position = ?, progress = ? WHERE id = ?",
            (row.next_position, row.to_json(), row.id),
        )


@dataclass(slots=True)
class PositionQueue:
    """The positions of a pass: done, handed out to an owner, waiting to be handed out again, or not begun.

    With `undecided` ranges, a group of caches decides which positions are made here: no others are handed
    out.
    """

    next_position: int
    length: int | None
    waiting: list[OpenRange] = field(default_factory=list)  # sorted
    undecided: list[Positions] | None = None
    handed: dict[int, dict[int, int]] = field(default_factory=dict)  # owner → position → offset

    @classmethod
    def of(cls, row: PassRow, *, is_shared: bool) -> PositionQueue:
        """The progress that is recorded in `row`; where nothing `is_shared`, this cache makes all that is
        left.
        """
        left = sorted([*row.open, *((start, 0, stop) for start, stop in row.undecided)])
        if not is_shared:
            return cls(row.next_position, row.length, left)
        return cls(row.next_position, row.length, list(row.open), list(row.undecided))

    @property
    def has_more(self) -> bool:
        """True if positions can be handed out now."""
        return bool(self.waiting) or (self.undecided is None and self.next_position != self.length)

    @property
    def is_handed_out(self) -> bool:
        """True if all positions have been handed out, and no group has yet to decide on some."""
        return not self.has_more and not self.undecided

    @property
    def is_done(self) -> bool:
        return self.is_handed_out and not any(self.handed.values())

    def take(self, owner: int, most: int, wanted: Wanted | None = None) -> list[tuple[int, int]]:
        """Hand out up to `most` positions to `owner`, each with the offset up to which it is done.

        `wanted`: see `Wanted`; without it, all are.
        """
        taken: list[tuple[int, int]] = []
        while self.waiting and len(taken) < most:
            position, offset, stop = self.waiting.pop(0)
            if position + 1 < stop:
                self.waiting.insert(0, (position + 1, 0, stop))
            taken.append((position, offset))
        if self.undecided is None and len(taken) < most:
            start, stop = self.next_position, self.next_position + most - len(taken)
            stop = stop if self.length is None else min(stop, self.length)
            positions: Iterable[int] = range(start, stop)
            if wanted is not None and start < stop:
                positions, stop = wanted(start, stop - start)
            taken += [(position, 0) for position in positions]
            self.next_position = stop
        self.handed.setdefault(owner, {}).update(taken)
        return taken

    def take_at(self, owner: int, position: int) -> tuple[int, int]:
        """Hand out one waiting position to `owner`."""
        for at, (first, offset, stop) in enumerate(self.waiting):
            if first <= position < stop:
                parts = [(first, offset, position), (position + 1, 0, stop)]
                self.waiting[at : at + 1] = [part for part in parts if part[0] < part[2]]
                taken = position, offset if position == first else 0
                self.handed.setdefault(owner, {}).update([taken])
                return taken
        raise KeyError(f"position {position} does not wait")

    def put_back(self, owner: int, taken: Iterable[tuple[int, int]]) -> None:
        """Have positions that were just handed out to `owner` wait for another one."""
        for position, offset in taken:
            del self.handed[owner][position]
            self._wait(position, offset, position + 1)

    def advance(self, owner: int, position: int, offset: int) -> None:
        """Note that all samples of a position before `offset` are done."""
        if position in self.handed.get(owner, ()):
            self.handed[owner][position] = offset

    def finish(self, owner: int, position: int) -> None:
        """Note that a position is done."""
        self.handed.get(owner, {}).pop(position, None)

    def give_back(self, owner: int) -> None:
        """Have all that `owner` has not finished wait for another one."""
        for position, offset in sorted(self.handed.pop(owner, {}).items()):
            self._wait(position, offset, position + 1)

    def _wait(self, position: int, offset: int, stop: int) -> None:
        at = bisect.bisect(self.waiting, (position, offset, stop))
        before = self.waiting[at - 1] if at else None
        if before is not None and before[2] == position and not offset:
            self.waiting[at - 1] = (before[0], before[1], stop)
        else:
            self.waiting.insert(at, (position, offset, stop))

    # --- with a group of caches

    def share(self) -> None:
        """Have the group decide on all positions that no sampling process has."""
        undecided = list(self.undecided or ())
        # A unit of which a part is done stays here.
        undecided += [(position + bool(offset), stop) for position, offset, stop in self.waiting]
        self.waiting = [(position, offset, position + 1) for position, offset, _ in self.waiting if offset]
        if self.length is not None and self.next_position < self.length:
            undecided.append((self.next_position, self.length))
            self.next_position = self.length
        self.undecided = _joined(one for one in undecided if one[0] < one[1])

    def decide(self, make: Iterable[Positions]) -> None:
        """Hand out the undecided positions in `make` from now on."""
        for start, stop in make:
            for first, last in self._take_undecided(start, stop):
                self._wait(first, 0, last)

    def _take_undecided(self, start: int, stop: int) -> list[Positions]:
        taken, left = [], []
        for first, last in self.undecided or ():
            inside = max(first, start), min(last, stop)
            if inside[0] >= inside[1]:
                left.append((first, last))
                continue
            taken.append(inside)
            left += [one for one in ((first, inside[0]), (inside[1], last)) if one[0] < one[1]]
        self.undecided = left
        return taken

    # --- as it is recorded

    @property
    def open(self) -> tuple[OpenRange, ...]:
        """The ranges that are handed out or wait, in order."""
        handed = [(p, offset, p + 1) for held in self.handed.values() for p, offset in held.items()]
        return tuple(_merged(sorted([*self.waiting, *handed])))


def _merged(ranges: Sequence[OpenRange]) -> Iterator[OpenRange]:
    """Join ranges that touch; one that begins within a unit stays apart from what lies before it."""
    current: OpenRange | None = None
    for one in ranges:
        if current is not None and one[0] == current[2] and not one[1]:
            current = (current[0], current[1], one[2])
            continue
        if current is not None:
            yield current
        current = one
    if current is not None:
        yield current


def _joined(ranges: Iterable[Positions]) -> list[Positions]:
    found: list[Positions] = []
    for start, stop in sorted(ranges):
        if found and found[-1][1] >= start:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
