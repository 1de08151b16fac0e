"""The rows of a Lance dataset come as pylance gives them, from a disk and from a server."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import lance
import numpy as np
import pyarrow as pa
import pytest

import cachestream as cs
from cachestream.sources.api import Rows
from cachestream.testing import check_source
from cachestream_lance import LanceSource
from tests.support.s3 import S3Server, run_s3_server

ROWS: Final = 1000
RNG: Final = np.random.Generator(np.random.Philox(key=7))


def table(rows: int = ROWS, first: int = 0) -> Any:
    numbers = np.arange(first, first + rows)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 8).astype(np.float32)), 8)
    columns = {
        "id": pa.array(numbers),
        "text": pa.array([f"text {n}" for n in numbers]),
        "data": pa.array([bytes([n % 256]) * (n % 7) for n in numbers.tolist()]),
        "vector": vectors,
    }
    return pa.table(columns)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    lance.write_dataset(table(), tmp_path / "a.lance", max_rows_per_file=400)
    return tmp_path / "a.lance"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with run_s3_server() as running:
        yield running


def rows_of(source: cs.Source) -> list[dict[str, Any]]:
    assert source.num_units is not None
    return [sample for unit in range(source.num_units) for _, sample in source.read(unit, RNG)]


def expect_all(rows: list[dict[str, Any]], count: int = ROWS) -> None:
    assert [row["id"] for row in rows] == list(range(count))
    assert [row["text"] for row in rows] == [f"text {n}" for n in range(count)]
    assert [row["data"] for row in rows] == [bytes([n % 256]) * (n % 7) for n in range(count)]
    assert all(np.array_equal(row["vector"], np.full(8, n, np.float32)) for n, row in enumerate(rows))


@pytest.mark.e2e
def test_rows_come_in_units_of_the_fragments(path: Path) -> None:
    source = LanceSource(path, unit_rows=300)
    assert (source.num_units, source.num_rows) == (5, ROWS)  # 300 + 100, 300 + 100, 200
    expect_all(rows_of(source))
    (rows,) = source.read_rows(1, RNG)
    assert isinstance(rows, Rows)
    assert rows.keys[0] == "0#300"
    assert rows.fields["vector"].shape == (100, 8)  # type: ignore[union-attr]


@pytest.mark.e2e
def test_the_source_keeps_what_workers_rely_on(path: Path) -> None:
    check_source(lambda: LanceSource(path, unit_rows=150))


@pytest.mark.e2e
def test_the_source_is_found_by_name_and_ending_and_fills_a_cache(path: Path, tmp_path: Path) -> None:
    assert isinstance(cs.open_source(f"{path}/"), LanceSource)
    source = cs.open_source(path, format="lance", columns=["id", "vector"])
    with cs.Cache(tmp_path / "cache", "50MB", min_free=0) as cache:
        with cs.start_worker(cache, source, num_workers=1) as worker:
            assert worker.wait(timeout_s=120)
        assert cache.num_samples == ROWS
        sample = cache.snapshot()[0]
        assert sample.keys() == {"id", "vector"}
        assert np.array_equal(sample["vector"], np.full(8, sample["id"], np.float32))


def test_a_dataset_on_a_server_is_read_with_the_options_of_s3fs(server: S3Server) -> None:
    lance.write_dataset(table(), server.bucket("tables") / "b.lance", max_rows_per_file=400)
    source = LanceSource("s3://tables/b.lance", storage_options=server.storage_options)
    expect_all(rows_of(source))
    expect_all(rows_of(pickle.loads(pickle.dumps(source))))
    assert server.secret not in f"{source!r}{source.fingerprint}"


@pytest.mark.e2e
def test_a_server_that_is_away_is_tried_again() -> None:
    with run_s3_server() as server:
        lance.write_dataset(table(), server.bucket("tables") / "c.lance")
        source = LanceSource("s3://tables/c.lance", storage_options=server.storage_options)
    with pytest.raises(cs.SourceUnavailableError, match=r"s3://tables/c\.lance") as caught:
        list(source.read(0, RNG))
    assert server.secret not in str(caught.value)


def test_a_source_stays_with_its_version_and_knows_its_units_in_the_next(path: Path) -> None:
    before = LanceSource(path, unit_rows=300)
    lance.write_dataset(table(50, ROWS), path, mode="append")
    lance.dataset(path).delete("id = 999")
    expect_all(rows_of(before))
    after = LanceSource(path, unit_rows=300)
    assert after.num_rows == ROWS + 49
    assert after.fingerprint == before.fingerprint
    assert list(after.first_names)[:4] == list(before.first_names)[:4]  # of the fragments that are the same
    expect_all(rows_of(LanceSource(path, version=1)))


def test_rows_with_nulls_are_skipped_or_filled(tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"a": pa.array([1, None, 3])}), tmp_path / "a.lance")
    found: list[Any] = []
    with pytest.raises(cs.SampleError, match="row 1: column 'a' is null"):
        found.extend(sample["a"] for _, sample in LanceSource(tmp_path / "a.lance").read(0, RNG))
    assert [row["a"] for row in rows_of(LanceSource(tmp_path / "a.lance", nulls={"a": -1}))] == [1, -1, 3]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"columns": ["other"]}, cs.ConfigError, "no column 'other'; there are id, text, data, vector"),
        ({"columns": "id"}, cs.ConfigError, "columns='id'"),
        ({"unit_rows": 0}, cs.ConfigError, "unit_rows=0: give a whole number"),
        ({"version": 99}, cs.SourceError, r"a\.lance: .*99"),
        ({"storage_options": {"client_kwargs": {"verify": []}}}, cs.ConfigError, "verify is a list"),
    ],
)
def test_a_wrong_option_is_refused(path: Path, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LanceSource(path, **options)


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cs.SourceError, match=r"none\.lance: cannot be read"):
        LanceSource(tmp_path / "none.lance")
    with pytest.raises(cs.ConfigError, match="one dataset, not a list"):
        LanceSource(["a.lance"])  # type: ignore[arg-type]
