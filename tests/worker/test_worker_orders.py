"""The units that a real worker reads, and the order in which they are cached."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import cachestream as cs
from cachestream import Cache
from cachestream.storage.shard import MappedShard, shard_path
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, keys_of, only_once, wait_until


def units_in_order(cache: Cache) -> list[int]:
    """The cached units in order of arrival."""
    found: list[int] = []
    with cache.catalogue.reading() as tables:
        ids = sorted(tables.shard_ids())
    for shard_id in ids:
        shard = MappedShard(shard_path(cache.path, shard_id))
        keys = shard.keys()
        found += [int(key.partition("/")[0]) for key in keys]
        shard.close()
    return found


def fill(cache: Cache, source: Numbers, **options: object) -> None:
    with cs.start_worker(cache, source, num_workers=1, **options) as worker:  # type: ignore[arg-type]
        assert worker.wait(DEADLINE_S)


def test_one_process_caches_a_sequential_pass_in_order(cache: Cache) -> None:
    fill(cache, Numbers(200), order="sequential")
    assert units_in_order(cache) == list(range(200))


def test_the_shuffled_order_is_that_of_the_seed(cache: Cache, tmp_path: Path) -> None:
    fill(cache, Numbers(200), seed=5)
    with Cache(tmp_path / "again", size_limit="20MB", min_free=0) as again:
        fill(again, Numbers(200), seed=5)
        assert units_in_order(cache) == units_in_order(again)
    with Cache(tmp_path / "other", size_limit="20MB", min_free=0) as other:
        fill(other, Numbers(200), seed=6)
        assert units_in_order(cache) != units_in_order(other)
    assert sorted(units_in_order(cache)) == list(range(200))


def test_weights_say_how_often_units_are_drawn(cache: Cache) -> None:
    weights = np.array([0.0, 1.0, 3.0] * 100)
    fill(cache, Numbers(300), order=weights)
    drawn = Counter(unit % 3 for unit in units_in_order(cache))
    assert sum(drawn.values()) == 300
    assert drawn[0] == 0
    assert drawn[2] > 1.5 * drawn[1]


def test_a_torch_sampler_over_units_is_followed(cache: Cache) -> None:
    fill(cache, Numbers(100), order=SubsetRandomSampler(range(10, 40)))
    assert sorted(units_in_order(cache)) == list(range(10, 40))


def test_a_torch_sampler_may_repeat_units(cache: Cache) -> None:
    fill(cache, Numbers(100), order=WeightedRandomSampler([1.0] * 50 + [0.0] * 50, 200))
    units = units_in_order(cache)
    assert len(units) == 200
    assert max(units) < 50


def test_a_sampler_s_pass_goes_on_after_a_stop_with_what_was_drawn(cache: Cache) -> None:
    source = Numbers(120, pause_s=0.01)
    for _ in range(2):
        worker = cs.start_worker(cache, source, num_workers=1, concurrency=2, order=RandomSampler(range(120)))
        cache.wait(cache.num_samples + 20, DEADLINE_S)
        worker.stop(DEADLINE_S)
    fill(cache, source, order=RandomSampler(range(120)))
    assert only_once(cache) == source.keys()


def test_each_pass_of_a_sampler_is_drawn_anew_and_leaves_no_files(cache: Cache) -> None:
    cache.size_limit = 2_000_000
    source = Numbers(300, nbytes=10_000)
    with (
        cs.start_worker(cache, source, num_workers=1, order=RandomSampler(range(300))) as worker,
        cs.EpochLoader(cache, batch_size=10, min_samples=10) as loader,
    ):
        # A full cache rests until epochs have used what it holds.
        wait_until(lambda: [*loader] and worker.status().pass_number >= 3, "a third pass")
    orders = [path for path in Path(cache.directory.worker).iterdir() if path.name.startswith("order-")]
    assert len(orders) == 1
    for path in orders:
        path.unlink()


def test_changing_the_order_begins_a_pass_that_skips_what_is_cached(cache: Cache, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    source = Numbers(200, pause_s=0.01, journal=str(journal))
    worker = cs.start_worker(cache, source, num_workers=1, order="shuffle")
    cache.wait(50, DEADLINE_S)
    worker.stop(DEADLINE_S)
    fill(cache, source, order="sequential")
    assert only_once(cache) == source.keys()
    assert len(journal.read_text().split()) < 300


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


def test_a_lost_catalogue_costs_no_sample_and_brings_none_twice(cache: Cache) -> None:
    source = Numbers(200, 3, pause_s=0.01)
    worker = cs.start_worker(cache, source, num_workers=2)
    cache.wait(100, DEADLINE_S)
    worker.stop(DEADLINE_S)
    kept = set(keys_of(cache))
    cache.close()
    Path(cache.directory.catalogue).unlink()
    with Cache(cache.path) as rebuilt:
        assert set(keys_of(rebuilt)) == kept
        fill(rebuilt, source)
        assert only_once(rebuilt) == source.keys()
