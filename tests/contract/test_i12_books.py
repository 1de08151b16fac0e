"""Invariant 12: the books are checked. Sizes in rows are compared with those of files when a cache is opened, and by `verify`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, bytes_on_disk


def shards_of(path: Path) -> list[Path]:
    return sorted((path / "shards").rglob("*.safetensors"))


def test_a_file_that_has_grown_is_noticed_when_the_cache_is_opened_and_counts(
    new_path: Callable[[], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = new_path()
    caplog.set_level(logging.WARNING, "cachestream")
    with cs.Cache(path) as cache:
        before = cache.size_bytes
        assert not caplog.messages
    with open(shards_of(path)[3], "ab") as file:
        file.write(bytes(200_000))
    with cs.Cache(path) as cache:
        (warning,) = caplog.messages
        assert "the recorded size of 1 of" in warning
        assert "corrected" in warning
        assert cache.size_bytes >= before + 190_000
        assert cache.size_bytes >= bytes_on_disk(path)
        report = cache.verify()
        assert (len(report.corrupt), len(report.missing)) == (1, 0)
        assert shards_of(path)[3].name in report.corrupt[0]
    with cs.Cache(path):
        assert len(caplog.messages) == 1, "the books are right by now"


def test_a_file_that_makes_a_cache_too_large_has_shards_evicted_when_it_is_opened_with_its_limit(
    new_path: Callable[[], Path],
) -> None:
    path = new_path()
    with open(shards_of(path)[-1], "ab") as file:
        file.write(bytes(4_000_000))
    with cs.Cache(path, "4MB") as cache:
        assert bytes_on_disk(path) <= cache.size_limit
        assert cache.num_samples < NUM_SAMPLES


def test_verify_counts_what_is_damaged_and_what_is_gone_and_a_repair_leaves_the_rest(
    new_path: Callable[[], Path],
) -> None:
    path = new_path()
    shards = shards_of(path)
    os.truncate(shards[0], 5000)
    data = bytearray(shards[1].read_bytes())
    data[-1] ^= 1
    shards[1].write_bytes(data)
    shards[2].unlink()
    seen: list[tuple[int, int]] = []
    with cs.Cache(path) as cache:
        report = cache.verify(on_progress=lambda done, total: seen.append((done, total)))
        assert (len(report.corrupt), len(report.missing), report.ok, report.problems) == (2, 1, False, 3)
        assert seen[-1] == (len(shards), len(shards))
        assert cache.num_samples == NUM_SAMPLES, "to look changes nothing"
        cache.verify(repair=True)
        assert cache.verify().ok
        assert cache.num_shards == len(shards) - 3
        with cache.snapshot() as dataset:
            samples = dataset[:]
        assert (samples["x"] == samples["number"][:, None]).all()
        assert len(set(samples["number"].tolist())) == cache.num_samples
        assert cache.status().quarantined == 2
