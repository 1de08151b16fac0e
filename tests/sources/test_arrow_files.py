"""Folders of `save_to_disk`, Arrow files and Hugging Face's datasets give the same rows as Parquet."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cachestream import (
    ArrowSource,
    ConfigError,
    DatasetSource,
    IterableSource,
    ParquetSource,
    SampleError,
    TarSource,
    TFRecordSource,
)
from cachestream.sources.open import open_source
from cachestream.testing.checks import check_source
from tests.sources.tars import tar_bytes
from tests.support.later import Later

if TYPE_CHECKING:
    import datasets
else:
    datasets = Later("datasets")

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="needs datasets")
RNG = np.random.default_rng(0)
FIELDS = {"n": -1, "m.v": "none", "texts": "[]"}


def png(level: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((4, 6, 3), level, np.uint8)).save(data, "png")
    return data.getvalue()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        "tqdm.std.tqdm.monitor_interval", 0
    )  # no monitor thread, which would outlive the test
    features = datasets.Features(
        {
            "i": datasets.Value("int64"),
            "texts": datasets.List(datasets.Value("string")),
            "numbers": datasets.List(datasets.Value("int64")),
            "m": {"u": datasets.Value("float64"), "v": datasets.Value("string")},
            "more": datasets.List({"x": datasets.Value("int64")}),
            "n": datasets.Value("int64"),
            "image": datasets.Image(decode=False),
        }
    )
    return datasets.Dataset.from_dict(
        {
            "i": [0, 1, 2],
            "texts": [["a", "b"], [], None],
            "numbers": [[1, 2], [], [3]],
            "m": [{"u": 0.5, "v": "q"}, {"u": 1.5, "v": None}, {"u": 2.5, "v": "r"}],
            "more": [[{"x": 1}], [], [{"x": 2}, {"x": 3}]],
            "n": [5, None, 7],
            "image": [{"bytes": png(level), "path": None} for level in range(3)],
        },
        features=features,
    )


def samples_of(source: Any) -> list[Any]:
    return [sample for unit in range(source.num_units) for _, sample in source.read(unit, RNG)]


@pytest.mark.e2e
def test_a_dataset_a_stream_and_a_saved_folder_give_what_parquet_gives(tmp_path: Path, rows: Any) -> None:
    rows.to_parquet(str(tmp_path / "a.parquet"))
    rows.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    expected = samples_of(ParquetSource(tmp_path / "a.parquet", fields=FIELDS))
    assert [sample["texts"] for sample in expected] == ['["a", "b"]', "[]", "[]"]
    assert [sample["m.v"] for sample in expected] == ["q", "none", "r"]
    assert expected[0]["image"].shape == (3, 4, 6)
    saved = open_source(tmp_path / "saved", fields=FIELDS)
    assert type(saved) is ArrowSource
    assert saved.num_units == 2
    for source in (
        saved,
        DatasetSource(rows, fields=FIELDS),
        IterableSource(rows.to_iterable_dataset(), fields=FIELDS),
    ):
        for found, wanted in zip(samples_of(source), expected, strict=True):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert np.array_equal(found[name], value), name
                assert np.asarray(found[name]).dtype == np.asarray(value).dtype, name


def test_a_row_with_a_null_is_skipped_as_in_parquet(tmp_path: Path, rows: Any) -> None:
    rows.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(SampleError, match=r"column 'm\.v' is null"):
        samples_of(open_source(tmp_path / "saved"))


@pytest.mark.e2e
def test_what_map_keeps_beside_is_no_data_and_splits_are_to_be_chosen(tmp_path: Path, rows: Any) -> None:
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "all"))
    loaded = datasets.load_from_disk(str(tmp_path / "all"))["train"]
    loaded.map(lambda row: {"j": row["i"]}, load_from_cache_file=False)
    assert list((tmp_path / "all/train").glob("cache-*.arrow"))
    with pytest.raises(ConfigError, match=r"holds the splits of a DatasetDict.*one of them: test, train"):
        open_source(tmp_path / "all")
    source = open_source(tmp_path / "all/train", columns=["i"])
    assert [sample["i"] for sample in samples_of(source)] == [0, 1, 2]
    check_source(source)
    with pytest.raises(SampleError, match="no column 'j'; there are i, texts"):
        samples_of(open_source(tmp_path / "all/train", columns=["j"]))


@pytest.mark.parametrize("write", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_files_with_and_without_an_index_are_read(tmp_path: Path, write: Any) -> None:
    table = pa.table({"i": list(range(1000)), "x": [[float(i)] * 3 for i in range(1000)]})
    with write(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    source = open_source(str(tmp_path / "a.arrow"))
    assert [int(sample["i"]) for sample in samples_of(source)] == list(range(1000))
    torn = (tmp_path / "a.arrow").read_bytes()[:-9000]
    (tmp_path / "torn.arrow").write_bytes(torn)
    with pytest.raises(SampleError, match=r"torn\.arrow"):
        samples_of(open_source(str(tmp_path / "torn.arrow")))


def test_a_text_that_is_no_utf_8_makes_its_file_malformed(tmp_path: Path) -> None:
    ends = pa.array([0, 2], pa.int32()).buffers()[1]
    texts = pa.StringArray.from_buffers(1, ends, pa.py_buffer(b"\xff\xfe"))
    batch = pa.record_batch([texts], names=["text"])
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(SampleError, match=r"a\.arrow: malformed: .*UTF8"):
        samples_of(ArrowSource(tmp_path / "a.arrow"))


def test_numbered_files_without_an_ending_are_told_by_how_they_begin(tmp_path: Path) -> None:
    tfrecord = pytest.importorskip("tfrecord")
    made: dict[str, Any] = {}
    for number in range(2):
        name = f"train-{number:05d}-of-00002"
        for kind in ("tfrecord", "parquet", "arrow", "tar", "other"):
            (tmp_path / kind).mkdir(exist_ok=True)
        pq.write_table(pa.table({"i": [number]}), tmp_path / "parquet" / name)
        with pa.ipc.new_stream(tmp_path / "arrow" / name, pa.schema({"i": pa.int64()})) as writer:
            writer.write_table(pa.table({"i": [number]}))
        (tmp_path / "tar" / name).write_bytes(tar_bytes([("a.id", str(number).encode())]))
        (tmp_path / "other" / name).write_bytes(b"nothing that is known")
        records = tfrecord.TFRecordWriter(str(tmp_path / "tfrecord" / name))
        records.write({"i": (number, "int")})
        records.close()
    for kind, cls, field in (
        ("tfrecord", TFRecordSource, "i"),
        ("parquet", ParquetSource, "i"),
        ("arrow", ArrowSource, "i"),
        ("tar", TarSource, "id"),
    ):
        for what in (
            tmp_path / kind,
            str(tmp_path / kind / "train-*-of-00002"),
            str(tmp_path / kind / "train-*"),
        ):
            made[kind] = open_source(what)
            assert type(made[kind]) is cls, what
            assert [int(sample[field]) for sample in samples_of(made[kind])] == [0, 1]
    assert samples_of(open_source(tmp_path / "other")) == [{"data": b"nothing that is known"}] * 2


def test_what_can_only_be_iterated_is_sent_to_the_source_for_that(rows: Any) -> None:
    with pytest.raises(ConfigError, match=r"can only be iterated: give it to IterableSource\(…\)"):
        DatasetSource(rows.to_iterable_dataset())


def test_offsets_that_lead_out_of_their_buffer_are_damage_and_not_followed(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(["aaaa", "bbbb", "cccc"])})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    data = (tmp_path / "a.arrow").read_bytes()
    good, bad = (np.array(ends, np.int32).tobytes() for ends in ([0, 4, 8, 12], [0, 4, 1 << 28, 12]))
    assert data.count(good) == 1
    (tmp_path / "a.arrow").write_bytes(data.replace(good, bad))
    with pytest.raises(SampleError, match=r"a\.arrow: malformed"):
        next(iter(ArrowSource(tmp_path / "a.arrow").read(0, RNG)))
