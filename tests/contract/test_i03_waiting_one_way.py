"""Invariant 3: waiting goes one way. Sampling waits for space; training waits for samples only at cold start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import cachestream as cs
from tests.contract.readers import DEADLINE_S, FOUR, Told, numbers_in, until


def test_training_waits_for_its_first_samples_and_then_never_again(tmp_path: Path) -> None:
    source = Told(str(tmp_path))
    source.allow(0)
    with (
        cs.Cache(tmp_path / "cache", "4MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1, concurrency=2, shard_size=FOUR),
    ):
        with (
            cs.EpochLoader(cache, 4, timeout_s=0.2) as impatient,
            pytest.raises(cs.NotEnoughSamplesError, match="0 samples"),
        ):
            next(iter(impatient))
        with cs.EpochLoader(cache, 4, drop_last=False) as loader:
            first: list[int] = []
            thread = threading.Thread(
                target=lambda: first.extend(n for batch in loader for n in batch["number"].tolist())
            )
            thread.start()
            until(lambda: source.reads, "the remote is asked")
            assert thread.is_alive()
            assert not first
            source.allow(20)
            thread.join(DEADLINE_S)
            assert len(first) >= 4
            cache.wait(16, DEADLINE_S)
            for _ in range(5):  # nothing more comes, and nobody waits for it
                epoch = sorted(n for batch in loader for n in batch["number"].tolist())
                assert len(epoch) <= 20
            assert epoch == numbers_in(cache)
            assert cache.fill_state() == "filling"
        source.allow(None)


def test_sampling_waits_for_space_while_epochs_hold_all_of_a_full_cache(tmp_path: Path) -> None:
    source = Told(str(tmp_path), units=240, floats=4096)
    with (
        cs.Cache(tmp_path / "cache", "2MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1, concurrency=2, shard_size="65KB") as worker,
    ):
        worker.wait(DEADLINE_S)
        with cache.snapshot(turnover=0.0) as held:
            have = numbers_in(cache)
            until(lambda: cache.fill_state() == "filling", "it would go on")
            with cs.EpochLoader(cache, 5, drop_last=False, turnover=0.0) as loader:
                for _ in range(3):
                    assert sorted(n for batch in loader for n in batch["number"].tolist()) == have
            assert cache.status().evicted_samples == 0
            assert sorted(held[:]["number"].tolist()) == have
        cache.snapshot(turnover=0.5).close()
        until(lambda: cache.status().evicted_samples > 0, "it goes on when they are released")
