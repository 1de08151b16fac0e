"""ParquetSource on files written by pyarrow and pandas: values, nulls, memory, damage."""

from __future__ import annotations

import datetime as dt
import decimal
import gc
import io
import json
import math
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

from cachestream.errors import CacheStreamError, ConfigError, SampleError, SourceError
from cachestream.formats import parquet
from cachestream.formats.parquet import ParquetSource
from cachestream.sources.open import open_source
from cachestream.testing.checks import check_source
from cachestream.transport.file_objects import SeekableFile
from tests.sources.reading import read_unit
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")

RNG: Final = np.random.default_rng(0)
ROOT: Final = Path(__file__).parents[2]


def read_all(source: ParquetSource) -> dict[str, dict[str, Any]]:
    """Return all samples by key."""
    return {key: sample for unit in range(source.num_units) for key, sample in source.read(unit, RNG)}


def png(value: int, size: tuple[int, int] = (6, 4)) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(sink, "PNG")
    return sink.getvalue()


# --- values ------------------------------------------------------------------------------------

NOW: Final = dt.datetime(2024, 2, 29, 12, 30, 15, 250_000, tzinfo=dt.timezone.utc)
VALUES: Final[dict[str, tuple[Any, Any]]] = {
    "bool": (pa.array([True, False, True]), [True, False, True]),
    "int8": (pa.array([1, -2, 3], pa.int8()), np.array([1, -2, 3], np.int8)),
    "uint64": (pa.array([0, 2**64 - 1, 5], pa.uint64()), np.array([0, 2**64 - 1, 5], np.uint64)),
    "float16": (pa.array(np.array([1.5, 2, -3], np.float16)), np.array([1.5, 2, -3], np.float16)),
    "float32": (pa.array([1.5, 2, np.nan], pa.float32()), np.array([1.5, 2, np.nan], np.float32)),
    "decimal": (pa.array([decimal.Decimal("1.25"), decimal.Decimal(-7), decimal.Decimal(0)]), [1.25, -7.0, 0.0]),
    "stamp": (pa.array([NOW] * 3, pa.timestamp("ms", tz="UTC")), [1_709_209_815_250] * 3),
    "day": (pa.array([NOW.date()] * 3, pa.date32()), [19_782] * 3),
    "time": (pa.array([NOW.time()] * 3, pa.time64("us")), [45_015_250_000] * 3),
    "took": (pa.array([1, 2, 3], pa.duration("s")), [1, 2, 3]),
    "text": (pa.array(["a", "", "ü∆"]), ["a", "", "ü∆"]),
    "large": (pa.array(["a", "b", "c"], pa.large_string()), ["a", "b", "c"]),
    "class": (pa.array(["cat", "dog", "cat"]).dictionary_encode(), ["cat", "dog", "cat"]),
    "data": (pa.array([b"a", b"", b"\x00\xff"]), [b"a", b"", b"\x00\xff"]),
    "fixed": (pa.array([b"ab", b"cd", b"ef"], pa.binary(2)), [b"ab", b"cd", b"ef"]),
    "list": (pa.array([[1, 2], [], [3]], pa.list_(pa.int16())),
             [np.array(one, np.int16) for one in ([1, 2], [], [3])]),
    "pair": (pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
             [np.array(one, np.float32) for one in ([1, 2], [3, 4], [5, 6])]),
    "matrix": (pa.array([[[1, 2], [3, 4]], [], [[5]]], pa.list_(pa.large_list(pa.uint8()))),
               [np.array([[1, 2], [3, 4]], np.uint8), np.empty((0, 0), np.uint8), np.array([[5]], np.uint8)]),
    "cube": (pa.array([[[[1], [2]]], [[[3, 4]]], [[[5]], [[6]]]]),
             [np.array(one) for one in ([[[1], [2]]], [[[3, 4]]], [[[5]], [[6]]])]),
    "flags": (pa.array([[True], [False, True], []]), [np.array(one, bool) for one in ([True], [False, True], [])]),
    "words": (pa.array([["a"], [], ["b", "ü"]]), ['["a"]', "[]", '["b", "ü"]']),
    "table": (pa.array([[("k", 1)], [], [("x", 2)]], pa.map_(pa.string(), pa.int64())),
              ['[["k", 1]]', "[]", '[["x", 2]]']),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("row_group_size", [3, 2])
def test_every_kind_of_column_becomes_a_field(tmp_path: Path, name: str, row_group_size: int) -> None:
    column, expected = VALUES[name]
    pq.write_table(pa.table({name: column}), tmp_path / "a.parquet", row_group_size=row_group_size)
    source = ParquetSource(tmp_path / "a.parquet")
    samples = read_all(source)
    assert list(samples) == ["a.parquet#0", "a.parquet#1", "a.parquet#2"]
    for sample, value in zip(samples.values(), expected, strict=True):
        found = sample[name]
        if isinstance(value, str | bytes):
            assert found == value
            assert type(found) is type(value)
        else:
            assert np.asarray(found).dtype == np.asarray(value).dtype
            np.testing.assert_array_equal(found, value)


def test_structs_become_a_field_for_each_member(tmp_path: Path) -> None:
    rows = [{"box": {"at": {"x": i, "y": -i}, "label": f"l{i}"}, "n": i} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    samples = list(read_all(ParquetSource(tmp_path)).values())
    assert samples[2] == {"box.at.x": 2, "box.at.y": -2, "box.label": "l2", "n": 2}
    part = list(read_all(ParquetSource(tmp_path, columns=["box.at", "n"])).values())
    assert part[1] == {"box.at.x": 1, "box.at.y": -1, "n": 1}


def test_tensors_keep_their_shape_and_the_order_of_their_axes(tmp_path: Path) -> None:
    values = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    pq.write_table(pa.table({"x": tensors}), tmp_path / "a.parquet")
    samples = list(read_all(ParquetSource(tmp_path)).values())
    np.testing.assert_array_equal([sample["x"] for sample in samples], values)


def test_the_index_that_pandas_stores_is_left_out(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2], "__index_level_0__": [7, 8]}), tmp_path / "a.parquet")
    assert set(read_all(ParquetSource(tmp_path))["a.parquet#1"]) == {"x"}


# --- images ------------------------------------------------------------------------------------


def hugging_face(images: list[dict[str, Any] | None], feature: str | None = "Image") -> Any:
    column = pa.array(images, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({"image": column, "label": list(range(len(images)))})
    if feature is None:
        return table
    features = {"image": {"_type": feature}, "label": {"dtype": "int64", "_type": "Value"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


@pytest.mark.parametrize("feature", ["Image", None])
def test_images_of_hugging_face_are_decoded(tmp_path: Path, feature: str | None) -> None:
    rows = [{"bytes": png(value), "path": f"{value}.png"} for value in (10, 20)]
    pq.write_table(hugging_face([*rows], feature), tmp_path / "a.parquet")
    for number, sample in enumerate(read_all(ParquetSource(tmp_path)).values()):
        assert sample["image"].shape == (3, 4, 6)
        assert sample["image"].dtype == np.uint8
        assert (sample["image"] == 10 * (number + 1)).all()
    raw = read_all(ParquetSource(tmp_path, decode_images=False))
    assert raw["a.parquet#0"]["image"] == png(10)


def test_images_without_any_path_are_decoded_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [{"bytes": png(3), "path": None}]}), tmp_path / "a.parquet")
    assert (read_all(ParquetSource(tmp_path))["a.parquet#0"]["image"] == 3).all()


def test_audio_of_hugging_face_stays_bytes(tmp_path: Path) -> None:
    pq.write_table(hugging_face([{"bytes": png(1), "path": None}], "Audio"), tmp_path / "a.parquet")
    assert read_all(ParquetSource(tmp_path))["a.parquet#0"]["image"] == png(1)


def test_rows_with_broken_or_missing_images_are_told_and_others_come(tmp_path: Path) -> None:
    rows: list[dict[str, Any] | None] = [
        {"bytes": png(1), "path": "1.png"},
        {"bytes": png(2)[:40], "path": "2.png"},
        {"bytes": None, "path": "/data/3.png"},
        None,
        {"bytes": png(5), "path": "5.png"},
    ]
    pq.write_table(hugging_face(rows), tmp_path / "a.parquet")
    samples, reason = read_unit(ParquetSource(tmp_path))
    assert [key for key, _ in samples] == ["a.parquet#0", "a.parquet#4"]
    assert "3 problems, the first: row 1: column 'image': not a usable image" in reason
    rows[1], rows[3] = rows[0], rows[0]
    pq.write_table(hugging_face(rows), tmp_path / "a.parquet")
    assert (
        "row 2: column 'image' has no bytes, only the path '/data/3.png'"
        in read_unit(ParquetSource(tmp_path))[1]
    )


def test_columns_of_bytes_are_decoded_when_they_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"jpg": [png(7)], "raw": [png(7)]}), tmp_path / "a.parquet")
    sample = read_all(ParquetSource(tmp_path, decode_images=["jpg"]))["a.parquet#0"]
    assert (sample["jpg"] == 7).all()
    assert sample["raw"] == png(7)


# --- nulls -------------------------------------------------------------------------------------


def test_a_row_with_a_null_is_left_out_with_the_column_named(tmp_path: Path) -> None:
    table = pa.table(
        {"x": pa.array([1, None, 3], pa.int32()), "s": ["a", "b", None], "l": [[1], [2, None], [3]]}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    samples, reason = read_unit(ParquetSource(tmp_path))
    assert [key for key, _ in samples] == ["a.parquet#0"]
    assert samples[0][1]["x"].dtype == np.int32
    assert "2 problems, the first: row 1: column 'x' is null" in reason
    assert "row 1: column 'l' holds a null" in read_unit(ParquetSource(tmp_path, columns=["l"]))[1]
    assert read_unit(ParquetSource(tmp_path, columns=["s"]))[1].endswith("row 2: column 's' is null")


@pytest.mark.parametrize("option", ["nulls", "fields"])
@pytest.mark.parametrize("value", [0.5, math.nan])
def test_a_float_for_nulls_among_integers_makes_all_of_them_floats(
    tmp_path: Path, option: Any, value: float
) -> None:
    pq.write_table(pa.table({"age": pa.array([1, None, 3, 4])}), tmp_path / "a.parquet", row_group_size=2)
    options: dict[str, Any] = {option: {"age": value}}
    found = [sample["age"] for sample in read_all(ParquetSource(tmp_path, **options)).values()]
    np.testing.assert_array_equal(found, [1.0, value, 3.0, 4.0])
    assert all(isinstance(one, float) for one in found)


def test_a_value_for_nulls_that_the_column_cannot_hold_is_an_error_at_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"age": pa.array([1, None])}), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"column 'age' holds int64: '\?' cannot stand for its nulls .*fields="
    ):
        ParquetSource(tmp_path, fields={"age": "?"})


def test_nulls_can_be_given_a_value(tmp_path: Path) -> None:
    table = pa.table(
        {
            "x": pa.array([1, None], pa.int32()),
            "s": ["a", None],
            "l": pa.array([[1], None], pa.list_(pa.int64())),
            "st": pa.array([{"a": 1.5}, None], pa.struct({"a": pa.float32()})),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    nulls = {"x": -1, "s": "", "l": np.zeros(0, np.int64), "st.a": 0}
    sample = read_all(ParquetSource(tmp_path, nulls=nulls))["a.parquet#1"]
    assert (sample["x"], sample["x"].dtype, sample["s"], sample["l"].shape) == (-1, np.int32, "", (0,))
    assert (sample["st.a"], sample["st.a"].dtype) == (0, np.float32)


def test_lists_that_make_no_array_leave_their_row_out(tmp_path: Path) -> None:
    pq.write_table(pa.table({"m": [[[1], [2]], [[1, 2], [3]], [[4, 5]]]}), tmp_path / "a.parquet")
    samples, reason = read_unit(ParquetSource(tmp_path))
    assert [key for key, _ in samples] == ["a.parquet#0", "a.parquet#2"]
    assert (
        "row 1: column 'm' holds lists of 1 to 2 values, which make no array: choose others with columns=[…]"
        in reason
    )


# --- what is fetched ---------------------------------------------------------------------------


def wide_table(rows: int, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    return pa.table(
        {
            "small": generator.integers(0, 1 << 40, rows),
            "large": [generator.bytes(2000) for _ in range(rows)],
            "other": generator.normal(size=rows),
        }
    )


@pytest.mark.e2e
def test_only_the_chosen_columns_are_fetched(tmp_path: Path, fetched: list[int]) -> None:
    pq.write_table(wide_table(2000), tmp_path / "a.parquet", row_group_size=500, compression="none")
    source = ParquetSource(tmp_path, columns=["small", "other"])
    assert source.num_units == 4
    fetched.clear()
    assert len(list(source.read(2, RNG))) == 500
    assert 500 * 16 <= sum(fetched) < 500 * 16 * 1.3 + 2000
    fetched.clear()
    assert len(list(ParquetSource(tmp_path).read(2, RNG))) == 500
    assert sum(fetched) > 500 * 2000


@pytest.mark.e2e
def test_a_large_row_group_comes_in_pieces_and_batches(
    tmp_path: Path, fetched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "PREFETCH_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "PIECE_BYTES", 1 << 18)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 1 << 18)
    table = wide_table(10_000)
    pq.write_table(table, tmp_path / "a.parquet", compression="none", data_page_size=1 << 16)
    source = ParquetSource(tmp_path)
    fetched.clear()
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    arrow_peak = 0
    try:
        for number, (_, sample) in enumerate(source.read(0, RNG)):
            arrow_peak = max(arrow_peak, pa.total_allocated_bytes() - before)
            assert sample["large"] == table["large"][number].as_py()
            if number == 100:
                assert sum(fetched) < 4 << 20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert number == 9999
    assert peak + arrow_peak < 8 << 20  # of 20 MB


def open_files() -> set[int]:
    """Return the ids of the files for pyarrow that are in memory, each with a row group."""
    gc.collect()
    # By type: isinstance asks each object for its class, and some objects of torch warn then.
    return {id(one) for one in gc.get_objects() if issubclass(type(one), SeekableFile)}


@pytest.mark.e2e
def test_nothing_of_a_row_group_stays_in_memory(tmp_path: Path) -> None:
    pq.write_table(wide_table(1000), tmp_path / "a.parquet", row_group_size=100)
    source = ParquetSource(str(tmp_path))
    before = open_files()
    assert len(read_all(source)) == 1000
    assert open_files() <= before


def test_footers_are_read_again_when_too_many_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachestream.sources.format.KEPT_BYTES", 2000)
    for number in range(6):
        pq.write_table(pa.table({"x": [number]}), tmp_path / f"{number}.parquet")
    source = ParquetSource(tmp_path)
    assert [sample["x"] for sample in read_all(source).values()] == list(range(6))
    assert len(source._kept._values) < 6


# --- files, the protocol -----------------------------------------------------------------------


def test_files_are_chosen_by_their_ending_and_rows_numbered_within_each(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"x": range(5)}), tmp_path / name / "t.parquet", row_group_size=2)
    (tmp_path / "README.md").write_text("not a table")
    source = open_source(f"{tmp_path}/*/*.parquet")
    assert isinstance(source, ParquetSource)
    assert (source.num_units, source.num_rows) == (6, 10)
    assert list(read_all(source)) == [f"{name}/t.parquet#{row}" for name in "ab" for row in range(5)]
    assert ParquetSource(tmp_path).num_units == 6
    assert type(open_source(tmp_path / "a" / "t.parquet", columns=["x"])) is ParquetSource
    copy = pickle.loads(pickle.dumps(source))
    assert read_all(copy) == read_all(source)


@pytest.mark.e2e
def test_a_parquet_source_keeps_the_protocol(tmp_path: Path) -> None:
    pq.write_table(wide_table(60), tmp_path / "a.parquet", row_group_size=20)
    rows: list[dict[str, Any] | None] = [{"bytes": png(i), "path": None} for i in range(9)]
    rows[5] = None
    pq.write_table(hugging_face(rows), tmp_path / "b.parquet", row_group_size=4)
    check_source(lambda: ParquetSource(tmp_path / "a.parquet"))
    check_source(lambda: ParquetSource(tmp_path / "b.parquet", decode_images=True))


def test_options_that_cannot_work_are_config_errors(tmp_path: Path) -> None:
    table = pa.table(
        {
            "x": [1],
            "n": pa.nulls(1),
            "l": pa.array([[("a", b"a")]], pa.map_(pa.string(), pa.binary())),
            "s": pa.array([{"a": 1}]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"columns": ["y"]}, "no column 'y'; there are x, n, l, s"),
        ({"columns": ["s.b"]}, "no column 's.b'"),
        ({"columns": ["x.b"]}, "no column 'x.b'"),
        ({"nulls": {"y": 0}}, "nulls= names 'y'; the fields are x, n, l, s.a"),
        ({"decode_images": ["s"]}, "decode_images= names 's'; the fields are x"),
        ({"columns": "x"}, "give a list of names"),
        ({"columns": []}, "give a list of names"),
        ({"columns": ["n"]}, "nothing but nulls"),
        ({"columns": ["l"]}, "has no form as a field"),
        ({}, "leave it out with columns="),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            ParquetSource(tmp_path, **options)
    pq.write_table(pa.table({"x": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="no rows"):
        ParquetSource(tmp_path)


DOUBLED: Final = [
    (pa.table({"a.b": [1, 2], "a": [{"b": 5}, {"b": 6}], "c": [7, 8]}), "a.b"),
    (
        pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4]), pa.array([7, 8])], names=["x", "x", "c"]),
        "x",
    ),
]


@pytest.mark.parametrize(("table", "name"), DOUBLED, ids=["a.b", "x"])
def test_columns_that_become_one_field_are_refused_unless_they_are_left_out(
    tmp_path: Path, table: pa.Table, name: str
) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    for columns in (None, [name], [name[0], "c"]):
        with pytest.raises(ConfigError, match=f"a.parquet: several columns become the field '{name}'"):
            ParquetSource(tmp_path, columns=columns)
    samples = read_all(ParquetSource(tmp_path, columns=["c"])).values()
    assert [dict(sample) for sample in samples] == [{"c": 7}, {"c": 8}]


@pytest.mark.parametrize("kind", ["list_view", "large_list_view"])
def test_a_column_that_no_row_can_be_read_from_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    views = pa.array([[1, 2], [3]], getattr(pa, kind)(pa.int32()))
    pq.write_table(
        pa.table({"s": pa.StructArray.from_arrays([views], ["v"]), "c": [7, 8]}), tmp_path / "a.parquet"
    )
    with pytest.raises(ConfigError, match=r"column 's.v' \(.*\) has no form as a field"):
        ParquetSource(tmp_path)
    assert len(read_all(ParquetSource(tmp_path, columns=["c"]))) == 2


@pytest.mark.e2e
def test_pyarrow_is_named_where_it_is_missing_and_loaded_only_when_needed(tmp_path: Path) -> None:
    script = """
import sys
import cachestream.sources.open as remote
assert "pyarrow" not in sys.modules
sys.modules["pyarrow"] = None
try:
    remote.open_source("x.parquet")
except remote.ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pip install 'cachestream[parquet]'" in done.stdout


def test_a_file_that_is_replaced_is_read_as_it_is_now_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": range(10)}), path, row_group_size=5)
    source = ParquetSource(path)
    pq.write_table(pa.table({"x": range(100, 110), "new": ["text"] * 10}), path, row_group_size=5)
    for _ in range(2):
        try:
            assert [sample["x"] for _, sample in source.read(1, RNG)] == list(range(105, 110))
        except CacheStreamError as error:
            assert "overwritten" in str(error)  # noqa: PT017  the first time alone
    pq.write_table(pa.table({"y": range(7)}), path)
    reasons = []
    for _ in range(2):
        with pytest.raises(CacheStreamError) as caught:
            list(source.read(1, RNG))
        reasons.append(str(caught.value))
    assert "replaced by another table" in reasons[-1]


# --- damage ------------------------------------------------------------------------------------

FUZZ: Final = """
import resource, sys
import numpy as np
from pathlib import Path
from cachestream.errors import CacheStreamError
from cachestream.formats.parquet import ParquetSource
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
path = Path(sys.argv[1])
whole = path.read_bytes()
came = refused = 0
for seed in range(int(sys.argv[2])):
    rng = np.random.default_rng(seed)
    broken = bytearray(whole)
    if seed % 4 == 0:
        del broken[int(rng.integers(0, len(whole))):]
    else:
        for _ in range(int(rng.integers(1, 4))):
            near_end = rng.random() < 0.5
            at = int(rng.integers(len(whole) - 1200, len(whole)) if near_end else rng.integers(0, len(whole)))
            broken[at] ^= 1 << int(rng.integers(0, 8))
    path.write_bytes(broken)
    try:
        source = ParquetSource(path, columns=["small", "l", "s"])
        for unit in range(source.num_units):
            for _ in source.read(unit, rng):
                came += 1
    except CacheStreamError as error:
        assert "a.parquet" in str(error), error
        refused += 1
print(came > 0, refused > 0)
"""


@pytest.mark.e2e
def test_damaged_files_bring_errors_of_ours_alone(tmp_path: Path) -> None:
    """In a process of its own with limited memory: pyarrow is a C++ library, and damaged files may crash it."""
    generator = np.random.default_rng(0)
    table = pa.table(
        {
            "small": generator.integers(0, 9, 300),
            "l": [list(range(int(n))) for n in generator.integers(0, 5, 300)],
            "s": [str(n) for n in generator.integers(0, 99, 300)],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100, write_page_checksum=True)
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(tmp_path / "a.parquet"), "300"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr[-3000:]


@pytest.mark.e2e
def test_damaged_metadata_of_a_column_chunk_do_not_end_the_process(tmp_path: Path) -> None:
    """`RowGroupMetaData.column` of pyarrow aborts it, for example if a histogram of levels is too long."""
    pq.write_table(pa.table({"l": [[1], [2, 3]] * 50}), tmp_path / "a.parquet")
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    histogram = whole.find(b"\x26\xc8\x01\x64")  # of repetition levels: two values, 100 and 50
    assert histogram > 0, "pyarrow writes no size statistics, which are damaged here: damage something else"
    whole[histogram : histogram + 4] = b"\x36\x02\x02\x02"  # three values
    (tmp_path / "a.parquet").write_bytes(whole)
    read = f"""
import numpy as np
from cachestream.errors import SampleError
from cachestream.formats.parquet import ParquetSource
try:
    list(ParquetSource({str(tmp_path)!r}).read(0, np.random.default_rng(0)))
except SampleError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", read], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "a.parquet: malformed: " in done.stdout


@pytest.mark.parametrize("content", [b"", b"PAR1", b"garbage" * 100, b"x" * 100 + b"\xff\xff\xff\x7fPAR1"])
def test_what_is_no_parquet_file_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(SampleError, match=r"a\.parquet: (not a Parquet file|malformed)"):
        ParquetSource(tmp_path)


# --- S3 ----------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_row_groups_are_read_from_s3_in_few_requests(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, fetched: list[int]
) -> None:
    table = wide_table(3000)
    pq.write_table(table, s3_bucket / "a.parquet", row_group_size=1000, compression="none")
    source = ParquetSource(
        f"s3://{s3_bucket.name}",
        storage_options=s3_server.options_through(s3_proxy.port),
        columns=["small", "other"],
    )
    s3_proxy.requests = 0
    fetched.clear()
    samples = [sample for unit in range(3) for _, sample in source.read(unit, RNG)]
    assert [sample["small"] for sample in samples] == table["small"].to_pylist()
    assert s3_proxy.requests == 3 * 2  # the columns lie far apart
    assert sum(fetched) < 3000 * 16 * 1.3 + 3 * 2000
    (s3_bucket / "a.parquet").unlink()
    with pytest.raises(SourceError, match=rf"s3://{s3_bucket.name}/a\.parquet: not found"):
        list(source.read(0, RNG))


@pytest.mark.e2e
def test_a_file_smaller_than_the_end_that_is_asked_for_is_read_from_s3(
    s3_server: S3Server, s3_bucket: Path
) -> None:
    pq.write_table(pa.table({"x": [0, 1, 2]}), s3_bucket / "small.parquet")
    (s3_bucket / "empty.parquet").write_bytes(b"")
    options = s3_server.storage_options
    source = ParquetSource(f"s3://{s3_bucket.name}/small.parquet", storage_options=options)
    assert [int(sample["x"]) for sample in read_all(source).values()] == [0, 1, 2]
    with pytest.raises(SampleError, match=r"empty\.parquet: not a Parquet file"):
        ParquetSource(f"s3://{s3_bucket.name}/empty.parquet", storage_options=options)


@pytest.mark.e2e
def test_an_outage_in_a_row_group_is_unavailable_and_secrets_show_nowhere(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path
) -> None:
    pq.write_table(wide_table(100), s3_bucket / "a.parquet", row_group_size=50)
    source = ParquetSource(
        f"s3://{s3_bucket.name}/a.parquet", storage_options=s3_server.options_through(s3_proxy.port)
    )
    shown = [repr(source), source.fingerprint]
    s3_proxy.refuse()
    with pytest.raises(SourceError, match="does not answer at present") as caught:
        list(source.read(1, RNG))
    shown += [str(caught.value), repr(caught.value.__cause__)]
    s3_proxy.heal()
    shown += [key for key, _ in source.read(1, RNG)]
    assert len(shown) == 54
    assert not [text for text in shown if "CANARY" in text]


@pytest.mark.e2e
def test_a_row_group_whose_pieces_do_not_come_does_not_stay_in_memory(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "PREFETCH_BYTES", 0)
    pq.write_table(wide_table(100), s3_bucket / "a.parquet", row_group_size=50)
    source = ParquetSource(
        f"s3://{s3_bucket.name}/a.parquet", storage_options=s3_server.options_through(s3_proxy.port)
    )
    before = open_files()
    s3_proxy.refuse()
    for unit in range(2):
        with pytest.raises(SourceError, match="does not answer at present"):
            list(source.read(unit, RNG))
    assert open_files() <= before
