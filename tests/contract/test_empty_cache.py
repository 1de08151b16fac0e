"""A snapshot of an empty cache is refused with what to do next, which depends on whether a worker fills it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import cachestream as cs


def test_a_snapshot_of_an_empty_cache_without_a_worker_says_to_start_one(tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "cache", "5MB", min_free=0) as cache,
        pytest.raises(cs.NotEnoughSamplesError, match=r"is empty; start a worker .*cache\.wait\("),
    ):
        cache.snapshot()


def test_a_snapshot_beside_a_worker_that_has_just_started_says_to_wait(tmp_path: Path) -> None:
    go = tmp_path / "go"

    def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
        while not go.exists():
            threading.Event().wait(0.02)
        return {"x": rng.random(100)}

    with (
        cs.Cache(tmp_path / "cache", "5MB", min_free=0) as cache,
        cs.start_worker(cache, draw, num_workers=1),
    ):
        with pytest.raises(cs.NotEnoughSamplesError) as caught:
            cache.snapshot()
        go.touch()
        cache.wait(1, 60)
        cache.snapshot().close()
    said = str(caught.value)
    assert "start a worker" not in said
    assert "its worker is about to fill it; wait for samples with cache.wait(min_samples, timeout_s)" in said
    assert "min_samples=" in said


def test_a_snapshot_beside_a_worker_whose_source_gave_nothing_says_why(tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "cache", "5MB", min_free=0) as cache,
        cs.start_worker(cache, list(range(3)), transform=lambda _: None, num_workers=1) as worker,
    ):
        worker.wait(60)
        with pytest.raises(cs.NotEnoughSamplesError, match=r"its filling is 'complete': .*None for"):
            cache.snapshot()
