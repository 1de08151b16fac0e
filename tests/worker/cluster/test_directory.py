"""The directory of a group, in a model of the caches around it."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachestream.schema import Span
from cachestream.worker.cluster import directory
from cachestream.worker.cluster.directory import (
    SILENT_S,
    GroupDirectory,
    covers,
    overlap,
)
from tests.worker.cluster.group_model import GroupModel, MemberModel, Units, plan_of

NAMES = ("a", "b", "c", "d", "e")

sizes = st.lists(st.integers(1, 3), min_size=1, max_size=30).map(tuple)
blocks = st.sampled_from([1, 3, 7, 4096])
groups = st.integers(1, 4)


@pytest.fixture
def most_blocks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """To be set for each example."""
    return monkeypatch


@pytest.mark.e2e
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, blocks, groups, st.randoms(use_true_random=False))
def test_each_position_is_made_once_while_all_caches_stay(
    most_blocks: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    blocks: int,
    count: int,
    rng: Random,
) -> None:
    most_blocks.setattr(directory, "MOST_BLOCKS", blocks)
    group = GroupModel(Units(sizes), NAMES[:count])
    group.finish(rng, 20 + 4 * sum(sizes), pause_s=0.01)
    makers = {name: set(member.made) for name, member in group.members.items()}
    assert Counter(position for made in makers.values() for position in made) == Counter(range(len(sizes)))
    samples = group.units.real(group.units.of(range(len(sizes))))
    held = Counter(one for member in group.members.values() for one in member.held if one in samples)
    assert held == dict.fromkeys(samples, count)


ACTIONS = (
    "sync",
    "sync",
    "make",
    "ask",
    "arrive",
    "lose",
    "evict",
    "earlier",
    "alone",
    "leave",
    "silence",
    "restart",
    "new",
)


@pytest.mark.e2e
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes,
    blocks,
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from(ACTIONS), st.integers(0, 9)), max_size=80),
    st.sets(st.integers(0, 29), max_size=3),
    st.randoms(use_true_random=False),
)
def test_nothing_is_lost_or_held_twice_whatever_happens(
    most_blocks: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    blocks: int,
    count: int,
    actions: list[tuple[int, str, int]],
    failing: set[int],
    rng: Random,
) -> None:
    most_blocks.setattr(directory, "MOST_BLOCKS", blocks)
    units = Units(sizes, frozenset(failing))
    group = GroupModel(units, NAMES[:count])
    for who, action, number in actions:
        name = sorted(group.members)[who % len(group.members)]
        if action == "leave":  # without a word
            if len(group.members) > 1:
                del group.members[name]
        elif action == "silence":
            group.now_s += SILENT_S + 1
        elif action == "restart":
            group.directory = GroupDirectory()
        elif action == "new":
            unused = [one for one in NAMES if one not in group.members and one not in group.directory.members]
            if unused:
                group.enter(unused[0]).has_room = bool(number % 2)
        else:
            group.step(name, action, number)
    group.now_s += SILENT_S + 1
    group.finish(rng, 40 + 8 * sum(sizes))
    group.check_ended()
    for name in list(group.directory.members):
        group.directory.leave(name)
    assert not group.directory._shards
    assert not group.directory._members


@pytest.mark.e2e
@pytest.mark.parametrize("length", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_all_interleavings_of_two_caches_end_with_all_samples_once(length: int) -> None:
    steps = [("a", "sync"), ("b", "sync"), ("a", "make"), ("b", "make"), ("b", "ask"), ("b", "arrive")]
    for chosen in itertools.product(steps, repeat=length):
        group = GroupModel(Units((2, 1, 1)), ("a", "b"))
        group.sync("a")
        group.members["a"].make(1)
        for name, action in chosen:
            group.step(name, action, 1)
        group.finish(Random(0), 30)
        group.check_ended()
        made = Counter(one for member in group.members.values() for one in set(member.made))
        assert max(made.values()) == 1, chosen


def test_a_shard_that_cannot_be_copied_is_made_again() -> None:
    group = GroupModel(Units((1, 1)), ("a", "b"))
    while not group.members["a"].is_done:
        group.sync("a")
        group.members["a"].make(1)
    group.sync("a")
    b = group.members["b"]
    group.sync("b")
    assert len(b.copies) == 2
    b.refused = {b.copies[0].content}
    group.sync("b")
    assert len(b.copies) == 1
    group.finish(Random(0), 10)
    group.check_ended()
    assert len(b.made) == 1
    assert not group.directory._members["a"].refused
    group.members["a"].evict(0)
    group.members["a"].evict(0)
    group.sync("a")
    assert not group.directory._members["b"].refused  # what no cache holds any more needs no note


def test_a_block_that_takes_long_is_given_to_another_cache_too() -> None:
    group = GroupModel(Units((1, 1)), ("a", "b"))
    group.sync("a")
    assert group.members["a"].making == {0, 1}
    group.sync("b")
    assert not group.members["b"].making
    for _ in range(4):
        group.now_s += 5.0
        group.sync("a")
        group.sync("b")
    assert group.members["b"].making == {0, 1}
    group.finish(Random(0), 10)
    group.check_ended()


def test_the_blocks_of_a_cache_that_falls_silent_go_to_the_others() -> None:
    group = GroupModel(Units((1,) * 8), ("a", "b"))
    group.sync("a")
    group.sync("b")
    group.members["a"].make(1)
    group.now_s += SILENT_S + 1
    b = group.members["b"]
    for _ in range(20):
        group.now_s += 0.5
        group.sync("b")
        b.make(8)
    assert b.is_done
    assert group.directory.members == ["b"]
    group.sync("a")  # it is told to join again
    assert group.members["a"].joins
    group.finish(Random(0), 20)
    group.check_ended()


def test_a_directory_that_was_lost_gives_nothing_until_the_others_have_joined() -> None:
    group = GroupModel(Units((1,) * 64), ("a", "b"))
    for name in ("a", "b"):
        group.sync(name)
    making = {name: set(member.making) for name, member in group.members.items()}
    group.directory = GroupDirectory()
    for name in ("a", "a", "b", "b"):
        group.sync(name)
    assert {name: member.making for name, member in group.members.items()} == making
    group.finish(Random(0), 100)
    assert max(Counter(one for member in group.members.values() for one in member.made).values()) == 1


def test_a_pass_that_no_cache_is_in_is_forgotten() -> None:
    group = GroupModel(Units((1, 1, 1)), ("a",))
    group.finish(Random(0), 10)
    for ordinal in range(1, 5):
        group.plan = plan_of(3, ordinal)
        member = group.members["a"]
        member.plan, member.undecided = group.plan, {0, 1, 2}
        member.held.clear()
        group.finish(Random(0), 10)
        group.sync("a")
    assert set(group.directory._passes) == {plan_of(3, 4)}


def test_the_highest_ordinal_is_told_to_all() -> None:
    group = GroupModel(Units((1, 1)), ("a",))
    group.enter("b", plan_of(2, ordinal=3))
    answers = [group.directory.sync(name, group.members[name].report(), 1.0) for name in ("b", "a")]
    assert [answer.ordinal for answer in answers] == [3, 3]


@pytest.mark.e2e
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, blocks, st.randoms(use_true_random=False))
def test_a_cache_copies_all_from_two_that_have_made_all_alone(
    most_blocks: pytest.MonkeyPatch, sizes: tuple[int, ...], blocks: int, rng: Random
) -> None:
    most_blocks.setattr(directory, "MOST_BLOCKS", blocks)
    group = GroupModel(Units(sizes), ("a", "b"))
    for member in group.members.values():
        member.making, member.undecided = set(member.undecided), set()
        while member.making:
            member.make(rng.randint(1, 9))
        group.sync(member.name)
    late = group.enter("late")
    group.finish(rng, 40 + 4 * sum(sizes))
    assert not late.made


@pytest.mark.e2e
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, blocks, st.integers(1, 3), st.sets(st.integers(0, 8)), st.randoms(use_true_random=False))
def test_a_cache_that_joins_a_later_pass_makes_nothing_that_the_others_hold(
    most_blocks: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    blocks: int,
    count: int,
    numbers: set[int],
    rng: Random,
) -> None:
    most_blocks.setattr(directory, "MOST_BLOCKS", blocks)
    group = GroupModel(Units(sizes), NAMES[:count])
    first = group.members["a"]
    for number in numbers:
        first.make_earlier(number)
    for shard in first.shards.values():  # the others have copied what the first one made
        for member in list(group.members.values())[1:]:
            member.arriving.append(shard)
            member.arrive(0)
    for _ in range(1 + rng.randrange(20)):
        group.round(rng, 0.2)
    held = {position for position, _ in first.held}
    late = group.enter("late")
    late.has_room = True
    group.finish(rng, 40 + 4 * sum(sizes))
    group.check_ended()
    assert not held & set(late.made)


@pytest.mark.e2e
def test_an_answer_names_few_copies_of_many() -> None:
    length = 500
    group = GroupModel(Units((1,) * length), ("a", "b"))
    while not group.members["a"].is_done:
        group.sync("a")
        group.members["a"].make(1)
    group.sync("b")
    assert len(group.members["b"].copies) == 16


samples_of_span = st.tuples(st.integers(0, 6), st.integers(0, 3))


@st.composite
def disjoint_spans(draw: st.DrawFn) -> list[Span]:
    """Spans in ascending order, of units of three samples; some touch."""
    points = sorted(draw(st.sets(samples_of_span, max_size=10)))
    pairs = [Span(a, b) for a, b in itertools.pairwise(points)]
    return [span for span in pairs if draw(st.booleans())]


UNITS = Units((3,) * 7)


@pytest.mark.e2e
@given(disjoint_spans(), st.integers(0, 7), st.integers(0, 7))
def test_covers_agrees_with_sets(spans: list[Span], start: int, stop: int) -> None:
    wanted = {(position, offset) for position in range(start, stop) for offset in range(4)}
    assert covers(spans, start, stop) == (wanted <= UNITS.samples(spans))


@pytest.mark.e2e
@given(disjoint_spans(), disjoint_spans())
def test_overlap_agrees_with_sets(spans: list[Span], others: list[Span]) -> None:
    common = UNITS.samples(spans) & UNITS.samples(others)
    assert overlap(spans, others) == bool(common)


def test_the_model_tells_a_sample_that_is_held_twice() -> None:
    member = MemberModel("a", Units((1, 1)), plan_of(2), set())
    member.publish((Span((0, 0), (2, 0)),), "a")
    with pytest.raises(AssertionError, match="held twice"):
        member.publish((Span((1, 0), (2, 0)),), "b")
