"""The calls of frameworks to a loader between epochs cost no epoch, and its numbers are right."""

from __future__ import annotations

import pytest

from cachestream import EpochLoader
from tests.support.caches import add_shard, numbered
from tests.training.conftest import NewCache

pytestmark = pytest.mark.e2e


def test_a_resumed_epoch_that_is_begun_twice_goes_on_where_it_was(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as first:
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        rest = [batch["number"].tolist() for batch in batches]
    with EpochLoader(cache, 4) as second:
        second.load_state_dict(state)
        iter(second)
        assert second.state_dict() == state
        again = iter(second)
        assert second.batches_done == 1
        assert [batch["number"].tolist() for batch in again] == rest


def test_the_samples_of_an_epoch_of_several_passes_are_those_of_all_passes(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4, epoch_size=96, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        assert (loader.stats.epoch_samples, loader.stats.shards) == (16, 2)
        add_shard(cache, numbered(100, 8))  # three passes may have been prepared by now
        seen = [n for batch in batches for n in batch["number"].tolist()]
        assert any(n >= 100 for n in seen)
        stats = loader.stats
        assert (stats.epoch_samples, stats.shards) == (24, 3)
        assert stats.samples == 96
        assert 0 <= stats.epoch_wait_share <= 1
        next(iter(loader))
        assert loader.stats.epoch == 1
        assert loader.stats.epoch_samples <= 24
