"""TFRecordSource against the reader of the tfrecord package, on files that the package wrote."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from cachestream.errors import CacheStreamError, ConfigError, SampleError, SourceError, SourceUnavailableError
from cachestream.formats.tfrecord import TFRecordSource
from cachestream.testing.checks import check_source
from cachestream.transport import remote_errors
from tests.sources.reading import read_unit, record_places
from tests.sources.test_tf_example import entry, example
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

tfrecord: Any = pytest.importorskip("tfrecord")
pytest.importorskip("google_crc32c")

RNG: Final = np.random.default_rng(0)
ROOT: Final = Path(__file__).parents[2]


def png(value: int) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (6, 4), (value, value, value)).save(sink, "PNG")
    return sink.getvalue()


def write(path: Path, count: int, first: int = 0) -> list[dict[str, Any]]:
    """Write a file of `count` examples by the tfrecord package; return their features."""
    generator = np.random.default_rng(first)
    examples = [
        {
            "number": (number, "int"),
            "weight": (number / 2, "float"),
            "tokens": (generator.integers(-5, 1 << 40, 3 + number % 4), "int"),
            "vector": (generator.normal(size=8).astype(np.float32), "float"),
            "text": (f"text {number}".encode(), "byte"),
            "image": (png(number % 256), "byte"),
        }
        for number in range(first, first + count)
    ]
    writer = tfrecord.TFRecordWriter(str(path))
    for one in examples:
        writer.write(one)
    writer.close()
    return [{name: value for name, (value, _) in example.items()} for example in examples]


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Measure the peak of allocated bytes in the block, above those before it."""
    found: list[int] = []
    tracemalloc.start()
    try:
        yield lambda: found[0]
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


# --- what records hold -------------------------------------------------------------------------


def test_examples_come_as_another_reader_decodes_them(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    written = write(path, 50)
    samples, reason = read_unit(TFRecordSource(path, decode_images=False))
    assert reason == ""
    assert [key for key, _ in samples] == [f"a.tfrecord#{place}" for place in record_places(path)]
    others = list(tfrecord.tfrecord_loader(str(path), None))
    for (_, sample), other, wrote in zip(samples, others, written, strict=True):
        assert set(sample) == set(other) == set(wrote)
        assert sample["image"] == wrote["image"] == bytes(other["image"])
        assert sample["text"] == wrote["text"]
        for name in ("number", "weight", "tokens", "vector"):
            np.testing.assert_array_equal(sample[name], np.squeeze(other[name]))
            np.testing.assert_array_equal(sample[name], np.squeeze(wrote[name]).astype(sample[name].dtype))
        assert (sample["number"].dtype, sample["number"].shape) == (np.int64, ())
        assert (sample["weight"].dtype, sample["weight"].shape) == (np.float32, ())


def test_images_are_decoded_unless_told_otherwise(tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", 3, first=7)
    ((_, sample), *_), _ = read_unit(TFRecordSource(tmp_path))
    assert (sample["image"].shape, sample["image"].dtype) == ((3, 4, 6), np.uint8)
    assert (sample["image"] == 7).all()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"y": "array"}, "no feature 'y'; there are i, s, x"),
        ({"x": "scalar"}, "'x' holds 3 values, not one"),
        ({"x": (2, 2)}, r"3 values do not make the shape \(2, 2\)"),
        ({"x": "bytes"}, "'x' holds numbers, no bytes"),
        ({"x": "texts"}, "'x' holds numbers, no texts"),
        ({"s": "array"}, "'s' holds bytes, no numbers"),
        ({"s": "str"}, "'s': not a usable UTF-8 text"),
        ({"s": "image"}, "not a usable image"),
        ({"i": "texts"}, "which are no texts"),
    ],
)
def test_a_record_that_is_not_what_was_asked_for_is_counted(
    tmp_path: Path, features: Any, message: str
) -> None:
    writer = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    writer.write({"x": ([1, 2, 3], "int"), "s": (b"\xff\xfe", "byte"), "i": ([b"\xff", b"b"], "byte")})
    writer.close()
    source = TFRecordSource(tmp_path, features=features)
    with pytest.raises(SampleError, match=rf"a\.tfrecord: record at byte 0: .*{message}"):
        list(source.read(0, RNG))


@pytest.mark.parametrize("count", [1, 20])  # parsed alone, and together
def test_records_without_features_are_counted(tmp_path: Path, count: int) -> None:
    writer = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    for _ in range(count):
        writer.write({})
    writer.close()
    samples, problems = read_unit(TFRecordSource(tmp_path))
    assert not samples
    assert "it has no features" in problems


def test_sequence_examples_are_refused_by_name(tmp_path: Path) -> None:
    writer = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    writer.write({"a": (1, "int")}, {"s": ([[1], [2]], "int")})
    writer.close()
    assert "SequenceExample; only tf.train.Example is read" in read_unit(TFRecordSource(tmp_path))[1]


# --- compression, damage -----------------------------------------------------------------------


def test_a_length_that_looks_like_gzip_is_a_length_where_the_user_says_so(tmp_path: Path) -> None:
    """1f 8b 08 begins a gzip file, and also a record of 559,903 bytes."""
    writer = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    room = 559_903 - len(example(entry("x", 1, b""))) - 12
    for grow in range(16):
        if len(example(entry("x", 1, bytes(room + grow)))) == 559_903:
            writer.write({"x": (bytes(room + grow), "byte")})
    writer.close()
    assert (tmp_path / "a.tfrecord").read_bytes()[:3] == b"\x1f\x8b\x08"
    assert "a.tfrecord: " in read_unit(TFRecordSource(tmp_path))[1]
    ((_, sample),), reason = read_unit(TFRecordSource(tmp_path, compression=None))
    assert len(sample["x"]) > 559_000
    assert reason == ""


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_packed_file_is_known_by_its_first_bytes(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    write(tmp_path / "a.tfrecord", 10)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(pack(path.read_bytes()))
    found, reason = read_unit(TFRecordSource(path))
    assert (len(found), reason) == (10, "")


def test_a_record_whose_checksum_does_not_fit_is_left_out_and_others_come(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, 10)
    place = record_places(path)[4]
    data = bytearray(path.read_bytes())
    start = data.index(b"text 4")
    data[start] ^= 1
    path.write_bytes(data)
    samples, reason = read_unit(TFRecordSource(path))
    assert [int(sample["number"]) for _, sample in samples] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert reason == f"{path}: record at byte {place}: its checksum does not fit"
    samples, reason = read_unit(TFRecordSource(path, check_crc=False))
    assert (len(samples), samples[4][1]["text"], reason) == (10, b"uext 4", "")


def test_a_damaged_length_ends_the_file_after_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, 10)
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    data[length + 16] ^= 1  # of the second record
    path.write_bytes(data)
    samples, reason = read_unit(TFRecordSource(path))
    assert len(samples) == 1
    assert f"record at byte {length + 16}: the checksum of its length does not fit" in reason


@pytest.mark.parametrize("cut", [1, 4, 5, 12, 30])
def test_a_file_that_ends_early_gives_the_records_before(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, 10)
    last = record_places(path)[9]
    path.write_bytes(path.read_bytes()[:-cut])
    samples, reason = read_unit(TFRecordSource(path))
    assert len(samples) == 9
    assert f"record at byte {last}: the file ends in the middle" in reason
    path.write_bytes(path.read_bytes()[:7])
    samples, reason = read_unit(TFRecordSource(path))
    assert (samples, "in the middle of its length" in reason) == ([], True)


def test_a_length_that_lies_is_refused_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    for length in (1 << 62, (1 << 30) + 7):
        path.write_bytes(struct.pack("<QI", length, 0) + bytes(5000))
        with peak_memory() as peak:
            samples, reason = read_unit(TFRecordSource(path, check_crc=False))
        assert samples == []
        assert "record at byte 0" in reason
        assert peak() < 8 << 20


@pytest.mark.e2e
def test_a_packed_bomb_is_not_unpacked_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(struct.pack("<QI", 1 << 40, 0) + bytes(300 << 20), 1))
    with peak_memory() as peak:
        for check_crc in (True, False):
            assert "record at byte 0" in read_unit(TFRecordSource(path, check_crc=check_crc))[1]
    assert peak() < 16 << 20


@pytest.mark.e2e
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("check_crc", [True, False])
def test_damaged_files_bring_errors_of_ours_alone(tmp_path: Path, pack: Any, check_crc: bool) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, 8)
    whole = pack(path.read_bytes())
    for seed in range(80):
        generator = np.random.default_rng(seed)
        broken = bytearray(whole)
        if seed % 4 == 0:
            del broken[int(generator.integers(0, len(whole))) :]
        for _ in range(int(generator.integers(1, 4))):
            if broken:
                broken[int(generator.integers(0, len(broken)))] ^= 1 << int(generator.integers(0, 8))
        path.write_bytes(broken)
        samples, reason = read_unit(TFRecordSource(path, check_crc=check_crc))
        assert len(samples) <= 8
        assert not reason or reason.startswith(str(path))


# --- parts -------------------------------------------------------------------------------------


@pytest.mark.e2e
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 255, None])), max_size=40),
    st.integers(1, 9),
)
def test_parts_together_give_every_record_once_wherever_the_cuts_fall(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, int | None]], parts: int
) -> None:
    path = tmp_path_factory.mktemp("parts") / "a.tfrecord"
    generator = np.random.default_rng(len(records))
    writer = tfrecord.TFRecordWriter(str(path))
    for length, fill in records:
        data = generator.bytes(length) if fill is None else bytes([fill]) * length
        writer.write({"data": (data, "byte")})
    writer.close()
    whole, _ = read_unit(TFRecordSource(path))
    divided = TFRecordSource(path).divided(parts)
    found = [item for unit in range(divided.num_units) for item in read_unit(divided, unit)[0]]
    assert found == whole
    assert len(whole) == len(records)


def test_a_damaged_record_costs_one_part_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, 40)
    place = record_places(path)[20]
    data = bytearray(path.read_bytes())
    data[place + 9] ^= 1  # the checksum of its length
    path.write_bytes(data)
    source = TFRecordSource(path).divided(8)
    found = [read_unit(source, unit) for unit in range(8)]
    reasons = [reason for _, reason in found if reason]
    assert len(reasons) == 1
    assert f"record at byte {place}: the checksum of its length does not fit" in reasons[0]
    assert 34 < sum(len(samples) for samples, _ in found) < 40


def test_a_file_replaced_between_its_parts_is_noticed_and_then_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, 40)
    source = TFRecordSource(path).divided(4)
    assert read_unit(source, 0)[0]
    write(path, 80)
    with pytest.raises(SourceUnavailableError, match="was replaced while it was read in parts"):
        list(source.read(1, RNG))
    assert sum(len(read_unit(source, unit)[0]) for unit in range(4)) == 80


@pytest.mark.parametrize("asked_anew", [False, True])
def test_two_threads_that_read_parts_of_a_file_that_was_replaced_both_notice(
    tmp_path: Path, asked_anew: bool
) -> None:
    path = tmp_path / "a.tfrecord"
    write(path, 40)
    source = TFRecordSource(path).divided(4)
    assert read_unit(source, 0)[0]
    write(path, 80)
    reads = [source.read(unit, RNG) for unit in (1, 2)]
    for read in reads:
        next(read)
    with pytest.raises(SourceUnavailableError, match="was replaced while it was read in parts"):
        list(reads[0])
    if asked_anew:
        assert read_unit(source, 3)[0]
    with pytest.raises(SourceUnavailableError, match="was replaced while it was read in parts"):
        list(reads[1])


# --- files, the protocol -----------------------------------------------------------------------


@pytest.mark.e2e
def test_a_tfrecord_source_keeps_the_protocol(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"{number}.tfrecord", 6, first=6 * number)
    data = bytearray((tmp_path / "1.tfrecord").read_bytes())
    data[data.index(b"text 8")] ^= 1
    (tmp_path / "1.tfrecord").write_bytes(data)
    check_source(lambda: TFRecordSource(tmp_path))


def test_options_that_cannot_work_are_config_errors(tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", 1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"features": {}}, "at least one"),
        ({"features": {"x": "number"}}, "give a shape, or one of scalar, array"),
        ({"features": {"x": (-1, -1)}}, "give a shape"),
        ({"features": {"x": None}}, "give a shape"),
        ({"compression": "brotli"}, "give 'auto'"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            TFRecordSource(tmp_path, **options)


@pytest.mark.e2e
def test_the_checksums_library_is_named_where_it_is_missing_and_can_be_done_without(tmp_path: Path) -> None:
    write(tmp_path / "a.tfrecord", 3)
    script = """
import sys
import cachestream.sources.open as remote
assert "google_crc32c" not in sys.modules
sys.modules["google_crc32c"] = None
try:
    remote.open_source(sys.argv[1])
except remote.ConfigError as error:
    print(error)
print(len(list(remote.open_source(sys.argv[1], check_crc=False).read(0, None))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.tfrecord")],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    message, count = done.stdout.strip().splitlines()
    assert "check_crc=False" in message
    assert "pip install 'cachestream[tfrecord]'" in message
    assert count == "3"


# --- S3 ----------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_file_on_s3_is_read_once_and_resumed_where_it_breaks(
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    s3_bucket: Path,
    fetched: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_errors, "BACKOFF_START_S", 0.02)
    path = s3_bucket / "a.tfrecord"
    writer = tfrecord.TFRecordWriter(str(path))
    generator = np.random.default_rng(0)
    blobs = [generator.bytes(100_000) for _ in range(100)]
    for blob in blobs:
        writer.write({"data": (blob, "byte")})
    writer.close()
    source = TFRecordSource(
        f"s3://{s3_bucket.name}/a.tfrecord", storage_options=s3_server.options_through(s3_proxy.port)
    )
    fetched.clear()
    samples = source.read(0, RNG)
    found = [next(samples)[1]["data"]]
    s3_proxy.truncate(times=2, after_bytes=50_000)
    found += [sample["data"] for _, sample in samples]
    assert found == blobs
    assert sum(fetched) == path.stat().st_size


@pytest.mark.e2e
def test_an_outage_is_unavailable_and_secrets_show_nowhere(
    s3_server: S3Server, s3_proxy: FaultyProxy, s3_bucket: Path
) -> None:
    write(s3_bucket / "a.tfrecord", 5)
    source = TFRecordSource(
        f"s3://{s3_bucket.name}", storage_options=s3_server.options_through(s3_proxy.port)
    )
    shown = [repr(source), source.fingerprint]
    s3_proxy.refuse()
    with pytest.raises(SourceError, match="does not answer at present") as caught:
        list(source.read(0, RNG))
    assert isinstance(caught.value, CacheStreamError)
    shown += [str(caught.value), repr(caught.value.__cause__)]
    s3_proxy.heal()
    shown += [key for key, _ in source.read(0, RNG)]
    assert len(shown) == 9
    assert not [text for text in shown if "CANARY" in text]
