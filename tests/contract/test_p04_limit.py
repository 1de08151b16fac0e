"""P4: the directory of a cache, temporary files included, never exceeds `size_limit`."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import Self

import cachestream as cs
from tests.contract.conftest import bytes_on_disk


def endless(rng: np.random.Generator) -> dict[str, object]:
    """A sample of 16 KiB."""
    return {"x": rng.random(4096, np.float32)}


class Watch:
    """The most bytes that a directory had, looked at every 10 ms."""

    def __init__(self, path: Path) -> None:
        self._path, self.most = path, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, bytes_on_disk(self._path))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize(
    "eviction",
    [
        "lru",
        *(pytest.param(policy, marks=pytest.mark.e2e) for policy in ("fifo", "least-fresh", "least-weight")),
    ],
)
def test_a_cache_that_is_filled_and_trained_on_stays_below_its_limit(tmp_path: Path, eviction: str) -> None:
    limit = 2_000_000
    with (
        cs.Cache(tmp_path / "c", limit, min_free=0, eviction=eviction) as cache,
        Watch(tmp_path / "c") as watch,
        cs.start_worker(cache, endless, num_workers=2, shard_size="200KB"),
        cs.EpochLoader(cache, 4, min_samples=40, weights=eviction == "least-weight") as loader,
    ):
        seen: list[int] = []
        while len(seen) < 6 or cache.status().evicted_shards == 0:
            seen.append(sum(len(batch["x"]) for batch in loader))
    assert min(seen) > 0
    assert 0 < watch.most <= limit


def test_shards_that_are_written_at_once_count_before_they_are_there(tmp_path: Path) -> None:
    def large(rng: np.random.Generator) -> dict[str, object]:
        return {"x": rng.bytes(200_000)}

    limit = 20_000_000  # so that what is under way exceeds any reserve
    with (
        cs.Cache(tmp_path / "c", limit, min_free=0) as cache,
        Watch(tmp_path / "c") as watch,
        cs.start_worker(cache, large, num_workers=3, shard_size="2MB"),
        cs.EpochLoader(cache, 4, min_samples=60) as loader,
    ):
        while cache.status().evicted_shards < 30:
            for _ in loader:
                pass
    assert 0 < watch.most <= limit


def test_a_lower_limit_holds_at_once_and_a_higher_one_is_filled(tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "c", "3MB", min_free=0) as cache,
        cs.start_worker(cache, endless, num_workers=1, shard_size="200KB"),
    ):
        cache.wait(100, timeout_s=60)
        cache.size_limit = 1_000_000
        with Watch(tmp_path / "c") as watch, cs.EpochLoader(cache, 4) as loader:
            for _ in range(3):
                assert sum(len(batch["x"]) for batch in loader) <= 1_000_000 // 16384
        assert watch.most <= 1_000_000
        cache.size_limit = "4MB"
        assert cache.wait(120, timeout_s=60) >= 120


def test_min_free_of_the_disk_stays_free(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with (
        cs.Cache(tmp_path / "c", "1GB", min_free=2 * free) as cache,
        cs.start_worker(cache, endless, num_workers=1) as worker,
    ):
        deadline_s = time.monotonic() + 60
        while not (running := worker.status().worker) or not running.totals.space_wait_s:
            assert cache.num_samples == 0
            assert time.monotonic() < deadline_s, worker.status()
        with pytest.raises(cs.NotEnoughSamplesError, match="free"):
            cache.wait(1, timeout_s=0.1)


@pytest.mark.e2e
def test_a_worker_that_is_to_stop_at_the_limit_ends_there(tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "c", 1_200_000, min_free=0) as cache,
        cs.start_worker(cache, endless, num_workers=1, shard_size="100KB", when_full="stop") as worker,
    ):
        deadline_s = time.monotonic() + 60
        while worker.is_alive():
            assert time.monotonic() < deadline_s, worker.status()
            time.sleep(0.02)
        assert 0 < cache.size_bytes <= 1_200_000
        assert (cache.status().fill_state, cache.status().evicted_shards) == ("full", 0)


def test_a_limit_that_one_process_changes_is_that_of_all(cache: cs.Cache) -> None:
    with cs.Cache(cache.path) as other:
        assert (other.size_limit, other.min_free) == (4_000_000, 0)
        cache.size_limit, cache.min_free = "5MB", "1MB"
        assert (other.size_limit, other.min_free) == (5_000_000, 1_000_000)


def test_a_limit_below_one_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cs.ConfigError, match=r"size_limit.* too small"):
        cs.Cache(tmp_path / "c", "10KB", min_free=0)


def test_evict_and_clear_free_what_they_say(cache: cs.Cache) -> None:
    before, to = cache.size_bytes, cache.size_bytes * 2 // 3
    freed = cache.evict(to=to)
    assert freed == before - cache.size_bytes > 0
    assert bytes_on_disk(Path(cache.path)) <= cache.size_bytes <= to
    cache.clear()
    assert (cache.num_samples, cache.num_shards) == (0, 0)


def test_files_that_the_cache_does_not_know_count_wherever_they_lie(tmp_path: Path) -> None:
    with cs.Cache(tmp_path / "c", "10MB", min_free=0) as cache:
        for name in ("shards/notes.bin", "shards/000000900001.shard", "stray.bin"):
            (tmp_path / "c" / name).write_bytes(bytes(2_000_000))
        with cs.start_worker(cache, endless, num_workers=1, shard_size="200KB", when_full="stop") as worker:
            worker.wait(60)
        assert 7_000_000 < bytes_on_disk(tmp_path / "c") <= 10_000_000
        assert cache.size_bytes == bytes_on_disk(tmp_path / "c")
