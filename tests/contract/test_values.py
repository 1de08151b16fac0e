"""A value is stored whole, converted as documented, or refused: no part of it is lost without a word."""

import datetime as dt
import decimal
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import cachestream as cs


def read(source: Any) -> list[dict[str, Any]]:
    return [
        sample
        for unit in range(source.num_units)
        for _, sample in source.read(unit, np.random.default_rng(0))
    ]


# --- what samples hold ---------------------------------------------------------------------------


class Quantity(np.ndarray):
    """An array with a unit, as astropy and unyt have them."""

    unit = "m"


REFUSED: dict[str, tuple[Any, str]] = {
    "masked": (np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]), "a mask: store .filled"),
    "masked inside": ([np.ma.array([1.0, 2.0], mask=[False, True])], "a mask: store .filled"),
    "unit": (np.ones(3).view(Quantity), "the unit m: store the numbers alone"),
    "frame": (pd.DataFrame({"a": [1], "b": [1.5]}), "named columns: store a dict of them"),
    "table": (pa.table({"a": [1]}), "named columns: store a dict of them"),
    "nullable": (pd.Series([1, None], dtype="Int64"), "nulls: fill them"),
    "arrow": (pa.array([1, None]), "nulls: fill them"),
    "large": ([2**53 + 1, 0.5], "integers that no float64 holds exactly"),
    "signs": ([2**64 - 1, -1], "integers that no float64 holds exactly"),
    "times": (np.array(["2020-01-01"], "M8[D]"), "of dtype datetime64"),
    "spans": ([np.timedelta64(3, "s")], "of dtype timedelta64"),
    "decimal": (decimal.Decimal("1.1"), "a Decimal"),
    "objects": (np.array([1, "a"], object), "of dtype object"),
    "long": (np.longdouble(1), "of dtype float128"),
    "grad": ([torch.ones(2, requires_grad=True)], "detach"),
    "none": (None, "is None"),
}
STORED: dict[str, tuple[Any, list[float]]] = {
    "list": ([1, 2.5, 3], [1, 2.5, 3]),
    "no element masked": (np.ma.array([1.0, 2.0, 3.0]), [1, 2, 3]),
    "view": (np.arange(3.0).data, [0, 1, 2]),
    "series": (pd.Series([1.0, 2.0, 3.0], index=[7, 8, 9]), [1, 2, 3]),
    "exact": ([2**53, 0.5, 2], [2**53, 0.5, 2]),
    "nan": ([float("nan"), 1.0, 2.0**60], [float("nan"), 1.0, 2.0**60]),
}


class Values(torch.utils.data.Dataset[dict[str, Any]]):
    names = (*STORED, *REFUSED)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"name": self.names[i], "x": (STORED | REFUSED)[self.names[i]][0]}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Mapping[str, str]]]:
    """The values that a worker has stored, and the reasons for which it refused others, by name."""
    with cs.Cache(tmp_path_factory.mktemp("values") / "cache", size_limit="10MB") as cache:
        with cs.start_worker(cache, Values(), num_workers=1) as worker:
            worker.wait(timeout_s=60)
        with cache.snapshot() as cached:
            stored = {sample["name"]: sample["x"] for sample in (cached[i] for i in range(len(cached)))}
        reasons = [failure.reason for failure in cache.status().failures for _ in range(failure.count)]
        yield stored, {"all": "\n".join(reasons), "count": str(len(reasons))}


@pytest.mark.parametrize("name", STORED)
def test_a_value_that_is_stored_is_stored_whole(name: str, values: Any) -> None:
    assert np.array_equal(values[0][name].numpy(), STORED[name][1], equal_nan=True)


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_would_lose_a_part_is_refused_with_the_remedy(name: str, values: Any) -> None:
    assert name not in values[0]
    assert REFUSED[name][1] in values[1]["all"]


def test_every_refused_value_is_counted(values: Any) -> None:
    assert values[1]["count"] == str(len(REFUSED))


def test_integers_beside_floats_of_32_bits_are_refused_if_these_do_not_hold_them(tmp_path: Path) -> None:
    arrays = [np.array([0.5, 1.5], np.float32)] * 40 + [np.array([3, 2**24 + 1])] + [np.array([3, 2**24])]
    cache = cs.Cache(tmp_path / "cache", size_limit="10MB")
    with cs.start_worker(cache, [{"x": x} for x in arrays], num_workers=1) as worker:
        worker.wait(timeout_s=60)
    assert cache.num_samples == 41
    (failure,) = cache.status().failures
    assert (failure.count, "no float32 holds exactly" in failure.reason) == (1, True)


# --- nested values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [np.arange(3.0), torch.ones(2), b"\xff\xd8", dt.date(2020, 1, 1), decimal.Decimal("1.1"), {1: "a"}],
)
def test_a_list_of_dicts_is_refused_for_what_json_does_not_hold(value: Any) -> None:
    source = cs.DatasetSource([{"objects": [{"name": "cat", "value": value}]}])
    with pytest.raises(cs.SampleError, match=r"field 'objects' has no form as JSON: .*fields of their own"):
        read(source)


def test_a_key_that_is_no_text_is_refused_however_deep_it_lies() -> None:
    source = cs.DatasetSource([{"objects": [{"name": ("cat", [{"parts": {"a": {1: "b"}}}])}]}])
    with pytest.raises(cs.SampleError, match="keys must be str, not 1"):
        read(source)


def test_numbers_of_numpy_in_a_list_of_dicts_are_numbers_of_json() -> None:
    record = {"id": np.int64(3), "score": np.float32(0.5), "is_crowd": np.bool_(True), "name": "cat"}
    (sample,) = read(cs.DatasetSource([{"objects": [record]}]))
    assert json.loads(sample["objects"]) == [{"id": 3, "score": 0.5, "is_crowd": True, "name": "cat"}]


def test_a_name_with_a_dot_and_a_member_of_a_dict_do_not_replace_each_other(tmp_path: Path) -> None:
    with pytest.raises(cs.SampleError, match=r"field 'a\.b' comes twice"):
        read(cs.DatasetSource([{"a.b": 1, "a": {"b": 2}}]))
    (tmp_path / "x.jsonl").write_text('{"a.b": 1, "a": {"b": 2}}\n')
    with pytest.raises(cs.SampleError, match=r"field 'a\.b' comes twice"):
        read(cs.open_source(str(tmp_path / "x.jsonl")))


def test_a_null_in_a_json_file_is_no_text_and_takes_the_default(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"caption": null, "id": 1}')
    source = cs.open_source(str(tmp_path / "x.json"), fields={"caption": ""})
    assert read(source) == [{"caption": "", "id": 1}]


def test_an_empty_array_among_json_files_of_objects_has_no_samples(tmp_path: Path) -> None:
    for name, text in {"a": '[{"id": 1}, {"id": 2}]', "b": "[]", "c": '[{"id": 3}]'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    assert read(cs.open_source(str(tmp_path))) == [{"id": 1}, {"id": 2}, {"id": 3}]


# --- columns of tables ---------------------------------------------------------------------------

STAMP, TIME = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc), pa.timestamp("ms", "UTC")


def column(tmp_path: Path, array: Any) -> Any:
    pq.write_table(pa.table({"x": array}), tmp_path / "x.parquet")
    (sample,) = read(cs.open_source(str(tmp_path / "x.parquet")))
    return sample["x"]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[("a", b"\xff")]], pa.map_(pa.string(), pa.binary())),
        pa.array([[("a", [b"\xff"])]], pa.map_(pa.string(), pa.list_(pa.binary()))),
        pa.array([[{"a": [b"\xff"]}]]),
    ],
    ids=lambda array: str(array.type),
)
def test_a_column_of_binary_inside_maps_and_lists_is_refused(tmp_path: Path, array: Any) -> None:
    with pytest.raises(cs.ConfigError, match="has no form as a field: leave it out with columns="):
        column(tmp_path, array)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([[STAMP, STAMP]], pa.list_(TIME)), [1577836800000] * 2),
        (pa.array([[decimal.Decimal("1.5")]], pa.list_(pa.decimal128(5, 2))), [1.5]),
    ],
    ids=["times", "decimals"],
)
def test_lists_of_times_and_decimals_are_arrays_of_the_numbers_that_columns_of_them_are(
    tmp_path: Path, array: Any, expected: Any
) -> None:
    assert column(tmp_path, array).tolist() == expected


def test_times_and_decimals_in_structs_and_maps_are_the_same_numbers_in_json(tmp_path: Path) -> None:
    structs = pa.list_(pa.struct([("at", TIME), ("price", pa.decimal128(5, 2)), ("day", pa.date32())]))
    value = {"at": STAMP, "price": decimal.Decimal("1.5"), "day": dt.date(1970, 1, 3)}
    assert json.loads(column(tmp_path, pa.array([[value]], structs))) == [
        {"at": 1577836800000, "price": 1.5, "day": 2}
    ]
    pairs = pa.array([[(STAMP, "a"), (STAMP, "b")]], pa.map_(TIME, pa.string()))
    assert json.loads(column(tmp_path, pairs)) == [[1577836800000, "a"], [1577836800000, "b"]]
