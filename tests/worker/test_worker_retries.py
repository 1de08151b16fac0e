"""Draws of a transform for a sample that is read again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache
from tests.worker.sources import Named
from tests.worker.support import fill


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"n": 4 * sample["unit"] + sample["number"], "noise": rng.random(4)}


def noise_of(
    path: Path, source: cs.Source, transform: Callable[..., Any], **options: Any
) -> dict[int, bytes]:
    """The draws of the transform for each sample, in a new cache."""
    with Cache(path, "20MB", min_free=0) as cache:
        fill(cache, source, transform=transform, shard_size="20kB", **options)
        with cache.snapshot() as dataset:
            found = dataset[:]
            return {
                int(n): noise.numpy().tobytes() for n, noise in zip(found["n"], found["noise"], strict=True)
            }


@pytest.mark.e2e
def test_a_transform_draws_the_same_for_a_sample_in_every_run_whichever_process_does_it_and_on_a_retry(
    tmp_path: Path,
) -> None:
    source, killed = Named(units=30, samples=4, nbytes=100), tmp_path / "killed"

    def dying(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        if (sample["unit"], sample["number"]) == (10, 1) and not killed.exists():
            killed.touch()
            os._exit(1)
        return noisy(sample, rng)

    once = noise_of(tmp_path / "one", source, noisy, num_workers=1, order="sequential")
    assert len(once) == len(set(once.values())) == 120
    assert noise_of(tmp_path / "two", source, dying, num_workers=2, concurrency=4) == once
    assert killed.exists()
    assert noise_of(tmp_path / "other", source, noisy, num_workers=2, seed=1) != once
