"""Failed units are tried again at the next start and in the next pass; others are not read again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache
from tests.worker.sources import Faulty, Named, Numbers, Switched
from tests.worker.support import DEADLINE_S, failures_of, fill, only_once, wait_until


def units_read(journal: Path) -> list[int]:
    return sorted(map(int, journal.read_text().split()))


@pytest.mark.e2e
def test_units_that_failed_are_read_again_at_the_next_start_and_their_samples_come_once(
    tmp_path: Path, cache: Cache
) -> None:
    switch = tmp_path / "switch"
    switch.write_text("no sample", encoding="utf-8")
    source = Switched(20, 4, switch=str(switch))
    fill(cache, source)
    assert only_once(cache) == {f"{unit}/{sample}" for unit in range(20) for sample in range(2)}
    assert failures_of(cache) == {"sample": 20}
    switch.write_text("ok", encoding="utf-8")
    fill(cache, source, num_workers=2)
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


@pytest.mark.e2e
def test_a_start_after_failures_reads_no_unit_that_did_not_fail_and_counts_none_twice(
    tmp_path: Path, cache: Cache
) -> None:
    journal = tmp_path / "journal"
    source = Faulty(30, journal=str(journal), faults=((3, "raise"), (17, "segfault")))
    for start in range(2):
        journal.write_text("")
        fill(cache, source, num_workers=2)
        assert failures_of(cache) == {"source": 1, "quarantined": 1}
        if start:
            # What a process published last may have come before it was known that its unit has no more.
            assert len(set(units_read(journal)) - {3, 17}) <= 4
    assert only_once(cache) == Numbers(30).keys() - {"3/0", "17/0"}


def evict_and_refill(cache: Cache) -> None:
    """Have another pass begin, over what is evicted, and wait until it is complete."""
    before = cache.status().pass_number
    cache.evict(cache.size_bytes - 10_000)
    wait_until(lambda: cache.status().pass_number > before, "another pass begins")
    wait_until(lambda: cache.fill_state() == "complete", "and is complete")


@pytest.mark.e2e
def test_units_that_failed_are_read_again_in_the_next_pass_and_count_once(
    tmp_path: Path, cache: Cache
) -> None:
    switch = tmp_path / "switch"
    switch.write_text("no sample", encoding="utf-8")
    source = Switched(20, 4, switch=str(switch))
    with cs.start_worker(cache, source, num_workers=1, shard_size="20kB") as worker:
        assert worker.wait(DEADLINE_S)
        for _ in range(2):
            evict_and_refill(cache)
            assert failures_of(cache) == {"sample": 20}
        switch.write_text("ok", encoding="utf-8")
        cache.evict(cache.size_bytes - 10_000)
        wait_until(lambda: cache.num_samples == 80, "all is there, what was evicted and what had failed")
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


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
