"""A small cache holds something of many tars, also where each tar holds one class."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream.sources.base import EXPANSION, MANY_UNITS, parts_for_diversity
from cachestream.testing.observing import cached_keys

TARS = 20
SAMPLES = 64
SAMPLE_BYTES = 32_000


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty tars of about 2 MB, of one class each."""
    folder = tmp_path_factory.mktemp("remote")
    for number in range(TARS):
        with tarfile.open(folder / f"{number:03}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for sample in range(SAMPLES):
                data = np.random.default_rng((number, sample)).bytes(SAMPLE_BYTES)
                member = tarfile.TarInfo(f"{sample:03}.bin")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return folder


def tar_of(key: str) -> str:
    return key.partition("#")[0]


def test_a_cache_of_a_quarter_holds_something_of_every_tar(tars: Path, tmp_path: Path) -> None:
    limit = sum(path.stat().st_size for path in tars.iterdir()) // 4
    with (
        cs.Cache(tmp_path / "cache", size_limit=limit + (1 << 20), min_free=0) as cache,
        cs.start_worker(cache, str(tars), num_workers=2, when_full="stop", shard_size="200kB") as worker,
    ):
        worker.wait(timeout_s=120)
        found = Counter(map(tar_of, cached_keys(cache)))
    assert len(found) == TARS
    assert max(found.values()) < SAMPLES  # parts, or a quarter could not hold all


def test_a_large_cache_reads_whole_tars(tars: Path, tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "cache", size_limit="200MB") as cache,
        cs.start_worker(cache, str(tars), num_workers=2) as worker,
    ):
        worker.wait(timeout_s=120)
        status = cache.status()
    assert status.num_units == TARS
    assert status.num_samples == TARS * SAMPLES


def test_parts_are_kept_when_the_limit_is_raised(tars: Path, tmp_path: Path) -> None:
    """The units of a pass that goes on are those that it began with: nothing is fetched twice."""
    with cs.Cache(tmp_path / "cache", size_limit="6MB", min_free=0) as cache:
        with cs.start_worker(cache, str(tars), num_workers=1, when_full="stop") as worker:
            worker.wait(timeout_s=120)
        before = cache.status()
        cache.size_limit = "200MB"
        with cs.start_worker(cache, str(tars), num_workers=1) as worker:
            worker.wait(timeout_s=120)
        after = cache.status()
        keys = [*cached_keys(cache)]
    assert before.num_units == after.num_units
    assert after.num_units is not None
    assert after.num_units > TARS
    assert len(keys) == len(set(keys)) == TARS * SAMPLES


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_a_divided_source_gives_every_sample_once(tars: Path, parts: int) -> None:
    source = cs.TarSource(str(tars)).divided(parts)
    rng = np.random.default_rng(0)
    rounds = [
        [key for unit in range(first, first + TARS) for key, _ in source.read(unit, rng)]
        for first in range(0, source.num_units, TARS)
    ]
    assert all({tar_of(key) for key in keys} == {tar_of(key) for key in rounds[0]} for keys in rounds)
    assert len(rounds) == source.rounds == parts
    found = sorted(key for keys in rounds for key in keys)
    assert found == sorted({*found})
    assert len(found) == TARS * SAMPLES


@given(st.integers(1, 10**13), st.integers(0, 10**6), st.integers(0, 10**10), st.integers(1, 10**6))
def test_parts_are_the_fewest_that_fit_something_of_many_units(
    limit: int, num_units: int, unit_bytes: int, most: int
) -> None:
    parts = parts_for_diversity(limit, num_units, unit_bytes, most)
    wanted = EXPANSION * unit_bytes * min(num_units, MANY_UNITS)
    assert 1 <= parts <= most
    if num_units > 1:
        assert parts == most or limit * parts >= wanted
        assert parts == 1 or limit * (parts - 1) < wanted
