"""A group of caches in a model: what its actor gives and each cache chooses, with shards as sets of samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachestream.ray import group as group_module
from cachestream.ray.group import (
    SILENT_S,
    Answer,
    CacheReport,
    Change,
    GroupActor,
    GroupView,
    HeldShard,
    identity_of,
)
from cachestream.schema import Span
from cachestream.worker.order import Partition, PassPlan

Sample = tuple[int, int]  # position, offset; a unit of n samples has n + 1 of them: the last one is its end
NAMES = ("a", "b", "c", "d")
IDENTITY = (("it has the seed", "0"),)


def plan_of(length: int, ordinal: int = 1) -> str:
    return PassPlan("shuffle", 0, ordinal, length, "", length, None).to_json()


def ranges_of(positions: set[int]) -> tuple[tuple[int, int], ...]:
    starts = sorted(one for one in positions if one - 1 not in positions)
    stops = sorted(one + 1 for one in positions if one + 1 not in positions)
    return tuple(zip(starts, stops, strict=True))


def test_a_shard_that_was_refused_is_offered_again_in_the_next_pass_and_when_it_is_made_anew() -> None:
    first, second = plan_of(4), plan_of(4, ordinal=2)
    shard = HeldShard("content", 1, 100, first, (Span((0, 0), (4, 0)),))
    view = GroupView()

    def take(*changes: Change) -> None:
        view.take(Answer(changes, 1, (), 1, {"a": "its server"}))

    def offered(plan: str) -> list[HeldShard]:
        current, earlier, _ = view.choose(plan, 4, ((0, 4),), (), has_room=True)
        return current + earlier

    take(Change("a", (shard,)))
    assert offered(first) == [shard]
    view.refused.add("content")
    assert offered(first) == []
    assert offered(second) == [shard]
    view.refused.add("content")
    take(Change("a", (), ("content",)))
    take(Change("a", (shard,)))
    assert offered(second) == [shard]


@dataclass
class Member:
    """A cache, whose units have `sizes`; each has one position in all passes, and those in `failing` cannot be
    read.
    """

    name: str
    sizes: list[int]
    failing: frozenset[int]
    undecided: set[int] = field(default_factory=set)
    making: set[int] = field(default_factory=set)
    half_made: set[Sample] = field(default_factory=set)  # done, of the units in `making`
    shards: dict[str, tuple[HeldShard, set[Sample]]] = field(default_factory=dict)
    evicted: set[Sample] = field(default_factory=set)
    made: list[int] = field(default_factory=list)
    view: GroupView | None = None
    known: set[str] = field(default_factory=set)
    copies: list[HeldShard] = field(default_factory=list)

    @property
    def plan(self) -> str:
        return plan_of(len(self.sizes))

    def samples(self, positions: set[int]) -> set[Sample]:
        return {(one, offset) for one in positions - self.failing for offset in range(self.sizes[one] + 1)}

    @property
    def held(self) -> set[Sample]:
        return set().union(*(samples for _, samples in self.shards.values()))

    def sync(self, actor: GroupActor, now_s: float) -> None:
        if self.view is None:
            assert actor.join(self.name, IDENTITY, f"server of {self.name}", now_s) == ""
            self.view, self.known = GroupView(), set()
        added = tuple(self.shards[one][0] for one in self.shards if one not in self.known)
        removed = tuple(self.known - self.shards.keys())
        self.known = set(self.shards)
        undecided, making = ranges_of(self.undecided), ranges_of(self.making)
        current, earlier, free = self.view.choose(
            self.plan, len(self.sizes), undecided, self.shards, has_room=not self.evicted
        )
        seen = self.view.seen
        wants = 0 if earlier or seen < 0 or len(self.making) > 3 else 2
        report = CacheReport(self.plan, len(self.sizes), seen, free, making, added, removed, wants)
        if (answer := actor.sync(self.name, report, now_s)) is None:
            self.view = None
            return
        self.view.take(answer)
        self.copies = current + earlier
        positions = {one for start, stop in answer.make for one in range(start, stop)} & self.undecided
        held = self.held
        whole = {one for one in self.undecided if self.samples({one}) and self.samples({one}) <= held}
        self.undecided -= positions | whole
        self.making |= positions

    def make(self, most: int) -> None:
        """Make up to `most` samples, and publish them as one shard: it may end in the middle of a unit."""
        new: set[Sample] = set()
        for one in sorted(self.making):
            rest = sorted(self.samples({one}) - self.held - self.half_made)
            took = rest[: max(0, most - len(new))]
            took = rest if took == rest[:-1] else took  # the end of a unit lies with its last sample
            new |= set(took)
            self.made += [one] if took else []
            if len(took) < len(rest):
                self.half_made |= set(took)
                break
            self.making.discard(one)
            self.half_made = {sample for sample in self.half_made if sample[0] != one}
        if any(offset < self.sizes[one] for one, offset in new):
            self.publish(new, self.plan, f"{self.name} {len(self.made)}")

    def publish(self, samples: set[Sample], plan: str, maker: str) -> None:
        assert not samples & self.held, "a sample is held twice"
        spans = tuple(
            Span((one, offset), (one + 1, 0) if offset == self.sizes[one] else (one, offset + 1))
            for one, offset in sorted(samples)
        )
        shard = HeldShard(f"{maker} {sorted(samples)}", len(self.shards), 100, plan, spans)
        self.shards[shard.content] = shard, samples

    def copy(self, others: dict[str, Member], number: int) -> None:
        """Copy what a shard has of units that wait for the group, and of which nothing is held."""
        if self.view is None or not self.copies:
            return
        shard = self.copies.pop(number % len(self.copies))
        holders = [others[name] for name, _ in self.view.holders(shard) if name in others]
        found = next((one.shards[shard.content] for one in holders if shard.content in one.shards), None)
        if found is None:
            return
        mine = self.shards.values()
        elsewhere = {one for other, samples in mine if other.plan != shard.plan for one, _ in samples}
        twice = {one for one, _ in found[1] & self.held}
        wanted = {one for one in found[1] if one[0] in self.undecided - elsewhere - twice}
        if not any(offset < self.sizes[one] for one, offset in wanted):
            self.view.refused.add(shard.content)
        elif wanted == found[1]:
            self.shards[shard.content] = found
        else:
            self.publish(wanted, shard.plan, f"{self.name} of {shard.content}")

    def evict(self, number: int) -> None:
        if self.shards:
            _, samples = self.shards.pop(sorted(self.shards)[number % len(self.shards)])
            self.evicted |= samples


class Group:
    def __init__(self, sizes: list[int], count: int, failing: frozenset[int] = frozenset()) -> None:
        self.sizes, self.failing = sizes, failing
        self.actor, self.now_s = GroupActor(IDENTITY), 100.0
        self.members: dict[str, Member] = {}
        for name in NAMES[:count]:
            self.enter(name)

    def enter(self, name: str) -> Member:
        self.members[name] = Member(name, self.sizes, self.failing, set(range(len(self.sizes))))
        return self.members[name]

    def step(self, member: Member, action: str, number: int) -> None:
        if action == "sync":
            member.sync(self.actor, self.now_s)
        elif action == "lose":  # the answer does not come
            before = set(member.undecided), set(member.making)
            member.sync(self.actor, self.now_s)
            (member.undecided, member.making), member.view, member.copies = before, None, []
        elif action == "make":
            member.make(1 + number)
        elif action == "copy":
            member.copy(self.members, number)
        elif action == "evict":
            member.evict(number)
        elif action == "alone":  # the group does not answer
            chosen = set(sorted(member.undecided)[: 1 + number])
            member.undecided -= chosen
            member.making |= chosen
            member.view, member.copies = None, []
        elif action == "earlier":
            chosen = set(sorted(member.undecided - {one for one, _ in member.held})[number % 3 :: 2][:3])
            if samples := member.samples(chosen):
                member.publish(samples, plan_of(len(self.sizes), 0), f"before {member.name} {number}")

    def finish(self, rng: Random, pause_s: float = 0.2) -> None:
        for _ in range(60 + 8 * sum(self.sizes)):
            if not any(member.undecided or member.making for member in self.members.values()):
                break
            for name in rng.sample(sorted(self.members), len(self.members)):
                member = self.members[name]
                member.sync(self.actor, self.now_s)
                member.make(rng.randint(1, 12))
                while member.copies:
                    member.copy(self.members, rng.randrange(8))
            self.now_s += pause_s
        else:
            raise AssertionError(f"not done: {self.members}")
        readable = set(range(len(self.sizes))) - self.failing
        everything = {(one, offset) for one in readable for offset in range(self.sizes[one])}
        for member in self.members.values():
            assert everything <= member.held | member.evicted, f"{member.name} lacks samples"

    @property
    def made(self) -> Counter[int]:
        """The number of caches that have made each position."""
        return Counter(one for member in self.members.values() for one in set(member.made))


SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=30)
BLOCKS = st.sampled_from([1, 3, 7, 4096])
ACTIONS = (
    "sync", "sync", "make", "copy", "copy", "lose", "evict", "earlier", "alone", "leave", "silence", "restart", "new",
)  # fmt: skip
EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.mark.e2e
@EXAMPLES
@given(SIZES, BLOCKS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_position_is_made_once_while_all_stay_and_one_that_joins_makes_nothing(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], blocks: int, count: int, rng: Random
) -> None:
    monkeypatch.setattr(group_module, "MOST_BLOCKS", blocks)
    group = Group(sizes, count)
    group.finish(rng, pause_s=0.01)
    assert group.made == Counter(range(len(sizes)))
    late = group.enter("late")
    group.finish(rng)
    assert not late.made


@pytest.mark.e2e
@EXAMPLES
@given(
    SIZES,
    BLOCKS,
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(ACTIONS), st.integers(0, 9)), max_size=80),
    st.frozensets(st.integers(0, 29), max_size=3),
    st.randoms(use_true_random=False),
)
def test_nothing_is_lost_or_held_twice_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    blocks: int,
    count: int,
    actions: list[tuple[int, str, int]],
    failing: frozenset[int],
    rng: Random,
) -> None:
    monkeypatch.setattr(group_module, "MOST_BLOCKS", blocks)
    group = Group(sizes, count, failing)
    for who, action, number in actions:
        name = sorted(group.members)[who % len(group.members)]
        unused = [one for one in NAMES if one not in group.members]
        if action == "leave" and len(group.members) > 1:  # without a word
            del group.members[name]
        elif action == "silence":
            group.now_s += SILENT_S + 1
        elif action == "restart":
            group.actor = GroupActor(IDENTITY)
        elif action == "new" and unused:
            group.enter(unused[0])
        else:
            group.step(group.members[name], action, number)
    group.now_s += SILENT_S + 1
    group.finish(rng)
    group.now_s += SILENT_S + 1  # those that have left are forgotten
    for _ in range(3):
        for member in group.members.values():
            member.sync(group.actor, group.now_s)
    assert len(group.actor._changes) <= len(group.members), "what all have seen is forgotten"


@pytest.mark.e2e
@EXAMPLES
@given(SIZES, BLOCKS, st.integers(1, 3), st.sets(st.integers(0, 8)), st.randoms(use_true_random=False))
def test_a_cache_that_joins_a_later_pass_makes_nothing_that_the_others_hold(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], blocks: int, count: int, numbers: set[int], rng: Random
) -> None:
    monkeypatch.setattr(group_module, "MOST_BLOCKS", blocks)
    group = Group(sizes, count)
    first = group.members["a"]
    for number in numbers:
        group.step(first, "earlier", number)
    for member in group.members.values():
        member.shards |= first.shards
    for _ in range(1 + rng.randrange(20)):
        for member in group.members.values():
            group.step(member, "sync", 0)
            group.step(member, "make", 3)
            group.step(member, "copy", 0)
    held = {position for position, _ in set().union(*(one.held for one in group.members.values()))}
    late = group.enter("late")
    group.finish(rng)
    assert not held & set(late.made)


def test_a_block_that_takes_long_is_given_to_another_cache_too() -> None:
    group = Group([1, 1], 2)
    a, b = group.members.values()
    for _ in range(2):
        a.sync(group.actor, group.now_s)
        b.sync(group.actor, group.now_s)
    assert (a.making, b.making) == ({0, 1}, set())
    for _ in range(4):
        group.now_s += 5.0
        a.sync(group.actor, group.now_s)
        b.sync(group.actor, group.now_s)
    assert b.making == {0, 1}
    group.finish(Random(0))


def test_an_actor_that_was_lost_gives_nothing_until_the_others_have_joined() -> None:
    group = Group([1] * 64, 2)
    for member in [*group.members.values()] * 2:
        member.sync(group.actor, group.now_s)
    making = [set(member.making) for member in group.members.values()]
    assert all(making)
    group.actor = GroupActor(IDENTITY)
    a, b = group.members.values()
    for member in (a, a, a, b, b, b):
        member.sync(group.actor, group.now_s)
    assert [member.making for member in group.members.values()] == making
    group.finish(Random(0))
    assert max(group.made.values()) == 1


@dataclass(frozen=True)
class JobOfGroup:
    """The options of a job that a group has in common."""

    fingerprint: str = "files"
    num_units: int = 10
    listing: str = "ab"
    transform: str = "decode"
    kind: str = "shuffle"
    seed: int = 0
    partition: Partition | None = None


def test_a_cache_that_does_not_fit_is_told_its_difference_until_the_others_are_gone() -> None:
    job: Any = JobOfGroup()
    other: Any = replace(job, seed=7)
    divided: Any = replace(job, partition=Partition(0, 3))
    group = GroupActor(identity_of(job))
    assert group.join("a", identity_of(job), None) == ""
    assert group.join("b", identity_of(other), None) == "it has the seed 7, and the group has 0"
    difference = "it divides the units among nodes: 3, and the group has none"
    assert group.join("b", identity_of(divided), None) == difference
    group.leave("a")
    assert group.join("b", identity_of(other), None) == ""
