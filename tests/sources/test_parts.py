"""A small cache holds something of many files, also where each file holds one class."""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream.sources.file_units import FileUnits
from cachestream.sources.files_source import EXPANSION, MANY_FILES, parts_for_diversity
from cachestream.testing.checks import cached_keys

tfrecord: Any = pytest.importorskip("tfrecord")
pyarrow: Any = pytest.importorskip("pyarrow")
parquet: Any = pytest.importorskip("pyarrow.parquet")

FILES = 20
SAMPLES = 64
SAMPLE_BYTES = 32_000
GROUP_ROWS = 8


def blobs(number: int) -> list[bytes]:
    return [np.random.default_rng((number, sample)).bytes(SAMPLE_BYTES) for sample in range(SAMPLES)]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty tars of about 2 MB, of one class each."""
    folder = tmp_path_factory.mktemp("tars")
    for number in range(FILES):
        with tarfile.open(folder / f"{number:03}.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
            for sample, data in enumerate(blobs(number)):
                member = tarfile.TarInfo(f"{sample:03}.bin")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return folder


@pytest.fixture(scope="module")
def tfrecords(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as TFRecord files."""
    folder = tmp_path_factory.mktemp("tfrecords")
    for number in range(FILES):
        writer = tfrecord.TFRecordWriter(str(folder / f"{number:03}.tfrecord"))
        for data in blobs(number):
            writer.write({"data": (data, "byte")})
        writer.close()
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as Parquet files of eight row groups."""
    folder = tmp_path_factory.mktemp("tables")
    for number in range(FILES):
        table = pyarrow.table({"data": blobs(number)})
        parquet.write_table(table, folder / f"{number:03}.parquet", row_group_size=GROUP_ROWS)
    return folder


def file_of(key: str) -> str:
    return key.partition("#")[0]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["tars", "tfrecords", "tables"])
def test_a_cache_of_a_quarter_holds_something_of_every_file(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    limit = sum(path.stat().st_size for path in folder.iterdir()) // 4
    with (
        cs.Cache(tmp_path / "cache", size_limit=limit + (1 << 20), min_free=0) as cache,
        cs.start_worker(cache, str(folder), num_workers=2, when_full="stop", shard_size="200kB") as worker,
    ):
        worker.wait(timeout_s=120)
        found = Counter(map(file_of, cached_keys(cache)))
    assert len(found) >= FILES - 4  # one process may fill the cache while the other reads its first claim
    assert max(found.values()) < SAMPLES  # parts, or a quarter could not hold all


@pytest.mark.e2e
def test_a_large_cache_reads_whole_tars(tars: Path, tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "cache", size_limit="200MB") as cache,
        cs.start_worker(cache, str(tars), num_workers=2) as worker,
    ):
        worker.wait(timeout_s=120)
        status = cache.status()
    assert status.num_units == FILES
    assert status.num_samples == FILES * SAMPLES


@pytest.mark.e2e
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
    assert after.num_units > FILES
    assert len(keys) == len(set(keys)) == FILES * SAMPLES


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["tars", "tfrecords", "tables"])
def test_a_divided_source_gives_every_sample_once(kind: str, request: pytest.FixtureRequest) -> None:
    whole: Any = cs.open_source(str(request.getfixturevalue(kind)))
    rng = np.random.default_rng(0)
    expected = sorted(key for unit in range(whole.num_units) for key, _ in whole.read(unit, rng))
    assert len({*expected}) == len(expected) == FILES * SAMPLES
    for parts in (1, 2, 3, 7):
        source = whole.divided(parts)
        bounds = [0, *(source.round_ends or [source.num_units])]
        rounds = [
            [key for unit in range(first, end) for key, _ in source.read(unit, rng)]
            for first, end in pairwise(bounds)
        ]
        assert all({*map(file_of, keys)} == {*map(file_of, rounds[0])} for keys in rounds)
        assert len(rounds) == parts
        assert sorted(key for keys in rounds for key in keys) == expected
        names = source.first_names
        assert len({names[unit] for unit in range(source.num_units)}) == source.num_units


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_every_round_has_a_share_of_the_units_of_every_file(counts: list[int], rounds: int) -> None:
    units = FileUnits(counts, rounds)
    every = np.arange(len(units))
    assert sorted(units.place(every).tolist()) == [*range(sum(counts))]
    files, numbers = units.locate(every)
    assert {*zip(files.tolist(), numbers.tolist(), strict=True)} == {
        (file, number) for file, count in enumerate(counts) for number in range(count)
    }
    assert [units.locate(unit) for unit in every] == [*zip(files, numbers, strict=True)]
    for first, end in pairwise([0, *(units.round_ends or [len(units)])]):
        shares = np.bincount(files[first:end], minlength=len(counts))
        assert all(
            count // rounds <= share <= -(-count // rounds)
            for count, share in zip(counts, shares, strict=True)
        )


@given(st.integers(1, 10**13), st.integers(0, 10**6), st.integers(0, 10**10), st.integers(1, 10**6))
def test_parts_are_the_fewest_that_fit_something_of_many_units(
    limit: int, num_units: int, unit_bytes: int, most: int
) -> None:
    parts = parts_for_diversity(limit, num_units, unit_bytes, most)
    wanted = EXPANSION * unit_bytes * min(num_units, MANY_FILES)
    assert 1 <= parts <= most
    if num_units > 1:
        assert parts == most or limit * parts >= wanted
        assert parts == 1 or limit * (parts - 1) < wanted
