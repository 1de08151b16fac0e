"""LitDataSource on chunks that litdata wrote (see peers/write.py), and on damaged and hostile ones."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import cachestream as cs
from cachestream.errors import ConfigError, SampleError
from cachestream.formats.litdata import LitDataSource, leaf_names, parse_nested
from cachestream.sources.open import open_source
from cachestream.testing.checks import check_source
from cachestream.transport import object_limit
from tests.sources.peers.samples import FOLDER, LITDATA_SAMPLES, edit_index, litdata_sample, picture
from tests.sources.reading import read, read_all, read_unit
from tests.support.s3 import S3Server

LITDATA: Final = FOLDER / "litdata"
PACKED: Final = ("litdata-chunk", "litdata-batch")
ROWS: Final = ("litdata-rows", "litdata-rows-zstd")
CHECKED: Final = ("litdata", "litdata-tuples", "litdata-tokens", "litdata-batch", "litdata-rows-zstd")


def need(name: str) -> Path:
    """Return the folder of a data set; skip the test if a library to read it is not installed."""
    if name in PACKED:
        pytest.importorskip("zstandard")
    if name in ROWS:
        pytest.importorskip("pyarrow")
    return FOLDER / name


def expected(number: int) -> dict[str, Any]:
    """Return the fields of sample `number`, which was given to the writer."""
    sample = litdata_sample(number)
    nested, pair, box = sample.pop("nested"), sample.pop("pair"), sample.pop("box")
    return {
        **sample,
        "nested.a_bool": nested["a_bool"],
        "nested.a_float": nested["a_float"],
        "pair.0": pair[0],
        "pair.1": pair[1],
        "box.x": np.array(box["x"]),
        "box.name": box["name"],
        "words": json.dumps(sample["words"]),
    }


def same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert set(found) <= set(wanted)
    for name, value in found.items():
        want = wanted[name]
        if isinstance(want, Image.Image):
            pixels = np.asarray(want.convert("RGB")).transpose(2, 0, 1)
            assert np.abs(value.astype(int) - pixels).mean() < (16 if name == "a_jpeg" else 0.1)
        else:
            assert np.array_equal(value, want), name
            assert getattr(value, "dtype", None) == getattr(want, "dtype", getattr(value, "dtype", None))


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(need(name), tmp_path / name))

    return copied


# --- what the library wrote --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["litdata", *PACKED, *ROWS])
def test_every_leaf_comes_back_as_it_was_given_to_the_writer_in_each_form_of_chunks(name: str) -> None:
    found = read_all(LitDataSource(need(name)))
    assert len(found) == LITDATA_SAMPLES
    per_chunk = 3 if name == "litdata" else 4
    ending = "zstd.bin" if name == "litdata-chunk" else "bin"
    for number, (key, sample) in enumerate(found):
        assert key == f"chunk-0-{number // per_chunk}.{ending}#{number % per_chunk}"
        same(sample, expected(number))
    assert set(found[0][1]) == (set(expected(0)) if name == "litdata" else set(found[1][1]))


def test_samples_that_were_tuples_or_single_values_are_so_again() -> None:
    tuples = [sample for _, sample in read_all(LitDataSource(FOLDER / "litdata-tuples"))]
    assert [(number, text) for number, _, text in tuples] == [(number, f"{number}") for number in range(5)]
    assert np.array_equal(tuples[3][1], np.asarray(picture(3)).transpose(2, 0, 1))
    bare = [sample for _, sample in read_all(LitDataSource(FOLDER / "litdata-bare"))]
    assert np.array_equal(np.stack(bare), np.arange(3)[:, None, None] * np.ones((2, 2), np.int64))


def test_tokens_come_as_they_were_given_to_the_writer() -> None:
    tokens = [sample for _, sample in read_all(LitDataSource(FOLDER / "litdata-tokens"))]
    assert [one.tolist() for one in tokens] == [list(range(3 + number)) for number in range(5)]
    assert {one.dtype for one in tokens} == {np.dtype(np.int32)}


@pytest.mark.parametrize("name", ["litdata", "litdata-rows"])
def test_only_the_fields_that_are_asked_for_are_decoded(name: str) -> None:
    source = LitDataSource(need(name), columns=["box.name", "a_str"], decoders={"a_str": bytes})
    _, sample = read_all(source)[2]
    assert sample == {"box.name": "n", "a_str": "Grüße 2" if name in ROWS else "Grüße 2".encode()}
    with pytest.raises(ConfigError, match="no field 'nothing'; there are"):
        LitDataSource(need(name), columns=["nothing"])
    with pytest.raises(ConfigError, match="columns='a_str'"):
        LitDataSource(need(name), columns="a_str")


def test_pickled_fields_are_refused_unless_the_user_unpickles_them_or_leaves_them_out() -> None:
    with pytest.raises(ConfigError, match=r"'b' is pickled.*decoders=.*pickle\.loads.*columns="):
        LitDataSource(FOLDER / "litdata-pickle")
    assert read(LitDataSource(FOLDER / "litdata-pickle", columns=["a"]), 0)[0][1] == {"a": 1}
    trusting = LitDataSource(FOLDER / "litdata-pickle", decoders={"b": lambda data: abs(pickle.loads(data))})
    assert read(trusting, 0)[0][1] == {"a": 1, "b": abs(1 + 2j)}


def test_images_are_resized_and_cropped() -> None:
    source = LitDataSource(LITDATA, columns=["a_jpeg", "a_pil"], resize=12, crop=10)
    for _, sample in read_all(source):
        assert {name: value.shape for name, value in sample.items()} == {
            "a_jpeg": (3, 10, 10),
            "a_pil": (3, 10, 10),
        }


# --- units -------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_visit", [1, 2, 100])
@pytest.mark.parametrize("name", ["litdata", "litdata-tokens"])
def test_visits_take_a_few_samples_each_and_all_of_them_together(name: str, per_visit: int) -> None:
    source = LitDataSource(FOLDER / name, samples_per_visit=per_visit)
    whole = read_all(LitDataSource(FOLDER / name))
    found = read_all(source)
    assert [key for key, _ in found] == [key for key, _ in whole]
    assert max(len(read(source, unit)) for unit in range(source.num_units)) <= per_visit


def test_a_row_whose_decoder_fails_costs_itself_alone() -> None:
    def second_fails(data: bytes) -> int:
        if len(data) == 1:
            raise ValueError("odd")
        return len(data)

    source = LitDataSource(need("litdata-rows"), decoders={"a_bytes": second_fails})
    found, reason = read_unit(source)
    assert [sample["a_bytes"] for _, sample in found] == [0, 2, 3]
    assert "sample 1: " in reason
    assert "odd" in reason


def test_visits_to_what_can_only_be_read_whole_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"compressed chunk.*leave out samples_per_visit"):
        LitDataSource(need("litdata-batch"), samples_per_visit=2)
    with pytest.raises(SampleError, match=r"Arrow table.*leave out samples_per_visit"):
        read(LitDataSource(need("litdata-rows"), samples_per_visit=2), 0)


def test_open_source_takes_the_format_and_says_so_where_it_is_needed() -> None:
    assert isinstance(open_source(LITDATA, format="litdata"), cs.LitDataSource)
    with pytest.raises(ConfigError, match="holds shards of litdata: give format='litdata'"):
        open_source(LITDATA)
    assert repr(LitDataSource(LITDATA)) == f"<LitDataSource {LITDATA}/, 3 chunks, 7 samples>"
    assert LitDataSource(LITDATA, columns=["a_str"]).fingerprint == f"litdata:{LITDATA}|columns=a_str"


def test_a_folder_of_such_folders_is_refused_and_the_one_that_is_meant_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(LITDATA, tmp_path / split)
    with pytest.raises(
        ConfigError, match="holds shards of litdata, in train/: give that folder and format='litdata'"
    ):
        open_source(tmp_path)
    assert type(open_source(tmp_path, format="files")) is cs.FileSource


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name", [*CHECKED[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in CHECKED[2:])]
)
def test_a_litdata_source_keeps_the_protocol(name: str) -> None:
    folder = need(name)
    check_source(lambda: LitDataSource(folder))


@pytest.mark.e2e
def test_a_litdata_source_over_s3_keeps_the_protocol_and_its_secrets(
    s3_server: S3Server, s3_bucket: Path
) -> None:
    shutil.copytree(LITDATA, s3_bucket / "train")
    options = s3_server.storage_options
    source = LitDataSource(f"s3://{s3_bucket.name}/train", storage_options=options, samples_per_visit=2)
    assert [key for key, _ in read_all(source)] == [key for key, _ in read_all(LitDataSource(LITDATA))]
    check_source(
        lambda: LitDataSource(f"s3://{s3_bucket.name}/train", storage_options=options),
        secrets=[s3_server.key, s3_server.secret],
    )


# --- malformed indices -------------------------------------------------------------------------


def _config(**changes: Any) -> Callable[[Any], None]:
    return lambda index: index["config"].update(changes)


def _chunk(**changes: Any) -> Callable[[Any], None]:
    return lambda index: index["chunks"][0].update(changes)


def _spec(*children: Any, kind: str = "builtins.dict", context: Any = None) -> str:
    return json.dumps([1, {"type": kind, "context": json.dumps(context), "children_spec": list(children)}])


LEAF: Final[dict[str, Any]] = {"type": None, "context": None, "children_spec": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: [], "not an object"),
        (lambda _: {"version": 2, "shards": []}, "another data set's"),
        (lambda index: index.update(chunks=[]), "names no files"),
        (lambda index: index.update(config=3), "config is '3'"),
        (_chunk(chunk_size=1 << 40), "not a number from 0"),
        (_chunk(filename="../chunk.bin"), "leads out of the folder"),
        (_chunk(filename="/chunk.bin"), "leads out of the folder"),
        (_chunk(filename="memory://chunk.bin"), "leads out of the folder"),
        (_config(encryption={"algorithm": "fernet"}), "encrypted"),
        (_config(compression="lz4"), "compressed by 'lz4'"),
        (_config(compression="zstd", compression_level="pixel"), "'pixel' at a time"),
        (_config(compression="zstd", compression_level="sample"), "'sample' at a time.*no compression_level"),
        (_config(item_loader="ParquetLoader"), "read them with ParquetSource"),
        (_config(item_loader="TemporalArrayLoader"), "TemporalArrayLoader"),
        (_config(data_format="int"), "no list of leaves"),
        (_config(data_format=[3]), "no texts"),
        (_config(data_format=["int"]), "17 leaves, and a data_format of 1"),
        (_config(data_format=["hologram"], data_spec=None), "'hologram', which is not known"),
        (_config(data_format=["no_header_tensor:10"], data_spec=None), "the type number 10"),
        (_config(data_format=["no_header_numpy:x"], data_spec=None), "no_header_numpy:x"),
        (_config(data_format=["no_header_numpy:-1"], data_spec=None), "the type number -1"),
        (_config(data_format=["int"], data_spec="[2, {}]"), "protocol 2"),
        (_config(data_format=["int"], data_spec="{"), "index.json: "),
        (_config(data_format=["int"], data_spec=_spec(LEAF, context=["a", "b"])), "index.json: "),
        (_config(data_format=["int"] * 2, data_spec=_spec(LEAF, LEAF, context=["a", "a"])), "2 leaves"),
        (_config(data_format=["int"], data_spec="[1, " * 5000), "index.json: "),
        (lambda index: index["config"].pop("data_format") and None, "'data_format' is missing"),
    ],
)
def test_an_index_that_cannot_be_used_is_a_config_error_that_names_it(
    copy: Callable[[str], Path], change: Any, message: str
) -> None:
    folder = edit_index(copy("litdata"), change)
    with pytest.raises(ConfigError, match=message) as caught:
        LitDataSource(folder)
    assert str(caught.value).startswith(f"{folder}/index.json: ")


def test_trees_of_any_kind_get_names_that_tell_their_leaves_apart() -> None:
    inner = json.loads(_spec(LEAF, LEAF, kind="builtins.list"))[1]
    assert leaf_names(None, 2) == ("tuple", ("0", "1"))
    assert leaf_names(json.dumps([1, LEAF]), 1) == ("bare", ("0",))
    assert leaf_names(_spec(LEAF, inner, kind="builtins.tuple"), 3) == ("dict", ("0", "1.0", "1.1"))
    assert leaf_names(_spec(LEAF, inner, context=["a", "b"]), 3) == ("dict", ("a", "b.0", "b.1"))
    assert leaf_names(_spec(LEAF, LEAF, context=[0, 1]), 2) == ("dict", ("0", "1"))
    named = _spec(LEAF, LEAF, kind="collections.namedtuple", context="Point")
    assert leaf_names(named, 2) == ("tuple", ("0", "1"))


# --- nested values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a": [1, null]}', {"a": [1, None]}),
        (struct.pack("<BII2sI", 1, 2, 2, b"ab", 0), ["ab", ""]),
        (struct.pack("<BI2q", 2, 2, -1, 1 << 40), [-1, 1 << 40]),
        (struct.pack("<BI2d", 3, 2, 0.5, -2), [0.5, -2.0]),
        (struct.pack("<BI3B", 4, 3, 1, 0, 1), [True, False, True]),
        (struct.pack("<BII1sB", 5, 1, 1, b"k", 11), {"k": None}),
        (struct.pack("<BIII1sBBB", 6, 2, 1, 1, b"k", 0x10, 0x14, 1), [{"k": None}, {"k": True}]),
        (struct.pack("<BI", 7, 3) + b"abc", "abc"),
        (struct.pack("<Bq", 8, -7), -7),
        (struct.pack("<Bd", 9, 1.5), 1.5),
        (bytes([10, 1]), True),
        (struct.pack("<BI", 0, 4) + b"[[]]", [[]]),
    ],
)
def test_packed_lists_and_dicts_are_unpacked(data: bytes, value: Any) -> None:
    assert parse_nested(memoryview(data)) == value
    with pytest.raises((ValueError, LookupError)):
        parse_nested(memoryview(data[:-1]))


@given(st.binary(max_size=60))
def test_any_bytes_in_place_of_packed_values_bring_an_ordinary_error_in_little_memory(data: bytes) -> None:
    with contextlib.suppress(ValueError, LookupError, RecursionError):
        parse_nested(memoryview(data))


# --- damaged and hostile chunks ----------------------------------------------------------------


def test_a_chunk_that_is_truncated_gives_what_is_there(copy: Callable[[str], Path]) -> None:
    folder = copy("litdata")
    chunk = folder / "chunk-0-0.bin"
    chunk.write_bytes(chunk.read_bytes()[:-100])
    came: list[int] = []
    with pytest.raises(SampleError, match=r"chunk-0-0\.bin.*sample 2: .*ends in the middle"):
        came.extend(
            sample["a_number"] for _, sample in LitDataSource(folder).read(0, np.random.default_rng(0))
        )
    assert came == [litdata_sample(number)["a_number"] for number in range(2)]
    chunk.unlink()
    with pytest.raises(SampleError, match=r"chunk-0-0\.bin.*not found"):
        read(LitDataSource(folder), 0)


def test_a_chunk_that_differs_from_the_index_is_a_sample_error(copy: Callable[[str], Path]) -> None:
    for name, count in (("litdata", 2), ("litdata-batch", 3), ("litdata-rows", 2)):
        source = LitDataSource(edit_index(copy(name), _chunk(chunk_size=count)))
        with pytest.raises(SampleError, match=f"index says {count}"):
            read(source, 0)


def forged(folder: Path, kind: str, leaf: bytes, sizes: bytes | None = None) -> Path:
    """Write a data set of one chunk of one sample of one leaf."""
    item = (struct.pack("<I", len(leaf)) if sizes is None else sizes) + leaf
    (folder / "chunk-0-0.bin").write_bytes(struct.pack("<III", 1, 12, 12 + len(item)) + item)
    chunk = {"chunk_bytes": 0, "chunk_size": 1, "dim": None, "filename": "chunk-0-0.bin"}
    config = {"compression": None, "data_format": [kind], "data_spec": None, "encryption": None}
    (folder / "index.json").write_text(json.dumps({"chunks": [chunk], "config": config}))
    return folder


@pytest.mark.parametrize(
    ("kind", "leaf", "message"),
    [
        ("int", b"abc", "unpack requires"),
        ("bool", b"", "0 bytes, not 1"),
        ("str", b"\xff", "utf-8"),
        ("tensor", b"", "unpack_from"),
        ("tensor", struct.pack(">II", 10, 0), "the type number 10"),
        ("tensor", struct.pack(">II", 0, 1 << 31), "an array of 2147483648 axes"),
        ("tensor", struct.pack(">III", 0, 1, 1 << 31) + bytes(8), "cannot reshape"),
        ("numpy", struct.pack("<II", 14, 0), "the type number 14"),
        ("numpy", struct.pack("<IIII", 10, 2, 1 << 31, 1 << 31) + bytes(8), "reshape|too big|Maximum"),
        ("no_header_tensor:17", b"abc", "buffer size"),
        ("pil", struct.pack("<III", 1 << 20, 1 << 20, 3) + b"RGB", "DecompressionBomb"),
        ("jpeg", b"", "cannot identify image file$"),
        ("jpeg_array", struct.pack("<I", 1 << 30), "images, from 1"),
        ("json", struct.pack("<BI", 1, 1 << 31), "2147483648 items in 5 bytes"),
        ("json", bytes([5, 1, 0, 0, 0, 0, 0, 0, 0]) * 20_000, "recursion|RecursionError|items in|ends early"),
        ("json", b"[" * 20_000, "recursion|RecursionError"),
    ],
)
def test_leaves_made_to_harm_are_problems_with_a_reason(
    tmp_path: Path, kind: str, leaf: bytes, message: str
) -> None:
    source = LitDataSource(forged(tmp_path, kind, leaf))
    tracemalloc.start()
    with pytest.raises(SampleError, match=message):
        read(source, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_sizes_of_leaves_that_lead_out_of_their_item_are_a_problem(tmp_path: Path) -> None:
    source = LitDataSource(forged(tmp_path, "bytes", b"abc", sizes=b"\xff\xff\xff\xff"))
    with pytest.raises(SampleError, match="its leaves take 4294967299 of 7 bytes"):
        read(source, 0)


@pytest.mark.e2e
def test_an_item_that_unpacks_to_far_too_much_is_a_problem_in_bounded_memory(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    zstandard = pytest.importorskip("zstandard")
    folder = copy("litdata-chunk")
    edit_index(folder, lambda index: index.update(chunks=index["chunks"][:1]))
    edit_index(folder, _chunk(chunk_size=1))
    nbytes = 256 << 20
    bomb = zstandard.ZstdCompressor().compress(struct.pack("<III", 1, 12, 12 + nbytes) + bytes(nbytes))
    assert len(bomb) < 100_000
    (folder / "chunk-0-0.zstd.bin").write_bytes(bomb)
    monkeypatch.setattr(object_limit, "_cache_bytes", 8 << 20)
    tracemalloc.start()
    with pytest.raises(SampleError, match=r"sample 0: .*more than 8\.39 MB in one object"):
        read(LitDataSource(folder), 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["litdata", *PACKED, *ROWS])
@given(data=st.data())
def test_damaged_chunks_bring_errors_of_ours_alone(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(need(name), folder, dirs_exist_ok=True)
    chunk = next(path for path in sorted(folder.iterdir()) if path.name.startswith("chunk-0-0"))
    content = bytearray(chunk.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(
            st.integers(0, min(len(content) - 1, data.draw(st.sampled_from([40, 300, 1 << 30]))))
        )
        content[place] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, 2 * len(content))) :]
    chunk.write_bytes(content)
    came, damaged = 0, False
    try:
        for _ in LitDataSource(folder).read(0, np.random.default_rng(0)):
            came += 1
    except SampleError as error:
        damaged = str(chunk) in str(error)
        assert damaged, error  # noqa: PT017  the samples before it matter, too
    assert damaged or came in (3, 4)
