"""Optional fields: a default for what is missing, in each source that makes dicts; and the advice that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tfrecord import TFRecordWriter

import cachestream as cs
from cachestream import Cache, ConfigError
from cachestream.sources.base import Rows
from cachestream.sources.fields import Defaults
from cachestream.storage.status import remedy_for_skipped
from cachestream.storage.tables import FailureRow
from tests.sources.tars import tar_bytes

RNG = np.random.default_rng(0)
CAPTIONS = ["a", "", "c", ""]
FIELDS: dict[str, Any] = {"caption": ""}


def files(folder: Path) -> Any:
    for i, caption in enumerate(CAPTIONS):
        value = {"i": i, "caption": caption} if caption else {"i": i}
        (folder / f"{i}.json").write_text(json.dumps(value))
    return folder


def tars(folder: Path) -> Any:
    members = [("0.i.id", b"0"), ("0.caption", b"a"), ("1.i.id", b"1")]
    (folder / "a.tar").write_bytes(tar_bytes(members))
    (folder / "b.tar").write_bytes(tar_bytes([("2.caption", b"c"), ("2.i.id", b"2"), ("3.i.id", b"3")]))
    return folder


def parquet(folder: Path) -> Any:
    pq.write_table(pa.table({"i": [0, 1], "caption": ["a", None]}), folder / "a.parquet")
    pq.write_table(pa.table({"i": [2], "caption": ["c"]}), folder / "b.parquet")
    pq.write_table(pa.table({"i": [3]}), folder / "c.parquet")
    return folder


def tfrecords(folder: Path) -> Any:
    writer = TFRecordWriter(str(folder / "a.tfrecord"))
    for i, caption in enumerate(CAPTIONS):
        example = {"i": (i, "int"), "caption": (caption.encode(), "byte")} if caption else {"i": (i, "int")}
        writer.write(example)
    writer.close()
    return folder


def lines(folder: Path) -> Any:
    (folder / "a.jsonl").write_text('{"i": 0, "caption": "a"}\n{"i": 1, "caption": null}\n')
    (folder / "b.jsonl").write_text('{"i": 2, "caption": "c"}\n{"i": 3}\n')
    return folder


def dataset(folder: Path) -> Any:
    return [{"i": 0, "caption": "a"}, {"i": 1, "caption": None}, {"i": 2, "caption": "c"}, {"i": 3}]


def iterable(folder: Path) -> Any:
    return lambda shard, shards: iter(dataset(folder)[shard::shards])


@pytest.mark.e2e
@pytest.mark.parametrize("make", [files, tars, parquet, tfrecords, lines, dataset, iterable])
def test_samples_that_lack_a_field_get_its_default_and_all_are_cached(tmp_path: Path, make: Any) -> None:
    (tmp_path / "data").mkdir()
    what, fields = make(tmp_path / "data"), FIELDS
    if make is tars:
        source: Any = cs.TarSource(
            what, fields=fields, decoders={"caption": lambda data: bytes(data).decode()}
        )
    elif make is tfrecords:
        source = cs.TFRecordSource(what, fields=fields, features={"i": "scalar", "caption": "str"})
    elif make is iterable:
        source = cs.IterableSource(what, fields=fields)
    else:
        source = cs.open_source(what, fields=fields)
    assert "caption" in source.fingerprint
    with (
        Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1) as worker,
    ):
        assert worker.wait(120)
        assert cache.status().failures == ()
        with cache.snapshot() as cached:
            found = {
                int(cached[i].get("i", cached[i].get("i.id"))): cached[i]["caption"]
                for i in range(len(cached))
            }
    assert found == dict(enumerate(CAPTIONS))


def test_an_empty_list_whose_type_nothing_tells_takes_the_default(tmp_path: Path) -> None:
    values: list[Any] = [{"tags": ["a"], "o": {"boxes": [[1, 2, 3, 4]]}}, {"tags": [], "o": {"boxes": []}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    fields = {"tags": "[]", "o.boxes": np.zeros((0, 4), np.int64)}
    for what in (str(tmp_path / "a.jsonl"), values, lambda _shard, _shards: iter(values)):
        opened: Any = cs.IterableSource if callable(what) else cs.open_source
        source = opened(what, fields=fields)
        units = range(source.num_units)
        found = [sample for unit in units for _, sample in source.read(unit, RNG)]
        assert [sample["tags"] for sample in found] == ['["a"]', "[]"]
        assert [np.shape(sample["o.boxes"]) for sample in found] == [(1, 4), (0, 4)]


def test_a_null_in_place_of_an_object_takes_the_defaults_of_its_members(tmp_path: Path) -> None:
    values: list[Any] = [{"i": 0, "o": {"x": 1, "y": "a"}}, {"i": 1, "o": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    for what in (str(tmp_path / "a.jsonl"), values):
        source = cs.open_source(what, fields={"o.x": -1, "o.y": ""})
        found = [sample for unit in range(source.num_units or 0) for _, sample in source.read(unit, RNG)]
        assert found == [{"i": 0, "o.x": 1, "o.y": "a"}, {"i": 1, "o.x": -1, "o.y": ""}]


def test_an_object_without_members_is_no_field(tmp_path: Path) -> None:
    values: list[Any] = [{"i": 0, "o": {"x": "a"}}, {"i": 1, "o": {}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    for what in (str(tmp_path / "a.jsonl"), values):
        source = cs.open_source(what, fields={"o.x": ""})
        found = [sample for unit in range(source.num_units or 0) for _, sample in source.read(unit, RNG)]
        assert found == [{"i": 0, "o.x": "a"}, {"i": 1, "o.x": ""}]


def test_a_float_as_default_makes_integers_floats_also_in_columns() -> None:
    defaults = Defaults({"score": 0.0, "name": "none", "n": 1})
    assert defaults.fill({"score": 2, "n": 2.5}) == {"score": 2.0, "name": "none", "n": 2.5}
    assert type(defaults.fill({"score": True})["score"]) is float
    assert defaults.fill((1, 2)) == (1, 2)
    rows = defaults.fill_rows(Rows(["a", "b"], {"score": np.array([1, 2])}))
    columns: dict[str, Any] = dict(rows.fields)
    assert (columns["score"].dtype, columns["name"], columns["n"].tolist()) == (
        np.float64,
        ["none"] * 2,
        [1, 1],
    )
    with pytest.raises(ConfigError, match=r"fields= is a list: give a dict, such as \{'caption': ''\}"):
        cs.DatasetSource([1], fields=["caption"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("files:/data", ("extensions=", "fields=")),
        ("tars:/data", ("fields=",)),
        ("tfrecords:/data", ("features=", "fields=")),
        ("parquet:/data", ("columns=", "fields=")),
        ("mds:/data", ("columns=",)),
        ("dataset:Mine[3]", ("fields=",)),
        ("lines:/data", ("fields=",)),
        ("function:draw", ()),
        ("", ()),
    ],
)
def test_the_advice_of_a_mismatch_names_what_the_source_takes(source: str, words: tuple[str, ...]) -> None:
    advice = remedy_for_skipped([FailureRow("schema", "fields differ", 3, "a")], source)
    options = {word for word in ("extensions=", "features=", "columns=", "fields=") if word in advice}
    assert options == set(words)
    assert "transform=" in advice
    assert "transform=" not in remedy_for_skipped([FailureRow("sample", "torn", 3, "a")], source)
