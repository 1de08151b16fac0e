"""Caches for the tests of the training side, closed when a test ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachestream import Cache
from tests.support.caches import add_shard, fill

NewCache = Callable[..., Cache]


@pytest.fixture
def new_cache(tmp_path: Path) -> Iterator[NewCache]:
    """Makes caches: `new_cache(num_shards, samples_each)` of numbered samples, or empty ones."""
    made: list[Cache] = []

    def new(num_shards: int = 0, samples_each: int = 0, first: int = 0) -> Cache:
        cache = fill(tmp_path / f"cache{len(made)}", num_shards, samples_each, first)
        made.append(cache)
        return cache

    yield new
    for cache in made:
        cache.close()


@pytest.fixture
def cache_of(new_cache: NewCache) -> Callable[[list[Any], list[int]], Cache]:
    """Makes a cache of given samples, in shards of given sizes; the keys are "key 0", "key 1" and so on."""

    def new(samples: list[Any], shard_sizes: list[int]) -> Cache:
        cache = new_cache()
        keyed = ((f"key {i}", sample) for i, sample in enumerate(samples))
        for size in shard_sizes:
            add_shard(cache, itertools.islice(keyed, size))
        assert next(keyed, None) is None
        return cache

    return new
