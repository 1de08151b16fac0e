"""The filling follows what loaders draw from the sources of a mix, and still takes every unit once a pass."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cachestream as cs
from cachestream import Cache
from cachestream.worker.job import Job
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.order import PassPlan, all_units, parse_partition
from cachestream.worker.passes import begin_or_resume, follow_mixture
from cachestream.worker.planner import Planner
from cachestream.worker.user_order import UserOrder, draw_mixture
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, keys_in_order, supervisor_pid, wait_until

MIX = {"a": (Numbers(150), 2), "b": (Numbers(50), 1), "c": (Numbers(90), 1)}
UNITS = cs.mix(MIX).num_units or 0
shares_of_three = st.lists(st.sampled_from([0.0, 0.1, 0.4, 1.0]), min_size=3, max_size=3).filter(any)


@given(st.lists(st.integers(0, 3), max_size=200), shares_of_three, st.integers(0, 2**32))
def test_any_run_of_units_has_the_shares_while_there_are_units(
    sources: list[int], shares: list[float], seed: int
) -> None:
    units, given_sources = np.arange(len(sources)) + 7, np.array(sources, np.int64)
    given_sources[given_sources == 3] = 0
    drawn = draw_mixture(units, given_sources, shares, seed=seed)
    assert sorted(drawn) == list(units)
    assert list(drawn) == list(draw_mixture(units, given_sources, shares, seed=seed))
    left, done = Counter(given_sources.tolist()), np.zeros(3)
    weights = np.array(shares) / sum(shares)
    for number, source in enumerate(given_sources[drawn - 7].tolist()):
        if not all(left[i] for i in range(3) if weights[i]):
            break  # a source has come to its end
        assert abs(done - number * weights).max() < 3
        assert weights[source]
        left[source] -= 1
        done[source] += 1


@pytest.mark.e2e
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.integers(1, 60) | shares_of_three, max_size=12), nodes=st.integers(1, 2))
def test_every_unit_is_handed_out_once_whatever_is_drawn_meanwhile(
    cache: Cache, steps: list[int | list[float]], nodes: int
) -> None:
    cache.clear()
    options = WorkerOptions(num_workers=2, partition=None if nodes == 1 else (1, nodes))
    job = options.job(cache, cs.mix(MIX))
    planner = begun(cache, job)
    taken: list[int] = []

    def take(most: int) -> bool:
        assignment = planner.take(len(taken) % 2, most)
        taken.extend(unit.number for unit in (assignment.units if assignment else ()))
        return assignment is not None

    for step in steps:
        if isinstance(step, int):
            take(step)
        else:
            follow_mixture(cache, job, planner, [share / sum(step) for share in step])
            last = cache.filling.state().last_pass
            assert last is not None
            assert planner.plan == PassPlan.from_json(last.plan), "it is recorded"
    while take(10):
        pass
    share = parse_partition(options.partition)
    assert sorted(taken) == list(all_units(UNITS, share))


def begun(cache: Cache, job: Job) -> Planner:
    begin_or_resume(cache, job, UserOrder(job))
    planner = Planner(job, cache, is_shared=False)
    planner.begin()
    return planner


def test_an_order_that_is_drawn_too_late_leaves_no_file(cache: Cache) -> None:
    job = WorkerOptions(num_workers=2).job(cache, cs.mix(MIX))
    planner = begun(cache, job)
    while planner.take(0, 100) is not None:
        pass
    follow_mixture(cache, job, planner, [0.0, 0.0, 1.0])
    assert not rule(cache)
    assert not [name for name in os.listdir(cache.directory.worker) if name.startswith("order-")]


def arrivals(cache: Cache) -> list[str]:
    """The sources of the cached samples in order of arrival."""
    return [key.partition("/")[0] for key in keys_in_order(cache)]


def rule(cache: Cache) -> str:
    """The rule of the pass: empty until the filling follows."""
    row = cache.filling.state().last_pass
    return "" if row is None else PassPlan.from_json(row.plan).rule


@pytest.mark.e2e
def test_a_worker_fetches_more_of_what_is_drawn_and_all_of_it_once_through_a_kill(cache: Cache) -> None:
    cache.size_limit = "4MB"  # to be raised: so the worker waits for the loader
    mixed = cs.mix({name: (Numbers(200, nbytes=20_000, name=name), 1) for name in "ab"})
    options: dict[str, Any] = {"num_workers": 1, "shard_size": "200KB", "concurrency": 1, "when_full": "wait"}
    with cs.start_worker(cache, mixed, **options):
        wait_until(lambda: cache.fill_state() == "full", "it is full")
        with cs.EpochLoader(cache, 20, mixture={"a": 1, "b": 9}) as loader:
            next(iter(loader))
        wait_until(lambda: rule(cache), "the rest is ordered anew")
        cache.size_limit = "7MB"
        wait_until(lambda: cache.fill_state() == "full", "it is full again")
        os.kill(supervisor_pid(cache), signal.SIGKILL)
    cache.size_limit = "50MB"
    with cs.start_worker(cache, mixed, **options) as worker:
        assert worker.wait(DEADLINE_S)
        assert cache.status().pass_number == 1
    found, start = arrivals(cache), int(rule(cache).partition(":")[0])
    assert Counter(found) == {"a": 200, "b": 200}
    assert start < 300
    assert abs(Counter(found[:start])["b"] - start / 2) < start / 10
    assert abs(Counter(found[start : start + 100])["b"] - 90) <= 2


@pytest.mark.e2e
def test_an_order_of_the_users_own_stays(cache: Cache) -> None:
    cache.size_limit = "4MB"
    mixed = cs.mix({name: (Numbers(200, nbytes=20_000, name=name), 1) for name in "ab"})
    with cs.start_worker(cache, mixed, num_workers=1, order="sequential", when_full="wait"):
        wait_until(lambda: cache.fill_state() == "full", "it is full")
        with cs.EpochLoader(cache, 20, mixture={"a": 1, "b": 9}) as loader:
            next(iter(loader))
        cache.size_limit = "50MB"
        wait_until(lambda: cache.fill_state() == "complete", "it is complete")
    assert "".join(arrivals(cache)) in ("ab" * 200, "ba" * 200)
