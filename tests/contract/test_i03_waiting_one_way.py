"""Invariant 3: waiting goes one way. Sampling waits for space; training waits for samples only at cold start.

`test_p10_fetched_is_trained_on.py` has the sampling that waits while epochs hold all of a full cache.
"""

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
            cs.EpochLoader(cache, 4, timeout_s=3.0) as impatient,
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
            epoch: list[int] = []
            for _ in range(5):  # nothing more comes, and nobody waits for it
                epoch = sorted(n for batch in loader for n in batch["number"].tolist())
                assert len(epoch) <= 20
            assert epoch == numbers_in(cache)
            assert cache.fill_state() == "filling"
        source.allow(None)
