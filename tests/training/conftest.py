"""Fixtures of the training tests: caches, closed at the end of a test, and jobs of threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from cachestream import Cache
from cachestream.training.batches import memory
from tests.support.caches import add_shard, fill
from tests.training.jobs import Job

NewCache = Callable[..., Cache]
NewJob = Callable[[int], Job]


@pytest.fixture
def new_cache(tmp_path: Path) -> Iterator[NewCache]:
    """Make caches: `new_cache(num_shards, samples_each)` of numbered samples, or empty ones."""
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
    """Make a cache of the given samples, in shards of the given sizes; the keys are "key 0", "key 1" and so
    on.
    """

    def new(samples: list[Any], shard_sizes: list[int]) -> Cache:
        cache = new_cache()
        keyed = ((f"key {i}", sample) for i, sample in enumerate(samples))
        for size in shard_sizes:
            add_shard(cache, itertools.islice(keyed, size))
        assert next(keyed, None) is None
        return cache

    return new


@pytest.fixture(scope="session")
def job_server() -> Any:
    """The store that all jobs of threads use."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def new_job(job_server: Any, monkeypatch: pytest.MonkeyPatch) -> NewJob:
    """Make jobs: `new_job(ranks).run(work)`."""
    return lambda size: Job(job_server, size, monkeypatch)


@pytest.fixture(params=["by threads in C", "by torch"])
def gathered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test of what batches hold, or who waits for them, with the part in C and without it."""
    if request.param == "by torch":
        monkeypatch.setattr(memory, "in_c", None)
    elif memory.in_c is None:
        pytest.skip("installed without the part in C")
