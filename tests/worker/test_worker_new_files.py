"""Files that come among others of one kind: only they are read, whatever a unit is."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.listing.names import Names
from cachestream.worker.listings import Listings
from tests.worker.support import DEADLINE_S, only_once

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
tfrecord: Any = pytest.importorskip("tfrecord")
pytest.importorskip("google_crc32c")

SAMPLES = 12


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(SAMPLES):
            member = tarfile.TarInfo(f"{number:03d}.bin")
            member.size = 2000
            archive.addfile(member, io.BytesIO(bytes([number]) * 2000))


def write_tfrecord(path: Path) -> None:
    writer = tfrecord.TFRecordWriter(str(path))
    for number in range(SAMPLES):
        writer.write({"number": (number, "int")})
    writer.close()


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"number": list(range(SAMPLES))}), path, row_group_size=5)


def write_sample(path: Path) -> None:
    path.write_bytes(path.name.encode())


# The ending, the writer, options of the source, and of each file the units and the samples.
KINDS: dict[str, tuple[str, Callable[[Path], None], dict[str, Any], int, int]] = {
    "files": ("bin", write_sample, {}, 1, 1),
    "tars": ("tar", write_tar, {}, 1, SAMPLES),
    "visits": ("tar", write_tar, {"samples_per_visit": 4}, 3, SAMPLES),
    "tfrecords": ("tfrecord", write_tfrecord, {}, 1, SAMPLES),
    "row groups": ("parquet", write_parquet, {}, 3, SAMPLES),
}


def fill(cache: Cache, folder: Path, options: dict[str, Any]) -> int:
    """Fill the cache from the folder; how many units were read."""
    source = cs.open_source(folder / f"*.{folder.name}", **options)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
        units: int = cache.status().worker.totals.units  # type: ignore[union-attr]
    return units


@pytest.mark.e2e
@pytest.mark.parametrize(
    "kind",
    [
        "files",
        "tars",
        "tfrecords",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("visits", "row groups")),
    ],
)
def test_files_that_come_among_others_are_all_that_is_read(cache: Cache, tmp_path: Path, kind: str) -> None:
    ending, write, options, a_file, samples = KINDS[kind]
    folder = tmp_path / ending
    folder.mkdir()
    files = 0
    for number, names in enumerate((["b", "d", "e"], ["a", "c", "f"])):
        for name in names:
            write(folder / f"{name}.{ending}")
        files += len(names)
        # The last unit of a pass may have been published before it was known to have no more.
        assert 0 <= fill(cache, folder, options) - len(names) * a_file <= number
        assert len(only_once(cache)) == files * samples
    (folder / f"c.{ending}").unlink()
    cache.evict(0)
    assert fill(cache, folder, options) == (files - 1) * a_file
    assert len(only_once(cache)) == (files - 1) * samples
    assert len(Listings(cache.directory).earlier()) == 0, "nothing is cached of earlier passes"


def test_a_table_that_was_replaced_by_one_of_other_row_groups_is_read_again(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet")
    before = cs.ParquetSource(tmp_path)
    pq.write_table(pa.table({"number": list(range(SAMPLES))}), tmp_path / "b.parquet", row_group_size=8)
    after = cs.ParquetSource(tmp_path)
    assert set(before.first_names) & set(after.first_names) == {
        f"a.parquet#{row}" for row in ("0+5", "5+5", "10+2")
    }
    assert after.num_units == 5


@pytest.mark.parametrize("kind", KINDS)
def test_each_unit_has_a_name_and_the_list_is_named_by_them(tmp_path: Path, kind: str) -> None:
    ending, write, options, a_file, _ = KINDS[kind]
    for name in ("a", "b"):
        write(tmp_path / f"{name}.{ending}")
    source: Any = cs.open_source(tmp_path / f"*.{ending}", **options)
    names = source.first_names
    assert isinstance(names, Names)
    assert len(set(names)) == len(names) == source.num_units == 2 * a_file
    assert names.digest == source.listing_digest
    assert sorted(name[0] for name in names) == ["a"] * a_file + ["b"] * a_file
