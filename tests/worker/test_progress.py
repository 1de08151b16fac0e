"""Positions of a pass: each is handed out until it is done, once, and none is lost, whatever ends meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachestream.storage.os_errors import CatalogueDamagedError
from cachestream.storage.progress import PassRow, PositionQueue, Suspect, parse_progress

LENGTH = 24
OWNERS = st.integers(0, 2)
RANGES = st.lists(
    st.tuples(st.integers(0, LENGTH), st.integers(1, 9)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=3,
)


class Positions(RuleBasedStateMachine):
    """The queue beside a model that keeps each position in a set of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PositionQueue(0, LENGTH)
        self.new = set(range(LENGTH))  # of an endless pass: so far
        self.waiting: dict[int, int] = {}  # position → the offset before which all is done
        self.undecided: set[int] = set()
        self.handed: dict[int, dict[int, int]] = {}
        self.done: set[int] = set()
        self.is_shared = False

    @initialize(length=st.sampled_from([LENGTH, None]))
    def begin(self, length: int | None) -> None:
        self.queue.length = length

    @rule(owner=OWNERS, most=st.integers(1, 7), back=st.integers(0, 7))
    def take(self, owner: int, most: int, back: int) -> None:
        """Take some, and put the last of them back."""
        if self.queue.length is None:
            self.new |= set(range(self.queue.next_position, self.queue.next_position + most))
        free = len(self.waiting) + (0 if self.is_shared else len(self.new))
        taken = self.queue.take(owner, most)
        assert len(taken) == min(most, free)
        for position, offset in taken:
            assert self.waiting.pop(position, 0) == offset
            self.new.discard(position)
        self.handed.setdefault(owner, {}).update(taken)
        self.queue.put_back(owner, taken[back:])
        for position, offset in taken[back:]:
            self.waiting[position] = offset
            del self.handed[owner][position]

    @precondition(lambda self: self.waiting)
    @rule(owner=OWNERS, data=st.data())
    def take_one(self, owner: int, data: Any) -> None:
        position = data.draw(st.sampled_from(sorted(self.waiting)))
        offset = self.waiting.pop(position)
        assert self.queue.take_at(owner, position) == (position, offset)
        self.handed.setdefault(owner, {})[position] = offset
        with pytest.raises(KeyError):
            self.queue.take_at(owner, position)

    @precondition(lambda self: any(self.handed.values()))
    @rule(data=st.data(), more=st.integers(1, 9), is_done=st.booleans())
    def work(self, data: Any, more: int, is_done: bool) -> None:
        held = [(owner, position) for owner, own in self.handed.items() for position in own]
        owner, position = data.draw(st.sampled_from(sorted(held)))
        if is_done:
            self.queue.finish(owner, position)
            del self.handed[owner][position]
            self.done.add(position)
        else:
            self.handed[owner][position] += more
            self.queue.advance(owner, position, self.handed[owner][position])

    @rule(owner=OWNERS, position=st.integers(0, LENGTH))
    def work_on_what_it_has_not(self, owner: int, position: int) -> None:
        """As a process tells whose units were handed out again."""
        if position not in self.handed.get(owner, {}):
            self.queue.advance(owner, position, 99)
            self.queue.finish(owner, position)

    @rule(owner=OWNERS)
    def die(self, owner: int) -> None:
        self.queue.give_back(owner)
        self.waiting |= self.handed.pop(owner, {})

    @precondition(lambda self: self.queue.length is not None)
    @rule()
    def share(self) -> None:
        self.queue.share()
        kept = {p for first, _, stop in self.queue.waiting for p in range(first, stop)}
        assert {p for p, offset in self.waiting.items() if offset} <= kept <= self.waiting.keys()
        self.undecided |= (self.waiting.keys() - kept) | self.new
        self.waiting = {position: self.waiting[position] for position in kept}
        self.new, self.is_shared = set(), True

    @precondition(lambda self: self.is_shared)
    @rule(make=RANGES)
    def decide(self, make: list[tuple[int, int]]) -> None:
        self.queue.decide(make)
        for start, stop in make:
            chosen = self.undecided & set(range(start, stop))
            self.undecided -= chosen
            self.waiting |= dict.fromkeys(chosen, 0)

    @rule(is_shared=st.booleans())
    def start_again(self, is_shared: bool) -> None:
        """Another supervisor goes on with what was recorded."""
        row = self.row()
        opened, undecided, suspects = parse_progress(row.to_json())
        assert suspects == row.suspects
        row = PassRow(row.id, row.plan, row.length, row.next_position, 0, opened, undecided, suspects)
        self.queue = PositionQueue.of(row, is_shared=self.is_shared and is_shared)
        for owner in list(self.handed):
            self.waiting |= self.handed.pop(owner)
        if self.is_shared and not is_shared:
            self.waiting |= dict.fromkeys(self.undecided, 0)
            self.undecided, self.is_shared = set(), False

    def row(self) -> PassRow:
        queue, suspects = self.queue, (Suspect(3, 8, "hung, so to speak"),)
        undecided = tuple(queue.undecided or ())
        return PassRow(1, "{}", queue.length, queue.next_position, 0, queue.open, undecided, suspects)

    @invariant()
    def each_position_is_in_one_place(self) -> None:
        opened = dict(self.waiting)
        for held in self.handed.values():
            assert not opened.keys() & held.keys()
            opened |= held
        row = self.row()
        told: dict[int, int] = {}
        for first, offset, stop in row.open:
            assert first < stop
            assert not told.keys() & set(range(first, stop))
            told |= {first: offset} | dict.fromkeys(range(first + 1, stop), 0)
        assert told == opened
        assert {p for start, stop in row.undecided for p in range(start, stop)} == self.undecided
        assert row.positions_done == len(self.done)
        assert self.done | self.undecided | opened.keys() == set(range(self.queue.next_position))
        if self.queue.length is not None:
            assert row.is_done == self.queue.is_done == (self.done == set(range(LENGTH)))
            free = bool(self.waiting or (self.new and not self.is_shared))
            assert (self.queue.has_more, self.queue.is_handed_out) == (free, not free and not self.undecided)


Positions.TestCase.settings = settings(stateful_step_count=30, deadline=None)
TestPositions = Positions.TestCase


def test_all_positions_of_a_pass_come_in_order_and_once() -> None:
    queue = PositionQueue(0, 1000)
    taken: list[tuple[int, int]] = []
    while some := queue.take(len(taken) % 3, 7):
        taken += some
    assert taken == [(position, 0) for position in range(1000)]
    for owner in range(3):
        for position in list(queue.handed.get(owner, ())):
            queue.finish(owner, position)
    assert queue.is_done
    assert queue.open == ()


def test_the_record_of_a_long_pass_is_short() -> None:
    queue = PositionQueue(0, None)
    for owner in range(8):
        queue.take(owner, 1000)
    row = PassRow(1, "{}", None, queue.next_position, 0, queue.open)
    assert row.to_json() == "[[[0,0,8000]],[],[]]"
    assert row.positions_done == 0


@pytest.mark.parametrize(
    "text", ["[]", "{}", "5", "[[[1,2]],[],[]]", '[[["a",0,1]],[],[]]', "[[", "[[],[],[[1]]]"]
)
def test_progress_that_makes_no_sense_is_damage_of_the_catalogue(text: str) -> None:
    with pytest.raises(CatalogueDamagedError, match="rebuilds the catalogue"):
        parse_progress(text)


def test_a_pass_that_has_not_begun_has_no_progress() -> None:
    assert parse_progress("") == ((), (), ())
