"""A value of a table takes no more memory than one object may, however few bytes it has in its file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

import cachestream as cs
from tests.contract.servers import Answer, answer_with, ranged, serve

_MAKE = """
import sys
import numpy as np, pyarrow as pa, pyarrow.ipc, pyarrow.parquet as pq
path, what = sys.argv[1:]
few, large = [b"b"] * 5, bytes(300_000_000)
if what == "nested":
    column = pa.array([np.zeros(50_000_000, np.int64)], pa.list_(pa.int64()))
elif what in ("repeated", "categories"):
    column = pa.DictionaryArray.from_arrays(np.zeros(4096, np.int32), pa.array([bytes(900_000)]))
else:
    column = pa.array([*few, large, *few], pa.large_binary())
if what == "in a list":
    column = pa.ListArray.from_arrays(list(range(12)), column.cast(pa.string()))
if what == "among many":
    column = pa.array([*few * 200, large, *few * 200])
table = pa.table({"x": column})
if path.endswith(".arrow"):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
else:
    pq.write_table(table, path, compression="zstd")
"""
_READ = """
import json, sys
import numpy as np
import cachestream as cs
source = cs.open_source(sys.argv[1], max_object_size="20MB")
num_rows, reason, lost = 0, "", 0
try:
    for _, sample in source.read(0, np.random.default_rng(0)):
        num_rows += 1
except cs.SampleError as error:
    reason, lost = str(error), error.lost
with open("/proc/self/status") as status:  # ru_maxrss would count the process that was forked
    (most_kib,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps([num_rows, lost, reason, most_kib / 1024]))
"""


def outcome(tmp_path: Path, what: str, ending: str = "parquet") -> tuple[int, int, str, float]:
    """Return the numbers of rows that were read and lost, the reason, and the most memory that it took, in MiB."""
    path = str(tmp_path / f"x.{ending}")
    subprocess.run([sys.executable, "-c", _MAKE, path, what], check=True)
    found = subprocess.run([sys.executable, "-c", _READ, path], check=True, capture_output=True)
    num_rows, lost, reason, mib = json.loads(found.stdout)
    return num_rows, lost, reason, mib


@pytest.mark.e2e
@pytest.mark.parametrize(
    "what",
    [
        "in a dictionary",
        "nested",
        "in a list",
        "among many",
    ],
)
def test_a_value_above_the_bound_is_refused_before_it_takes_memory(tmp_path: Path, what: str) -> None:
    num_rows, lost, reason, mib = outcome(tmp_path, what)
    assert "more than 20 MB in one object; raise max_object_size=" in reason
    assert num_rows + lost == {"nested": 1, "among many": 2001}.get(what, 11)
    assert mib < 500


@pytest.mark.e2e
@pytest.mark.parametrize(("what", "ending"), [("repeated", "parquet"), ("categories", "arrow")])
def test_a_value_that_a_dictionary_repeats_is_written_out_for_a_few_rows_at_a_time(
    tmp_path: Path, what: str, ending: str
) -> None:
    num_rows, _, reason, mib = outcome(tmp_path, what, ending)
    assert (num_rows, reason) == (4096, "")
    assert mib < 500


def test_rows_whose_value_is_above_the_bound_are_counted_and_the_others_are_read(tmp_path: Path) -> None:
    values: list[Any] = [b"a" * (3_000_000 if i % 4 == 1 else 10) for i in range(8)]
    pq.write_table(pa.table({"x": values, "l": [[one.decode()] for one in values]}), tmp_path / "x.parquet")
    cache = cs.Cache(tmp_path / "cache", size_limit="10MB")
    source = cs.open_source(str(tmp_path / "x.parquet"), max_object_size="2MB")
    with cs.start_worker(cache, source, num_workers=1) as worker:
        worker.wait(timeout_s=60)
    assert cache.num_samples == 6
    (failure,) = cache.status().failures
    assert failure.count == 2
    assert "column 'x' holds more than 2 MB in one object; raise max_object_size=" in failure.reason


@pytest.mark.e2e
def test_the_sizes_of_dictionaries_cost_few_bytes_and_small_ones_leave_batches_large(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = pa.array([f"{i:024}" for i in range(30_000)])
    columns = {
        f"x{i}": pa.DictionaryArray.from_arrays(rng.integers(30_000, size=500_000, dtype=np.int32), texts)
        for i in range(20)
    }
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=500_000)
    data, asked = path.read_bytes(), list[int]()
    assert len(data) > 17 << 20

    def decide(_: str, wanted: str | None) -> Answer:
        first, last = ranged(data, wanted)
        asked.append(last + 1 - first)
        return answer_with(data, wanted)

    with serve(decide) as url:
        rows: Any = cs.ParquetSource(f"{url}/x.parquet").read_rows(0, rng)
        first = next(rows)
        rows.close()
    assert len(first.keys) == 4096
    assert sum(asked) < 1.1 * len(data)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_a_dictionary_of_views_is_read_as_one_of_values(tmp_path: Path, kind: pa.DataType) -> None:
    value: Any = "abc" if kind == pa.string_view() else b"abc"
    column = pa.DictionaryArray.from_arrays(np.array([0, 1, 0], np.int32), pa.array([value, value * 2], kind))
    table = pa.table({"x": column})
    with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    samples = [
        one["x"] for _, one in cs.open_source(str(tmp_path / "x.arrow")).read(0, np.random.default_rng(0))
    ]
    assert samples == [value, value * 2, value]
