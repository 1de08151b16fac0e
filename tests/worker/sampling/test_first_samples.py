"""The schema of an empty cache: most of the first samples decide it, and not the very first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.sources.base import Rows
from cachestream.worker.sampling.encode import to_record, to_table
from cachestream.worker.sampling.packer import ALIKE, ALIKE_S, MIXED, MIXED_S, FirstSamples, majority
from tests.worker.sources import Mixed, Numbers, Scores
from tests.worker.support import DEADLINE_S, failures_of, fill, only_once

MUCH = 10**9


def held(*samples: Any, others: Any = None) -> FirstSamples:
    first = FirstSamples(others=others)
    for number, sample in enumerate(samples):
        first.add(to_record(sample, str(number)), 10.0)
    return first


def names(first: FirstSamples) -> list[tuple[str, int]]:
    return [(str(schema), count) for schema, count in first.all_votes]


def test_the_other_processes_are_asked_soon_and_where_all_are_alike_these_decide() -> None:
    assert held().due_in_s(10.0, MUCH) == 0.0
    assert held(1).due_in_s(10.0, MUCH) == ALIKE_S
    assert held(1).due_in_s(10.0 + ALIKE_S, MUCH) == 0.0
    assert held(*range(ALIKE)).due_in_s(10.0, MUCH) == 0.0
    assert held(1, 2, others=held(4).votes).due_in_s(10.0, MUCH) == 0.0
    assert held(1, 2, others=held(4.5).votes).due_in_s(10.0, MUCH) == 0.0, "all are floats"


def test_mixed_samples_wait_for_more_but_not_for_long() -> None:
    assert held(*range(ALIKE), others=held("text").votes).due_in_s(10.0, MUCH) == MIXED_S
    mixed = ["text", *range(ALIKE)]
    assert held(*mixed, others=[]).due_in_s(10.0, MUCH) == MIXED_S
    assert held(*mixed, others=[]).due_in_s(10.0 + MIXED_S, MUCH) == 0.0
    assert held(*mixed, others=held(*range(MIXED)).votes).due_in_s(10.0, MUCH) == 0.0
    assert held(*mixed, others=[]).due_in_s(10.0, 40) == 0.0, "more bytes than a shard takes"


def test_most_decide_and_of_as_many_those_that_came_first() -> None:
    assert majority([]) is None
    assert names(held("text", 1, 2.5, "text", 3)) == [("{0: str}", 2), ("{0: float64[]}", 3)]
    assert str(majority(held("text", 1, 2.5, "text", 3).votes)) == "{0: float64[]}"
    assert str(majority(held("text", 1, 2, "text").votes)) == "{0: str}"
    assert names(held("text", 1, others=held(2, 3).votes)) == [("{0: str}", 1), ("{0: int64[]}", 3)]
    rows = FirstSamples()
    rows.add(to_record({"x": "text"}, "a"), 0.0)
    rows.add(to_table(Rows(["b", "c"], {"x": np.zeros((2, 3), np.int32)})), 0.0)
    rows.add(to_table(Rows(["d"], {"x": np.zeros((1, 4), np.int32)})), 0.0)
    assert names(rows) == [("{x: str}", 1), ("{x: int32[?]}", 3)]


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
