"""The units that a real worker reads, and their order: samplers, curricula, shares of nodes, passes."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler

import cachestream as cs
from cachestream import Cache
from cachestream.errors import ConfigError
from cachestream.worker.order import Partition
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, fill, keys_in_order, keys_of, only_once, wait_until


def units_in_order(cache: Cache) -> list[int]:
    """The cached units in order of arrival."""
    return [int(key.partition("/")[0]) for key in keys_in_order(cache)]


def test_one_process_caches_a_sequential_pass_in_order(cache: Cache) -> None:
    fill(cache, Numbers(200), order="sequential")
    assert units_in_order(cache) == list(range(200))


@pytest.mark.e2e
def test_the_shuffled_order_is_that_of_the_seed(cache: Cache, tmp_path: Path) -> None:
    fill(cache, Numbers(200), seed=5)
    with Cache(tmp_path / "again", size_limit="20MB", min_free=0) as again:
        fill(again, Numbers(200), seed=5)
        assert units_in_order(cache) == units_in_order(again)
    assert list(range(200)) != units_in_order(cache)
    assert sorted(units_in_order(cache)) == list(range(200))


def test_weights_say_how_often_units_are_drawn(cache: Cache) -> None:
    weights = np.array([0.0, 1.0, 3.0] * 100)
    fill(cache, Numbers(300), order=weights)
    drawn = Counter(unit % 3 for unit in units_in_order(cache))
    assert sum(drawn.values()) == 300
    assert drawn[0] == 0
    assert drawn[2] > 1.5 * drawn[1]


@pytest.mark.e2e
def test_a_torch_sampler_may_repeat_units(cache: Cache) -> None:
    fill(cache, Numbers(100), order=WeightedRandomSampler([1.0] * 50 + [0.0] * 50, 200))
    units = units_in_order(cache)
    assert len(units) == 200
    assert max(units) < 50


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


@pytest.mark.parametrize(
    "order",
    ["shuffle", *(pytest.param(order, marks=pytest.mark.slow) for order in ("sampler", "curriculum"))],
)
def test_the_caches_of_all_nodes_hold_every_sample_once(order: str, tmp_path: Path) -> None:
    source = Numbers(100, 2)
    orders: dict[str, Any] = {
        "sampler": SequentialSampler(range(100)),
        "curriculum": lambda _: np.arange(100),
    }
    together: Counter[str] = Counter()
    with ExitStack() as stack:
        caches = [
            stack.enter_context(Cache(tmp_path / str(node), size_limit="20MB", min_free=0))
            for node in range(3)
        ]
        workers = [
            stack.enter_context(
                cs.start_worker(
                    cache,
                    source,
                    num_workers=1,
                    order=orders.get(order, order),
                    seed=node,
                    partition=(node, 3),
                )
            )
            for node, cache in enumerate(caches)
        ]
        for worker, cache in zip(workers, caches, strict=True):
            assert worker.wait(DEADLINE_S)
            assert 60 <= cache.num_samples <= 68
            assert worker.status().num_units == cache.num_samples // 2
            together.update(keys_of(cache))
    assert together == Counter(source.keys())


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


def test_a_process_with_another_partition_cannot_attach(cache: Cache) -> None:
    source = Numbers(1000, pause_s=0.01)
    with cs.start_worker(cache, source, num_workers=1, partition=(0, 2)):
        with pytest.raises(ConfigError, match="with the share 0/2, not 1/2; give all processes"):
            cs.start_worker(cache, source, num_workers=1, partition=(1, 2))
        with pytest.raises(ConfigError, match="not all units"):
            cs.start_worker(cache, source, num_workers=1)
        with cs.start_worker(cache, source, num_workers=1, partition="0/2") as second:
            assert second.attached


def test_a_node_without_a_unit_is_refused(cache: Cache) -> None:
    without = [node for node in range(8) if not Partition(node, 8).length(3)]
    assert len(without) == 5
    for node in without:
        with pytest.raises(ConfigError, match=f"partition={node}/8: the source has 3 units, too few"):
            cs.start_worker(cache, Numbers(3), num_workers=1, partition=(node, 8))


def test_a_curriculum_brings_the_easy_units_first_and_all_of_them_once(cache: Cache) -> None:
    difficulty = np.arange(200) % 10
    fill(cache, Numbers(200), order=lambda progress: difficulty <= 10 * progress + 1)
    units = units_in_order(cache)
    assert sorted(units) == list(range(200))
    assert (difficulty[units] <= np.arange(200) / 20 + 1).all()
    assert units != sorted(units, key=lambda unit: int(difficulty[unit]))


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
