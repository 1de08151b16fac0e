"""The claims of a cache that shares its filling, on a real catalogue."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachestream.schema import Span
from cachestream.storage.cache import Cache
from cachestream.storage.filling import OFFERED, SHARED, Assignment, PlannedPass, is_open
from cachestream.storage.publish import Publisher, UnitProgress
from cachestream.storage.reservations import Owner
from tests.storage.support import content, new_cache, publish, shard_ids

LENGTH = 30
numbers = itertools.count()
ranges = st.lists(
    st.tuples(st.integers(-2, LENGTH + 2), st.integers(0, LENGTH)).map(lambda one: (one[0], one[0] + one[1])),
    max_size=4,
)
decisions = st.lists(st.tuples(ranges, ranges, st.sampled_from(["", "claim", "share"])), max_size=6)


def begin(cache: Cache, length: int = LENGTH) -> int:
    cache.filling.begin_pass(PlannedPass("plan 0", length, is_listing=False), ())
    cache.filling.share()
    shared = cache.filling.shared_pass()
    assert shared is not None
    assert shared.undecided == ((0, length),)
    return shared.row.id


def positions(parts: tuple[tuple[int, int], ...]) -> set[int]:
    found = [position for part in parts for position in range(*part)]
    assert len(found) == len(set(found)), "a position is in two claims"
    return set(found)


@pytest.mark.e2e
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(decisions)
def test_each_position_is_undecided_offered_claimed_or_done(
    fast_path: Path, steps: list[tuple[list[tuple[int, int]], list[tuple[int, int]], str]]
) -> None:
    with (
        new_cache(fast_path / f"cache-{next(numbers)}") as cache,
        Owner(cache.directory, SHARED),
        Owner(cache.directory, "sampler") as sampler,
    ):
        pass_id = begin(cache)
        undecided, offered, done = set(range(LENGTH)), set[int](), set[int]()
        claimed = set[int]()
        for make, left_out, then in steps:
            cache.filling.decide(pass_id, make=make, done=left_out)
            for wanted, found in ((make, offered), (left_out, done)):
                chosen = undecided & {position for part in wanted for position in range(*part)}
                found.update(chosen)
                undecided -= chosen
            if then == "share":
                cache.filling.share()
                undecided |= offered
                offered.clear()
            elif then == "claim":
                seen = cache.filling.open_pass()
                assert seen is not None
                assignment = cache.filling.claim(sampler.name, seen, None, lambda _: 5)
                assert isinstance(assignment, Assignment) == bool(offered)
                if isinstance(assignment, Assignment):
                    taken = set(range(assignment.claim.position, assignment.claim.stop))
                    assert taken <= offered
                    offered -= taken
                    claimed |= taken
            shared = cache.filling.shared_pass()
            assert shared is not None
            assert positions(shared.undecided) == undecided
            assert positions(shared.making) == offered | claimed
            assert len(done) == LENGTH - len(undecided | offered | claimed)


@pytest.mark.parametrize("part", [(0, 5), (2, 8), (3, 4), (0, LENGTH)])
def test_a_decision_keeps_the_offset_of_a_unit_that_is_done_in_part(
    make_cache: Callable[..., Cache], part: tuple[int, int]
) -> None:
    cache = make_cache()
    pass_id = begin(cache)
    with cache.catalogue.transaction() as tables:
        ((claim, _),) = tables.claims(pass_id)
        tables.move_claim(claim.id, 2, 7)
    cache.filling.decide(pass_id, make=[part], done=[])
    with cache.catalogue.reading() as tables:
        claims = [
            (claim.position, claim.stop, claim.offset, owner) for claim, owner in tables.claims(pass_id)
        ]
    assert [one[2] for one in sorted(claims)] == [7] + [0] * (len(claims) - 1)
    assert [one[1] - one[0] for one in claims if one[3] == OFFERED] == [part[1] - max(2, part[0])]
    assert sum(stop - start for start, stop, _, _ in claims) == LENGTH - 2


def test_a_shared_claim_is_taken_by_no_process_while_the_supervisor_lives(cache: Cache) -> None:
    begin(cache)
    with Owner(cache.directory, "sampler") as sampler:
        with Owner(cache.directory, SHARED):
            seen = cache.filling.open_pass()
            assert seen is not None
            assert seen.is_shared
            assert cache.filling.claim(sampler.name, seen, None, lambda _: 5) == seen.row
        seen = cache.filling.open_pass()  # a worker without a group goes on with all of it
        assert seen is not None
        assert not seen.is_shared
        assert isinstance(cache.filling.claim(sampler.name, seen, None, lambda _: 5), Assignment)


def test_only_a_pass_of_which_nothing_is_done_follows_the_group(cache: Cache) -> None:
    pass_id = begin(cache)
    shared = cache.filling.shared_pass()
    assert shared is not None
    assert cache.filling.follow_group(shared.row, "plan 1")
    shared = cache.filling.shared_pass()
    assert shared is not None
    assert (shared.row.id, shared.row.plan, shared.undecided) == (pass_id, "plan 1", ((0, LENGTH),))
    cache.filling.decide(pass_id, make=[(0, 2)], done=[])
    assert not cache.filling.follow_group(shared.row, "plan 2")
    shared = cache.filling.shared_pass()
    assert shared is not None
    assert shared.row.plan == "plan 1"


def test_a_copy_is_published_only_where_nothing_is_made_or_held(cache: Cache) -> None:
    pass_id = begin(cache)

    def copy(start: tuple[int, int], stop: tuple[int, int]) -> bool:
        spans = [Span(start, stop)]
        with cache.catalogue.reading() as tables:
            (current,) = tables.passes()
            positions = np.arange(start[0], stop[0] + (stop[1] > 0))
            return is_open(tables, pass_id, spans, current, positions)

    publish(cache, content(10), spans=[Span((4, 1), (6, 2))], progress=UnitProgress(pass_id))
    cache.filling.decide(pass_id, make=[(10, 12)], done=[(20, 21)])
    cache.filling.decide(pass_id, make=[(12, 14)], done=[])
    assert copy((0, 0), (4, 1))  # up to the samples that are held
    assert not copy((0, 0), (4, 2))
    assert not copy((5, 0), (5, 1))
    assert not copy((6, 1), (7, 0))
    assert copy((6, 2), (10, 0))
    assert not copy((9, 0), (10, 1))
    assert not copy((13, 0), (15, 0))
    assert copy((14, 0), (20, 0))  # in one claim
    assert copy((20, 0), (21, 0))  # done without samples here: another cache has lost its replica
    assert copy((19, 0), (22, 0))
    assert copy((21, 0), (30, 0))
    assert not copy((29, 0), (30, 1))


def test_a_copy_of_an_earlier_pass_is_published_only_if_its_units_are_neither_made_nor_held(
    cache: Cache,
) -> None:
    pass_id = begin(cache)
    publish(cache, content(10), spans=[Span((4, 1), (6, 2))], progress=UnitProgress(pass_id))
    cache.filling.decide(pass_id, make=[(10, 12)], done=[(20, 21)])
    earlier = cache.filling.enter_earlier_pass("source", "plan before", LENGTH)
    assert earlier != pass_id

    def is_open_at(*positions: int) -> bool:
        with cache.catalogue.reading() as tables:
            spans, current = [Span((4, 0), (7, 0))], tables.passes()[-1]
            assert current.id == pass_id
            return is_open(tables, earlier, spans, current, np.array(positions, np.int64))

    closed = {4, 5, 6, 10, 11, LENGTH}
    assert {position for position in range(LENGTH + 1) if not is_open_at(position)} == closed
    assert is_open_at(29, 0, 7)
    assert not is_open_at(29, 11, 7)
    assert is_open_at()
    assert cache.filling.being_made(np.array([0, 10, 12, 11, LENGTH])).tolist() == [
        False,
        True,
        False,
        True,
        True,
    ]
    publish(cache, content(10), spans=[Span((6, 0), (6, 1))], progress=UnitProgress(earlier))
    assert not is_open_at(0)


def test_a_shard_that_is_refused_leaves_nothing(cache: Cache) -> None:
    pass_id = begin(cache)
    with Owner(cache.directory, "copy") as owner:
        publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, owner.name)
        shard = content(10)
        reserved = cache.reservations.reserve(100_000, owner.name)
        assert reserved is not None
        progress = UnitProgress(pass_id)
        assert publisher.publish([shard], [], progress, reserved=[reserved], only_if=lambda _: False) is None
        with cache.catalogue.reading() as tables:
            assert tables.unfinished() == []
    assert shard_ids(cache) == []
    assert cache.verify().ok
