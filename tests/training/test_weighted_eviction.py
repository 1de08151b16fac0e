"""A cache that evicts by weight keeps what a loader weighs most, and turns over the rest."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs
from cachestream.storage.reservations import Owner
from cachestream.storage.snapshots import weigh_shards
from tests.support.caches import add_shard, numbered
from tests.training.test_turnover import BATCH, LIMIT_BYTES, REMOTE, SOURCE, train
from tests.worker.support import wait_until

HEAVY: Final = range(0, REMOTE, 40)  # in far fewer shards than the cache keeps
WEIGHTS: Final = {str(unit): 20.0 if unit in HEAVY else 1.0 for unit in range(REMOTE)}


def cached_units(cache: cs.Cache) -> set[int]:
    with cache.snapshot() as dataset:
        return {int(n) for n in dataset[range(len(dataset))]["n"]}


def share_kept(path: Path, eviction: str) -> float:
    """The share of the heavy samples that a cache holds once all of the remote came, and some of it again."""
    with cs.Cache(path, LIMIT_BYTES, min_free=0, eviction=eviction) as cache:
        with cs.start_worker(cache, SOURCE, num_workers=1, shard_size="16kB"):
            wait_until(lambda: cache.fill_state() == "full", "the cache is full")
            seen: set[int] = set()
            with cs.EpochLoader(
                cache, BATCH, weights=WEIGHTS, min_samples=BATCH, prefetch=1, turnover=0.06
            ) as loader:
                for _ in range(60):
                    train(cache, loader, seen)
                    if cache.status().evicted_samples + cache.num_samples > 1.1 * REMOTE:
                        break
                else:
                    pytest.fail("not all has come")
            assert cache.status().evicted_unused_samples == 0
        return len(cached_units(cache) & set(HEAVY)) / len(HEAVY)


@pytest.mark.e2e
def test_the_heaviest_of_a_larger_remote_stay_and_the_rest_turns_over(tmp_path: Path) -> None:
    assert share_kept(tmp_path / "by weight", "least-weight") > 0.9
    assert share_kept(tmp_path / "by use", "lru") < 0.7


def snapshot_ids(cache: cs.Cache, weights: dict[int, float]) -> list[int]:
    snapshot, lease = cache.take_snapshot()
    weigh_shards(cache, weights)
    lease.release()
    ids: list[int] = snapshot.shard_ids.tolist()
    return ids


def evicted(cache: cs.Cache) -> list[int]:
    """The ids of the shards, in the order in which they go."""
    gone: list[int] = []
    before = [row.id for row in rows(cache)]
    while before:
        cache.evict(to=cache.size_bytes - 1)
        left = [row.id for row in rows(cache)]
        gone += [shard_id for shard_id in before if shard_id not in left]
        before = left
    return gone


def rows(cache: cs.Cache) -> list[Any]:
    with cache.catalogue.reading() as tables:
        return list(tables.shards())


def small(path: Path, eviction: str = "least-weight") -> cs.Cache:
    cache = cs.Cache(path, "10MB", min_free=0, eviction=eviction)
    for shard in range(4):
        add_shard(cache, numbered(8 * shard, 8))
    return cache


@pytest.mark.e2e
def test_a_shard_weighs_as_much_as_its_samples_on_average_at_the_next_epoch(tmp_path: Path) -> None:
    with small(tmp_path / "cache") as cache:
        with cs.EpochLoader(cache, 8, weights=True, prefetch=1) as loader:
            for weights in ([4, 1, 3, 2], [2, 4, 1, 3]):
                for shard, weight in enumerate(weights):
                    keys = [f"k{n}" for n in range(8 * shard, 8 * shard + 8)]
                    loader.update_weights(keys, np.linspace(0, 2 * weight, 8))
                for epoch in (100, 200):  # ones that are not prepared yet
                    loader.set_epoch(loader.epoch + epoch)
                    assert len(list(loader)) == 4
                    add_shard(cache, [("light", numbered(99, 1)[0][1])])  # else a snapshot is used again
        assert [shard_id for shard_id in evicted(cache) if shard_id <= 4] == [3, 1, 4, 2]


def test_a_held_shard_stays_however_light_it_is(tmp_path: Path) -> None:
    with small(tmp_path / "cache") as cache:
        assert snapshot_ids(cache, {1: 0.0, 2: 5.0, 3: 1.0, 4: 2.0}) == [1, 2, 3, 4]
        lease = cache.reservations.hold(np.array([[1, 1]]))
        cache.evict(to=0)
        assert [row.id for row in rows(cache)] == [1]
        lease.release()


def test_a_new_shard_that_no_epoch_has_used_is_no_victim_of_a_heavier_one(tmp_path: Path) -> None:
    with small(tmp_path / "cache") as cache, Owner.temporary(cache.directory, "test") as owner:
        snapshot_ids(cache, {1: 1.0, 2: 5.0, 3: 1.0, 4: 2.0})
        new = add_shard(cache, numbered(32, 8))
        room = cache.reservations.room()
        shard = cache.reservations.reserve(room.free_bytes + 1, owner.name)
        assert shard is not None
        assert [row.id for row in rows(cache)] == [2, 3, 4, new]
        cache.reservations.cancel(shard, owner.name)


def test_a_cache_from_before_and_one_whose_catalogue_is_lost_evict_by_weight(tmp_path: Path) -> None:
    with small(tmp_path / "cache", "lru") as cache:
        snapshot_ids(cache, {1: 9.0})  # goes nowhere: nothing sorts by it
        cache.eviction = "least-weight"
        snapshot_ids(cache, {1: 9.0, 2: 1.0})
        assert [row.id for row in ordered(cache)] == [2, 3, 4, 1]
    os.unlink(tmp_path / "cache" / "catalogue.sqlite")
    with cs.Cache(tmp_path / "cache") as cache:
        assert cache.eviction == "least-weight"
        assert [row.id for row in ordered(cache)] == [1, 2, 3, 4], "weights are lost with it, and come again"
        snapshot_ids(cache, {1: 9.0, 2: 1.0})
        assert [row.id for row in ordered(cache)] == [2, 3, 4, 1]


def ordered(cache: cs.Cache) -> list[Any]:
    with cache.catalogue.reading() as tables:
        return list(tables.evictable("least-weight", used_only=False))


def test_a_loader_without_weights_is_told_that_the_cache_evicts_by_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small(tmp_path / "cache") as cache, caplog.at_level(logging.WARNING, "cachestream"):
        for options in ({"weights": True}, {"split": "held-out", "holdout": 0.5}):
            cs.EpochLoader(cache, 8, **options).close()
        assert not caplog.records
        cs.EpochLoader(cache, 8, split="train").close()
        assert "this loader has no weights" in caplog.text
        assert "weights=True" in caplog.text


@pytest.mark.parametrize("options", [{}, {"weights": False}, {"weights": None}])
def test_stream_refuses_to_evict_by_weights_that_there_are_not(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(cs.ConfigError, match="there are none: give weights=True"):
        cs.stream(
            SOURCE,
            cache=tmp_path / "cache",
            size_limit="3MB",
            batch_size=8,
            eviction="least-weight",
            **options,
        )
    assert not (tmp_path / "cache").exists()
