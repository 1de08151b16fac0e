"""The schema of an empty cache: most of the first samples decide it, and not the very first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream import Cache
from cachestream.sources.base import Rows
from cachestream.worker.sampling.encode import to_record, to_table
from cachestream.worker.sampling.packer import (
    ALIKE,
    ALIKE_S,
    MIXED,
    MIXED_S,
    Election,
    FirstSamples,
    Votes,
    counted,
    majority,
)
from tests.worker.sources import Mixed, Numbers, Scores
from tests.worker.support import DEADLINE_S, failures_of, fill, only_once

MUCH = 10**9


def held(*samples: Any) -> FirstSamples:
    """Samples that a process holds back since 10 s."""
    first = FirstSamples()
    for number, sample in enumerate(samples):
        first.add(to_record(sample, str(number)), 10.0)
    return first


def names(votes: Votes) -> list[tuple[str, int]]:
    return [(str(schema), count) for schema, count in votes]


def elected(*processes: FirstSamples, after_s: float = 0.0) -> str | None:
    """What is decided `after_s` the first votes, by those of all `processes`."""
    election = Election()
    for number, first in enumerate(processes):
        election.vote(number, first.votes, 10.0 + number * 0.001)
    winner = election.winner(10.0 + after_s)
    return None if winner is None else str(winner)


def test_a_process_tells_of_its_samples_soon_and_again_only_if_there_are_others() -> None:
    assert not held().is_due(99.0, MUCH)
    assert not held(1).is_due(10.0, MUCH)
    assert held(1).is_due(10.0 + ALIKE_S, MUCH)
    assert held(*range(ALIKE)).is_due(10.0, MUCH)
    assert held(1, 2).is_due(10.0, 16), "more bytes than a shard takes"
    first = held(*range(ALIKE))
    first.told = first.votes
    assert not first.is_due(99.0, MUCH)
    first.add(to_record("text", "another"), 11.0)
    assert first.is_due(11.0, MUCH)


def test_where_all_are_alike_the_first_votes_decide() -> None:
    assert elected() is None
    assert elected(after_s=99.0) is None
    assert elected(held()) is None
    assert elected(held(1)) == "{0: int64[]}"
    assert elected(held(1, 2), held(4)) == "{0: int64[]}"
    assert elected(held(1, 2), held(4.5)) == "{0: float64[]}", "all are floats"


def test_mixed_samples_wait_for_more_but_not_for_long() -> None:
    mixed = held("text", *range(ALIKE))
    assert elected(mixed) is None
    assert elected(held(*range(ALIKE)), held("text")) is None
    assert elected(mixed, after_s=MIXED_S) == "{0: int64[]}"
    assert elected(mixed, held(*["text"] * MIXED)) == "{0: str}"


def test_later_votes_of_a_process_take_the_place_of_its_earlier_ones() -> None:
    election = Election()
    election.vote(0, held("text", 1).votes, 10.0)
    election.vote(0, held("text", 1, 2).votes, 10.0 + MIXED_S - 0.1)
    assert election.winner(10.0 + MIXED_S - 0.1) is None
    assert str(election.winner(10.0 + MIXED_S)) == "{0: int64[]}", "since the first ones"


@given(
    st.lists(st.lists(st.sampled_from([1, 2.5, "text", b"x"]), max_size=12), max_size=4),
    st.floats(0, 2 * MIXED_S),
)
def test_whoever_wins_has_most_of_the_votes_and_nobody_waits_for_ever(
    processes: list[list[Any]], after_s: float
) -> None:
    kinds = [
        "text" if one == "text" else "bytes" if one == b"x" else "number" for own in processes for one in own
    ]
    winner = elected(*(held(*own) for own in processes), after_s=after_s)
    is_decided = bool(kinds) and (len(set(kinds)) == 1 or len(kinds) >= MIXED or after_s >= MIXED_S)
    assert (winner is not None) == is_decided
    if winner is not None:
        kind = "text" if "str" in winner else "bytes" if "bytes" in winner else "number"
        assert kinds.count(kind) == max(map(kinds.count, kinds))


def test_most_decide_and_of_as_many_those_that_came_first() -> None:
    assert majority([]) is None
    assert names(held("text", 1, 2.5, "text", 3).votes) == [("{0: str}", 2), ("{0: float64[]}", 3)]
    assert str(majority(held("text", 1, 2.5, "text", 3).votes)) == "{0: float64[]}"
    assert str(majority(held("text", 1, 2, "text").votes)) == "{0: str}"
    both = counted(held("text", 1).votes, held(2, 3).votes)
    assert names(both) == [("{0: str}", 1), ("{0: int64[]}", 3)]
    rows = FirstSamples()
    rows.add(to_record({"x": "text"}, "a"), 0.0)
    rows.add(to_table(Rows(["b", "c"], {"x": np.zeros((2, 3), np.int32)})), 0.0)
    rows.add(to_table(Rows(["d"], {"x": np.zeros((1, 4), np.int32)})), 0.0)
    assert names(rows.votes) == [("{x: str}", 1), ("{x: int32[?]}", 3)]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("num_workers", "order", "transform"),
    [(1, "sequential", None), (1, "shuffle", dict), (3, "sequential", None)],
)
def test_the_minority_is_left_out_and_counted_whichever_comes_first(
    cache: Cache, num_workers: int, order: str, transform: Any
) -> None:
    source = Mixed(90)
    fill(cache, source, num_workers=num_workers, order=order, transform=transform)
    assert only_once(cache) == {key for key in sorted(source.keys()) if int(key.partition("/")[0]) % 3}
    assert failures_of(cache) == {"schema": 30}


@pytest.mark.e2e
@pytest.mark.parametrize("in_rows", [False, True])
def test_integers_beside_floats_are_stored_as_floats(tmp_path: Path, in_rows: bool) -> None:
    with Cache(tmp_path / "scores", size_limit="50MB", min_free=0) as cache:
        fill(cache, Scores(40), num_workers=2, transform=None if in_rows else dict)
        assert failures_of(cache) == {}
        with cs.EpochLoader(cache, 40) as loader:
            scores = next(iter(loader))["score"]
            assert str(scores.dtype) == "torch.float64"
            assert sorted(scores.tolist()) == [unit + unit % 2 / 2 for unit in range(40)]


@pytest.mark.e2e
def test_lists_of_integers_stay_integers_beside_empty_ones(tmp_path: Path) -> None:
    lists = [[], [1, 2], [3], [], *([unit] for unit in range(4, 40))]
    with Cache(tmp_path / "lists", size_limit="50MB", min_free=0) as cache:
        fill(cache, cs.DatasetSource([{"x": np.array(values)} for values in lists]), num_workers=2)
        assert failures_of(cache) == {}
        with cache.snapshot() as dataset:
            found = [dataset[i]["x"] for i in range(len(dataset))]
        assert {str(values.dtype) for values in found} == {"torch.int64"}
        assert sorted(values.tolist() for values in found) == sorted(lists)


@pytest.mark.e2e
def test_a_few_samples_of_a_slow_remote_are_not_held_back_for_long(cache: Cache) -> None:
    with cs.start_worker(cache, Numbers(None, pause_s=2.0), num_workers=1, order="sequential"):
        cache.wait(1, DEADLINE_S)
        assert cache.num_samples < ALIKE
