"""The units that a real worker reads, and their order: samplers, curricula, shares of nodes, passes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import RandomSampler

import cachestream as cs
from cachestream import Cache
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, fill, only_once, wait_until

STOP_S = 15.0


@pytest.mark.e2e
def test_a_sampler_s_pass_goes_on_after_a_stop_with_what_was_drawn(cache: Cache) -> None:
    source = Numbers(120, pause_s=0.03)
    for _ in range(2):
        worker = cs.start_worker(cache, source, num_workers=1, concurrency=2, order=RandomSampler(range(120)))
        cache.wait(cache.num_samples + 20, DEADLINE_S)
        worker.stop(DEADLINE_S)
    fill(cache, source, order=RandomSampler(range(120)))
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_each_pass_of_a_sampler_is_drawn_anew_and_leaves_no_files(cache: Cache) -> None:
    cache.size_limit = 2_000_000
    source = Numbers(300, nbytes=10_000)
    with (
        cs.start_worker(cache, source, num_workers=1, order=RandomSampler(range(300))) as worker,
        cs.EpochLoader(cache, batch_size=10, min_samples=10) as loader,
    ):
        # A full cache rests until epochs have used what it holds.
        wait_until(lambda: [*loader] and worker.status().pass_number >= 3, "a third pass")
    assert _forget_orders(cache) == 1


class SecondTimeBlocked:
    """A sampler that draws once, and the next time does not return."""

    def __init__(self, told: Path) -> None:
        self._told = told

    def __iter__(self) -> Iterator[int]:
        if self._told.exists():
            self._told.with_name("blocked").touch()
            time.sleep(600)
        self._told.touch()
        return iter(range(50))


@pytest.mark.e2e
def test_a_sampler_that_does_not_return_holds_up_no_stop(cache: Cache, tmp_path: Path) -> None:
    order = SecondTimeBlocked(tmp_path / "drawn")
    with cs.start_worker(cache, Numbers(50), num_workers=1, order=order) as worker:
        assert worker.wait(DEADLINE_S)
        cache.evict(to=0)
        wait_until((tmp_path / "blocked").exists, "the second pass is being drawn")
        begun_s = time.monotonic()
        worker.stop(2 * STOP_S)
    assert time.monotonic() - begun_s < STOP_S
    assert not worker.is_alive()


@pytest.mark.e2e
def test_changing_the_order_begins_a_pass_that_skips_what_is_cached(cache: Cache, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    source = Numbers(200, pause_s=0.01, journal=str(journal))
    worker = cs.start_worker(cache, source, num_workers=1, order="shuffle")
    cache.wait(50, DEADLINE_S)
    worker.stop(DEADLINE_S)
    fill(cache, source, order="sequential")
    assert only_once(cache) == source.keys()
    assert len(journal.read_text().split()) < 300


@pytest.mark.e2e
def test_a_catalogue_that_is_lost_in_mid_pass_costs_no_sample_and_brings_none_twice(cache: Cache) -> None:
    source = Numbers(400, pause_s=0.004)
    with cs.start_worker(cache, source, num_workers=2, concurrency=1) as worker:
        cache.wait(100, DEADLINE_S)
        Path(cache.directory.catalogue).unlink()
        assert worker.wait(DEADLINE_S)
        status = cache.status().worker
        assert status is not None
        assert status.restarts == 0, "to begin anew is no crash"
        assert only_once(cache) == source.keys()
        with cache.catalogue.reading() as tables:
            assert {row.length for row in tables.passes()} == {400}


@pytest.mark.e2e
def test_a_catalogue_that_is_lost_before_anything_is_cached_costs_no_sample(cache: Cache) -> None:
    source = Numbers(20, pause_s=0.2)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        wait_until(lambda: cache.status().pass_number, "a pass has begun")
        Path(cache.directory.catalogue).unlink()
        assert cache.num_samples == 0
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    assert cache.status().source == source.fingerprint


# The last samples of a fill may be published before their unit has said that it has no more: it is asked again.
ASKED_AGAIN = 1


@pytest.mark.e2e
def test_another_share_keeps_what_is_cached_and_fetches_the_rest(cache: Cache, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    source = Numbers(120, journal=str(journal))
    fill(cache, source, partition=(0, 2))
    assert len(only_once(cache)) == 60
    fill(cache, source, partition=(1, 3))
    fill(cache, source)
    assert only_once(cache) == source.keys()
    read = [int(unit) for unit in journal.read_text().split()]
    assert set(read) == set(range(120))
    assert len(read) <= 120 + 2 * ASKED_AGAIN


@pytest.mark.e2e
def test_a_curriculum_goes_on_after_a_stop_and_anew_with_another_function(
    cache: Cache, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    source = Numbers(200, pause_s=0.01, journal=str(journal))

    def rising(_: float) -> Any:
        return np.arange(200)

    def falling(_: float) -> Any:
        return 200 - np.arange(200)

    for _ in range(2):
        worker = cs.start_worker(cache, source, num_workers=1, concurrency=2, order=rising)
        cache.wait(cache.num_samples + 20, DEADLINE_S)
        assert worker.status().pass_number == 1
        worker.stop(DEADLINE_S)
    with cs.start_worker(cache, source, num_workers=1, concurrency=2, order=falling) as worker:
        assert worker.status().pass_number == 2
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    assert len(journal.read_text().split()) < 260
    _forget_orders(cache)


def _forget_orders(cache: Cache) -> int:
    """Remove the orders of passes whose units are cached: these stay for as long; returns their number."""
    orders = list(Path(cache.directory.worker).glob("order-*"))
    for path in orders:
        path.unlink()
    return len(orders)
