"""MDSSource on shards that mosaicml-streaming wrote (see peers/write.py), and on damaged and hostile ones."""

from __future__ import annotations

import io
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
from cachestream.errors import ConfigError, SampleError, SourceError
from cachestream.formats.mds import MDSSource
from cachestream.sources.decode.images import ImageOptions
from cachestream.sources.open import open_source
from cachestream.testing.checks import check_source
from tests.sources.peers.samples import FOLDER, MDS_COLUMNS, MDS_SAMPLES, edit_index, mds_sample
from tests.sources.reading import read, read_all
from tests.support.s3 import S3Server

MDS: Final = FOLDER / "mds"
PACKED: Final = ("mds-zstd", "mds-gz", "mds-bz2")
STORABLE: Final = [name for name in MDS_COLUMNS if name != "any_array"]  # which has a type that varies
JPEGS: Final = ("a_jpeg", "jpegs", "jpegs_too")


def expected(value: Any) -> Any:
    """Return the field that a value given to the writer becomes."""
    if isinstance(value, Image.Image):
        return np.asarray(value.convert("RGB")).transpose(2, 0, 1)
    if isinstance(value, list) and isinstance(value[0], Image.Image):
        return np.stack([expected(one) for one in value])
    return value


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(FOLDER / name, tmp_path / name))

    return copied


# --- what the library wrote --------------------------------------------------------------------


def test_every_encoding_comes_back_as_it_was_given_to_the_writer() -> None:
    found = read_all(MDSSource(MDS))
    assert [key for key, _ in found] == [
        *(f"shard.00000.mds#{number}" for number in range(6)),
        "shard.00001.mds#0",
    ]
    for number, (_, sample) in enumerate(found):
        given_ = mds_sample(number)
        assert set(sample) == set(given_)
        for name, value in given_.items():
            want = expected(value)
            if name in JPEGS:
                assert np.abs(sample[name].astype(int) - want).mean() < 16
            elif name == "a_decimal":
                assert sample[name] == float(value)
            elif name == "json_object":
                assert json.loads(sample[name]) == value
            else:
                assert np.array_equal(sample[name], want), name
        for name in ("any_array", "fixed_array", "float_array"):
            assert sample[name].dtype == given_[name].dtype
            assert sample[name].flags.aligned


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("check_hashes", [False, True])
def test_compressed_shards_are_unpacked_as_they_come(name: str, check_hashes: bool) -> None:
    if name == "mds-zstd":
        pytest.importorskip("zstandard")
    found = read_all(MDSSource(FOLDER / name, check_hashes=check_hashes))
    assert len(found) == MDS_SAMPLES
    for number, (_, sample) in enumerate(found):
        for field, value in sample.items():
            assert np.array_equal(value, mds_sample(number)[field])


def test_only_the_columns_that_are_asked_for_are_decoded() -> None:
    found = read_all(MDSSource(MDS, columns=["a_str", "a_number"]))
    assert [sample for _, sample in found] == [
        {name: mds_sample(number)[name] for name in ("a_number", "a_str")} for number in range(MDS_SAMPLES)
    ]


def test_a_function_of_the_users_decodes_a_column_in_place_of_ours() -> None:
    source = MDSSource(MDS, columns=["a_jpeg", "a_str"], decoders={"a_jpeg": bytes, "a_str": len})
    _, sample = read(source, 0)[2]
    assert sample["a_jpeg"].startswith(b"\xff\xd8")
    assert sample["a_str"] == len(mds_sample(2)["a_str"].encode())


def test_pickled_columns_are_refused_unless_the_user_unpickles_them_or_leaves_them_out() -> None:
    with pytest.raises(ConfigError, match=r"'a_pickle' is pickled.*decoders=.*pickle\.loads.*columns="):
        MDSSource(FOLDER / "mds-pkl")
    assert read(MDSSource(FOLDER / "mds-pkl", columns=["a_number"]), 0)[0][1] == {"a_number": 1}
    trusting = MDSSource(FOLDER / "mds-pkl", decoders={"a_pickle": lambda data: pickle.loads(data)["x"]})
    assert read(trusting, 0)[0][1] == {"a_number": 1, "a_pickle": 2}


def test_compressions_that_are_not_known_here_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"compressed by 'br'.*zstd, gz, bz2"):
        MDSSource(FOLDER / "mds-br")


def test_images_are_resized_and_cropped_also_in_lists() -> None:
    columns = ["a_jpeg", "a_pil", "a_png", "jpegs", "pils"]
    source = MDSSource(MDS, columns=columns, resize=12, crop=10)
    exact = ImageOptions(resize=12, crop=10)
    for number, (_, sample) in enumerate(read_all(source)):
        assert {name: value.shape[-3:] for name, value in sample.items()} == dict.fromkeys(
            columns, (3, 10, 10)
        )
        pixels = exact.apply(expected(mds_sample(number)["a_pil"]))
        assert np.abs(sample["a_pil"].astype(int) - pixels).max() <= 2


# --- units -------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_visit", [1, 2, 3, 4, 100])
def test_visits_take_a_few_samples_each_and_all_of_them_together(per_visit: int) -> None:
    source = MDSSource(MDS, samples_per_visit=per_visit, columns=["a_number"])
    assert source.num_units == -(-6 // per_visit) + 1
    assert max(len(read(source, unit)) for unit in range(source.num_units)) <= per_visit
    assert read_all(source) == read_all(MDSSource(MDS, columns=["a_number"]))


def test_visits_to_compressed_shards_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"compressed shard.*leave out samples_per_visit"):
        MDSSource(FOLDER / "mds-gz", samples_per_visit=2)


def test_open_source_takes_the_format_and_says_so_where_it_is_needed() -> None:
    assert isinstance(open_source(MDS, format="mds"), MDSSource)
    assert isinstance(open_source(f"{MDS}/", format="mds", columns=["a_str"]), cs.MDSSource)
    with pytest.raises(ConfigError, match="holds shards of mds: give format='mds'"):
        open_source(MDS)
    assert open_source(MDS, format="files").num_units == 2  # its index.json is left out
    with pytest.raises(ConfigError, match=r"format='mdx'.*'mds'"):
        open_source(MDS, format="mdx")
    with pytest.raises(ConfigError, match="format='mds' is for paths"):
        open_source([{"x": 1}], format="mds")


def test_a_folder_of_such_folders_is_refused_and_the_one_that_is_meant_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(MDS, tmp_path / split)
    with pytest.raises(
        ConfigError, match="holds shards of mds, in train/: give that folder and format='mds'"
    ):
        open_source(tmp_path)
    assert type(open_source(tmp_path, format="files")) is cs.FileSource


def test_fingerprints_tell_options_apart_and_name_the_folder() -> None:
    sources = [
        MDSSource(MDS),
        MDSSource(MDS, columns=["a_str"]),
        MDSSource(MDS, decoders={"a_str": len}),
        MDSSource(MDS, samples_per_visit=2),
        MDSSource(MDS, resize=4),
    ]
    assert len({source.fingerprint for source in sources}) == len(sources)
    assert sources[0].fingerprint == f"mds:{MDS}"
    assert MDSSource(MDS / "index.json").fingerprint == sources[0].fingerprint
    assert repr(sources[0]) == f"<MDSSource {MDS}/, 2 shards, 7 samples>"


@pytest.mark.e2e
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"samples_per_visit": 2}], ids=str
)
def test_an_mds_source_keeps_the_protocol(options: dict[str, Any]) -> None:
    check_source(lambda: MDSSource(MDS, columns=STORABLE, **options))


@pytest.mark.slow
def test_an_mds_source_over_s3_keeps_the_protocol_and_its_secrets(
    s3_server: S3Server, s3_bucket: Path
) -> None:
    shutil.copytree(FOLDER / "mds-gz", s3_bucket / "sets" / "train")
    shutil.copytree(MDS, s3_bucket / "sets" / "plain")
    options = s3_server.storage_options
    source = MDSSource(f"s3://{s3_bucket.name}/sets/plain", storage_options=options, samples_per_visit=2)
    assert [key for key, _ in read_all(source)] == [key for key, _ in read_all(MDSSource(MDS))]
    check_source(
        lambda: MDSSource(f"s3://{s3_bucket.name}/sets/train/", columns=["a_str"], storage_options=options),
        secrets=[s3_server.key, s3_server.secret],
    )
    with pytest.raises(SourceError, match=r"index\.json.*not found|no files found"):
        MDSSource(f"s3://{s3_bucket.name}/elsewhere", storage_options=options)


# --- malformed indices -------------------------------------------------------------------------


def _shard(**changes: Any) -> Callable[[Any], None]:
    return lambda index: index["shards"][0].update(changes)


def _raw(basename: Any) -> Callable[[Any], None]:
    return lambda index: index["shards"][0]["raw_data"].update(basename=basename)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: [], "it is '\\[\\]', not an object"),
        (lambda _: {"chunks": [], "config": {}}, "another data set's"),
        (lambda index: index.update(version=1), "not version 2"),
        (lambda index: index.update(shards=[]), "names no files"),
        (lambda index: index.update(shards=[3]), "a shard is '3'"),
        (_shard(format="csv"), "format 'csv'; only 'mds'"),
        (_shard(samples=-1), "number of samples of a shard is '-1'"),
        (_shard(samples=1 << 40), "not a number from 0"),
        (_shard(samples=True), "not a number"),
        (_shard(column_names=["a"]), "do not fit"),
        (_shard(column_names="a", column_encodings="b", column_sizes="c"), "do not fit"),
        (
            _shard(column_names=["a"], column_encodings=["wav"], column_sizes=[None]),
            "'wav', which is not known",
        ),
        (_shard(column_names=["a"], column_encodings=["ndarray:object"], column_sizes=[None]), "not known"),
        (_shard(column_names=["a"], column_encodings=["ndarray:int8:x"], column_sizes=[None]), "not known"),
        (_shard(column_names=["a"], column_encodings=["int"], column_sizes=[-8]), "sizes of columns"),
        (_shard(column_names=["a", "a"], column_encodings=["int"] * 2, column_sizes=[8] * 2), "of one name"),
        (_shard(raw_data=None), "raw_data is 'None'"),
        (lambda index: index["shards"][0].pop("samples") and None, "'samples' is missing"),
        (_raw("../../etc/passwd"), "leads out of the folder"),
        (_raw("/etc/passwd"), "leads out of the folder"),
        (_raw("..\\a"), "leads out of the folder"),
        (_raw("s3://other/a"), "leads out of the folder"),
        (_raw("a\0b"), "a file name"),
        (_raw("a\nb"), "file name"),
        (_raw(7), "file name"),
        (_raw(""), "file name"),
    ],
)
def test_an_index_that_cannot_be_used_is_a_config_error_that_names_it(
    copy: Callable[[str], Path], change: Any, message: str
) -> None:
    folder = edit_index(copy("mds"), change)
    with pytest.raises(ConfigError, match=message) as caught:
        MDSSource(folder)
    assert str(caught.value).startswith(f"{folder}/index.json: ")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 200_000, b"null"])
def test_an_index_that_is_no_json_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"index\.json: not an index"):
        MDSSource(tmp_path)


def test_what_cannot_work_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"index\.json"):
        MDSSource(tmp_path)
    with pytest.raises(ConfigError, match="no column 'nothing'; there are a_bytes"):
        MDSSource(MDS, columns=["nothing"])
    with pytest.raises(ConfigError, match="no column 'nothing'"):
        MDSSource(MDS, decoders={"nothing": len})
    with pytest.raises(ConfigError, match="columns='a_str'"):
        MDSSource(MDS, columns="a_str")
    with pytest.raises(ConfigError, match="samples_per_visit=0"):
        MDSSource(MDS, samples_per_visit=0)
    with pytest.raises(ConfigError, match="one folder"):
        MDSSource([MDS, MDS])  # type: ignore[arg-type]


# --- damaged and hostile shards ----------------------------------------------------------------


def test_a_shard_that_is_missing_or_truncated_gives_what_is_there(copy: Callable[[str], Path]) -> None:
    folder = copy("mds")
    shard = folder / "shard.00000.mds"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) * 2 // 3])
    source = MDSSource(folder)
    came: list[Any] = []
    with pytest.raises(SampleError, match=r"shard\.00000\.mds.*ends in the middle"):
        came.extend(sample["a_number"] for _, sample in source.read(0, np.random.default_rng(0)))
    assert came == [mds_sample(number)["a_number"] for number in range(len(came))]
    assert 0 < len(came) < 6
    shard.unlink()
    with pytest.raises(SampleError, match=r"shard\.00000\.mds.*not found"):
        read(source, 0)
    assert len(read(source, 1)) == 1


def test_a_sample_that_is_malformed_is_left_out_and_counted(copy: Callable[[str], Path]) -> None:
    folder = copy("mds")
    shard = folder / "shard.00000.mds"
    content = bytearray(shard.read_bytes())
    content[content.index(b"\xff\xd8") : content.index(b"\xff\xd8") + 3] = b"abc"
    shard.write_bytes(content)
    came: list[Any] = []
    reason = r"sample 0: column 'a_jpeg': not a usable jpeg value: Unidentified"
    with pytest.raises(SampleError, match=reason) as caught:
        came.extend(key for key, _ in MDSSource(folder).read(0, np.random.default_rng(0)))
    assert came == [f"shard.00000.mds#{number}" for number in range(1, 6)]
    assert " at 0x" not in str(caught.value)


def test_a_shard_that_differs_from_the_index_is_a_sample_error(copy: Callable[[str], Path]) -> None:
    source = MDSSource(edit_index(copy("mds"), _shard(samples=5)))
    with pytest.raises(SampleError, match="holds 6 samples, and the index says 5"):
        read(source, 0)


def test_hashes_are_checked_before_a_shard_is_used(copy: Callable[[str], Path]) -> None:
    folder = copy("mds")
    shard = folder / "shard.00001.mds"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    source = MDSSource(folder, check_hashes=True)
    assert len(read(source, 0)) == 6
    with pytest.raises(SampleError, match=r"shard\.00001\.mds: its sha1 is not the one in the index"):
        read(source, 1)
    edit_index(
        folder, lambda index: [shard["raw_data"].update(hashes={}) for shard in index["shards"]] and None
    )
    with pytest.raises(ConfigError, match="no hash of shard"):
        MDSSource(folder, check_hashes=True)


def forged(
    folder: Path, table: list[int], body: bytes, encoding: str = "bytes", count: int | None = None
) -> Path:
    """Write a data set of one shard with the given table and one column."""
    count = len(table) - 1 if count is None else count
    (folder / "a.mds").write_bytes(struct.pack(f"<I{len(table)}I", count, *table) + body)
    shard = {
        "column_names": ["x"],
        "column_encodings": [encoding],
        "column_sizes": [None],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "raw_data": {"basename": "a.mds", "bytes": 0, "hashes": {}},
        "samples": count,
        "size_limit": None,
        "version": 2,
        "zip_data": None,
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    return folder


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([12, 4_000_000_000], "more than 2 GB in one object"),
        ([4_000_000_000, 4_000_000_010], "ends in the middle"),
        ([0, 20], "the table says that it lies at 0 to 20"),
        ([20, 12], "lies at 20 to 12"),
        ([12, 12], "0 bytes are too few"),
        ([12, 14], "2 bytes are too few"),
        ([12, 20], "its columns take 4294967299 of 8 bytes"),
    ],
)
@pytest.mark.parametrize("per_visit", [None, 1])
def test_places_that_lead_out_of_a_shard_are_problems_in_little_memory(
    tmp_path: Path, table: list[int], message: str, per_visit: int | None
) -> None:
    source = MDSSource(forged(tmp_path, table, b"\xff" * 100), samples_per_visit=per_visit)
    tracemalloc.start()
    with pytest.raises(SampleError, match=message):
        read(source, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_shard_that_claims_millions_of_samples_is_a_problem_in_little_memory(tmp_path: Path) -> None:
    source = MDSSource(forged(tmp_path, [12, 20], b"", count=1 << 24))
    tracemalloc.start()
    with pytest.raises(SampleError, match="ends in the middle of its table"):
        read(source, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("encoding", "value", "message"),
    [
        ("pil", struct.pack("<III", 1 << 30, 1 << 30, 3) + b"RGB", "DecompressionBomb"),
        ("pil", struct.pack("<III", 4, 4, 1 << 31), "a mode of"),
        ("pil", struct.pack("<III", 4, 4, 3) + b"RGB123", "not enough image data"),
        ("pil", struct.pack("<III", 4, 4, 5) + b"evil!" + bytes(99), "mode 'evil!'"),
        ("list[jpeg]", bytes(4) + struct.pack("<I", 1 << 31), "images, from 1"),
        ("jpeg_array", struct.pack("<II", 1, 1 << 31), "images of 2147483648 bytes"),
        ("ndarray", b"\x07", "KeyError"),
        ("ndarray", b"\x08" + bytes([63 << 2 | 3]), "ValueError"),
        ("ndarray", bytes([8, 1 << 2]) + b"\xff" + b"ab", "cannot reshape"),
        ("ndarray:float64", bytes([0]) + b"abc", "buffer size"),
        ("json", b"[" * 50_000, "recursion|RecursionError"),
        ("str", b"\xff", "utf-8"),
        ("str_int", b"9" * 30, "beyond 64 bits"),
        ("str_float", b"x", "could not convert"),
        ("png", b"", "cannot identify image file$"),
    ],
)
def test_values_made_to_harm_are_problems_with_a_reason(
    tmp_path: Path, encoding: str, value: bytes, message: str
) -> None:
    body = struct.pack("<I", len(value)) + value
    source = MDSSource(forged(tmp_path, [12, 12 + len(body)], body, encoding))
    with pytest.raises(SampleError, match=message):
        read(source, 0)


def test_images_of_several_sizes_in_one_value_are_a_problem_that_says_what_to_do(tmp_path: Path) -> None:
    def png(width: int) -> bytes:
        sink = io.BytesIO()
        Image.new("RGB", (width, 4)).save(sink, "PNG")
        return sink.getvalue()

    images = [png(4), png(5)]
    value = struct.pack("<4I", 0, 2, *map(len, images)) + b"".join(images)
    body = struct.pack("<I", len(value)) + value
    folder = forged(tmp_path, [12, 12 + len(body)], body, "list[png]")
    with pytest.raises(SampleError, match=r"several sizes.*resize= and crop="):
        read(MDSSource(folder), 0)
    assert read(MDSSource(folder, crop=4), 0)[0][1]["x"].shape == (2, 3, 4, 4)


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["mds", "mds-gz", "mds-zstd"])
@given(data=st.data())
def test_damaged_shards_bring_errors_of_ours_alone(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    if name == "mds-zstd":
        pytest.importorskip("zstandard")
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
    shard = next(path for path in sorted(folder.iterdir()) if path.name.startswith("shard.00000"))
    content = bytearray(shard.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(
            st.integers(0, min(len(content) - 1, data.draw(st.sampled_from([40, 800, 1 << 30]))))
        )
        content[place] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(0, 2 * len(content))) :]
    shard.write_bytes(content)
    came, damaged = 0, False
    try:
        for _ in MDSSource(folder).read(0, np.random.default_rng(0)):
            came += 1
    except SampleError as error:
        damaged = str(shard) in str(error)
        assert damaged, error  # noqa: PT017  the samples before it matter, too
    assert damaged or came in (2, 3, 6)
