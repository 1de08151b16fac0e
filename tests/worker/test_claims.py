"""Claims: runs of positions are handed out once, and are taken over from dead processes only, until the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream import Cache
from cachestream.storage.filling import Assignment
from cachestream.storage.publish import Publisher, UnitProgress
from cachestream.storage.reservations import Owner
from cachestream.worker.order import PassPlan
from cachestream.worker.passes import MOST_POSITIONS, block_size, next_claim


@given(st.integers(1, 10**12), st.integers(1, 128))
def test_claims_are_small_enough_that_all_processes_have_work(length: int, processes: int) -> None:
    size = block_size(length, processes)
    assert 1 <= size <= MOST_POSITIONS
    assert size == 1 or size * processes * 16 <= length


def test_an_endless_pass_has_claims_of_one_size() -> None:
    assert block_size(None, 1) == block_size(None, 128) > 0


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", size_limit="10MB", min_free=0) as cache:
        yield cache


def begin_pass(cache: Cache, length: int | None, ordinal: int = 0) -> int:
    plan = PassPlan("shuffle", 0, ordinal, length, "", length)
    with cache.catalogue.transaction() as tables:
        return tables.insert_pass(plan.to_json(), length, 0)


@contextmanager
def owner(cache: Cache, name: str) -> Iterator[str]:
    held = Owner(cache.directory, name)
    try:
        yield name
    finally:
        held.release()


def claim(cache: Cache, name: str) -> Assignment | None:
    return next_claim(cache.filling, name, 2)


def commit(cache: Cache, name: str, *claims: tuple[int, int, int]) -> None:
    Publisher(cache.directory, cache.catalogue, cache.reservations, name).commit(UnitProgress(1, claims))


def test_all_positions_are_handed_out_once_and_then_no_more(cache: Cache) -> None:
    begin_pass(cache, 1000)
    found: list[int] = []
    with owner(cache, "a"), owner(cache, "b"):
        names = ["a", "b"]
        while (assignment := claim(cache, names[len(found) % 2])) is not None:
            found += range(assignment.claim.position, assignment.claim.stop)
    assert found == list(range(1000))


def test_without_a_pass_there_is_nothing_to_claim(cache: Cache) -> None:
    with owner(cache, "a"):
        assert claim(cache, "a") is None


def test_a_dead_process_s_claim_is_taken_over_from_where_its_progress_ended(cache: Cache) -> None:
    begin_pass(cache, 1000)
    with owner(cache, "dead"):
        first = claim(cache, "dead")
        assert first is not None
        commit(cache, "dead", (first.claim.id, first.claim.position + 3, 2))
    with owner(cache, "heir"):
        again = claim(cache, "heir")
        assert again is not None
        assert again.claim.id == first.claim.id
        assert (again.claim.position, again.claim.offset) == (first.claim.position + 3, 2)
        assert again.claim.stop == first.claim.stop
        other = claim(cache, "heir")
        assert other is not None
        assert other.claim.position == first.claim.stop, "one's own claim is not taken twice"


def test_a_living_process_s_claim_is_left_alone(cache: Cache) -> None:
    begin_pass(cache, 1)
    with owner(cache, "alive"), owner(cache, "other"):
        assert claim(cache, "alive") is not None
        assert claim(cache, "other") is None


def test_a_finished_claim_is_gone(cache: Cache) -> None:
    begin_pass(cache, 10)
    with owner(cache, "a"):
        while (assignment := claim(cache, "a")) is not None:
            commit(cache, "a", (assignment.claim.id, assignment.claim.stop, 0))
    with cache.catalogue.reading() as tables:
        assert tables.claims(1) == []
    with owner(cache, "b"):
        assert claim(cache, "b") is None


def test_suspects_come_with_the_claim_that_holds_them(cache: Cache) -> None:
    pass_id = begin_pass(cache, 1000)
    with owner(cache, "a"):
        first = claim(cache, "a")
        assert first is not None
        with cache.catalogue.transaction() as tables:
            for position in (first.claim.stop - 1, first.claim.stop, first.claim.stop):
                tables.add_suspect(pass_id, position, 4, "hung")
        second = claim(cache, "a")
    assert second is not None
    assert [(s.position, s.deaths, s.reason) for s in second.suspects] == [(first.claim.stop, 8, "hung")]


def test_only_the_last_pass_is_worked_on(cache: Cache) -> None:
    begin_pass(cache, 10, 0)
    last = begin_pass(cache, 10, 1)
    with owner(cache, "a"):
        assignment = claim(cache, "a")
    assert assignment is not None
    assert assignment.row.id == last
