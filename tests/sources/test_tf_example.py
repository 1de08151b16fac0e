"""Examples: their wire format, and their features as columns."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import SampleError
from cachestream.formats.tf_example import FeatureFields, parse_example
from cachestream.formats.tfrecord import TFRecordSource
from cachestream.sources.base import Rows
from cachestream.sources.decode.images import UNCHANGED

google_crc32c: Any = pytest.importorskip("google_crc32c")

RNG: Final = np.random.default_rng(0)
INT64: Final = st.integers(-(2**63), 2**63 - 1)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(name: str, which: int, content: bytes) -> bytes:
    """Encode a feature: `which` is 1 for strings of bytes, 2 for floats, 3 for integers."""
    return field(1, field(1, name.encode()) + field(2, field(which, content)))


def entry(name: str, which: int, value: Any) -> bytes:
    """Encode a feature as writers do, with one string of bytes, or with numbers."""
    content = value
    if which == 2:
        content = struct.pack(f"<{len(value)}f", *value)
    elif which == 3:
        content = b"".join(map(varint, value))
    return feature(name, which, field(1, content))


def example(*entries: bytes) -> bytes:
    return field(1, b"".join(entries))


# --- files -------------------------------------------------------------------------------------


def framed(record: bytes) -> bytes:
    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def numbers(count: int, length: int = 16) -> list[bytes]:
    return [
        example(
            entry("id", 3, [i]),
            entry("x", 3, RNG.integers(0, 70_000, length).tolist()),
            entry("y", 2, [i / 2]),
        )
        for i in range(count)
    ]


def write(path: Path, records: Sequence[bytes]) -> None:
    path.write_bytes(b"".join(map(framed, records)))


def read(source: TFRecordSource) -> tuple[list[Rows], list[tuple[str, dict[str, Any]]], str]:
    """Return the Rows, all samples, and the reason for missing ones."""
    rows: list[Rows] = []
    samples: list[tuple[str, dict[str, Any]]] = []
    try:
        for item in source.read_rows(0, RNG):
            if isinstance(item, Rows):
                rows.append(item)
                samples += item.samples
            else:
                samples.append(item)
    except SampleError as error:
        return rows, samples, str(error)
    return rows, samples, ""


def places_of(records: Sequence[bytes]) -> list[int]:
    """Return the byte of a file of `records` at which each begins."""
    return [0, *itertools.accumulate(len(framed(record)) for record in records)]


def expect_samples(
    samples: Sequence[tuple[str, dict[str, Any]]], records: dict[int, bytes], places: Sequence[int]
) -> None:
    assert [key for key, _ in samples] == [f"a.tfrecord#{places[number]}" for number in records]
    for (_, sample), record in zip(samples, records.values(), strict=True):
        expected = FeatureFields(None, (), UNCHANGED, decode_images=True).sample(parse_example(record))
        assert sample.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(sample[name], value)
            assert getattr(sample[name], "dtype", bytes) == getattr(value, "dtype", bytes)


@pytest.mark.e2e
def test_small_examples_that_are_alike_come_in_columns(tmp_path: Path) -> None:
    records = numbers(2_000, 300)
    write(tmp_path / "a.tfrecord", records)
    rows, samples, reason = read(TFRecordSource(tmp_path))
    assert reason == ""
    expect_samples(samples, dict(enumerate(records)), places_of(records))
    assert sum(len(one.keys) for one in rows) > 1_900
    assert {name: (one.dtype.name, one.shape[1:]) for name, one in rows[0].fields.items()} == {  # type: ignore[union-attr]
        "id": ("int64", ()), "x": ("int64", (300,)), "y": ("float32", ())
    }  # fmt: skip


def test_small_examples_that_differ_come_one_by_one(tmp_path: Path) -> None:
    records = [example(entry("x", 3, list(range(i % 5))), entry("b", 1, b"b" * (i % 3))) for i in range(500)]
    write(tmp_path / "a.tfrecord", records)
    rows, samples, reason = read(TFRecordSource(tmp_path))
    assert (rows, reason) == ([], "")
    expect_samples(samples, dict(enumerate(records)), places_of(records))


@pytest.mark.parametrize(
    ("features", "shape"),
    [({"x": "array"}, (16,)), ({"x": (4, -1)}, (4, 4)), ({"x": (16,), "id": "scalar"}, (16,))],
)
def test_features_that_are_asked_for_come_in_columns(
    tmp_path: Path, features: dict[str, Any], shape: tuple[int, ...]
) -> None:
    write(tmp_path / "a.tfrecord", numbers(100))
    rows, samples, _ = read(TFRecordSource(tmp_path, features=features))
    assert rows
    assert rows[0].fields.keys() == features.keys()
    assert {sample["x"].shape for _, sample in samples} == {shape}
    assert len(samples) == 100


def test_texts_come_in_columns_and_one_that_is_none_is_left_out_alone(tmp_path: Path) -> None:
    texts = [f"text {i}".encode() for i in range(100)]
    source_of = {"t": "str"}
    write(tmp_path / "a.tfrecord", [example(entry("t", 1, text)) for text in texts])
    rows, samples, _ = read(TFRecordSource(tmp_path, features=source_of))  # type: ignore[arg-type]
    assert rows
    assert [sample["t"].encode() for _, sample in samples] == texts
    texts[50] = b"\xff"
    write(tmp_path / "a.tfrecord", [example(entry("t", 1, text)) for text in texts])
    _, samples, reason = read(TFRecordSource(tmp_path, features=source_of))  # type: ignore[arg-type]
    assert [sample["t"].encode() for _, sample in samples] == texts[:50] + texts[51:]
    assert f"record at byte {places_of([example(entry('t', 1, text)) for text in texts])[50]}: " in reason


@pytest.mark.e2e
def test_damaged_records_among_small_ones_are_left_out_by_their_places(tmp_path: Path) -> None:
    records = numbers(300)
    broken = [bytearray(framed(record)) for record in records]
    for number in (0, 7, 8, 200):
        broken[number][30] ^= 1
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(broken))
    _, samples, reason = read(TFRecordSource(path))
    expect_samples(
        samples, {i: one for i, one in enumerate(records) if i not in (0, 7, 8, 200)}, places_of(records)
    )
    assert "4 problems, the first: record at byte 0: its checksum does not fit" in reason
    broken[250][2] ^= 1
    path.write_bytes(b"".join(broken))
    rows, samples, reason = read(TFRecordSource(path))
    expect_samples(
        samples,
        {i: one for i, one in enumerate(records[:250]) if i not in (0, 7, 8, 200)},
        places_of(records),
    )
    assert rows
    assert "5 problems" in reason


def test_an_example_that_is_none_among_small_ones_is_left_out_by_its_place(tmp_path: Path) -> None:
    records = numbers(100)
    records[40] = b"\x12\x00"
    write(tmp_path / "a.tfrecord", records)
    _, samples, reason = read(TFRecordSource(tmp_path))
    expect_samples(samples, {i: one for i, one in enumerate(records) if i != 40}, places_of(records))
    assert f"record at byte {places_of(records)[40]}: a SequenceExample" in reason


def test_a_file_of_damaged_small_records_is_read_once(tmp_path: Path) -> None:
    broken = bytearray(framed(example(entry("x", 3, [1]))))
    broken[-1] ^= 1
    (tmp_path / "a.tfrecord").write_bytes(bytes(broken) * 20_000)
    _, samples, reason = read(TFRecordSource(tmp_path))
    assert not samples
    assert "20,000 problems" in reason


@given(st.lists(INT64 | st.integers(-3, 300), max_size=200))
def test_integers_are_decoded_packed_and_unpacked(values: list[int]) -> None:
    packed = field(1, b"".join(map(varint, values)))
    unpacked = b"".join(varint(1 << 3) + varint(value) for value in values)
    mixed = packed + unpacked
    for content, expected in ((packed, values), (unpacked, values), (mixed, values * 2)):
        found = parse_example(example(feature("x", 3, content)))["x"]
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.int64
        assert found.tolist() == expected


@given(st.lists(st.floats(width=32), max_size=50))
def test_floats_are_taken_packed_and_refused_otherwise(values: list[float]) -> None:
    packed = field(1, struct.pack(f"<{len(values)}f", *values))
    found = parse_example(example(feature("x", 2, packed)))["x"]
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, np.array(values, np.float32))
    unpacked = b"".join(varint(1 << 3 | 5) + struct.pack("<f", value) for value in values)
    if values:
        with pytest.raises(ValueError, match="not packed"):
            parse_example(example(feature("x", 2, unpacked)))


def test_integers_of_every_width_are_decoded() -> None:
    values = [sign * ((1 << bits) - less) for bits in range(63) for less in (0, 1) for sign in (1, -1)]
    assert np.asarray(parse_example(example(entry("x", 3, values)))["x"]).tolist() == values


@pytest.mark.parametrize(
    "packed", [b"\x80", b"\x05\xff", b"\x80" * 10 + b"\x01", b"\x01" * 30 + b"\xff" * 8], ids=repr
)
def test_integers_that_are_cut_off_or_too_long_are_a_value_error(packed: bytes) -> None:
    with pytest.raises(ValueError, match=r"no tf\.train\.Example"):
        parse_example(example(feature("x", 3, field(1, packed))))


@given(st.binary(max_size=200))
def test_any_bytes_are_an_example_or_a_value_error(data: bytes) -> None:
    try:
        parse_example(data)
    except ValueError:
        pass


@given(st.data())
def test_a_damaged_example_is_one_or_a_value_error(data: st.DataObject) -> None:
    whole = example(feature("x", 3, field(1, varint(5) * 30))) + example(feature("y", 1, field(1, b"text")))
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        parse_example(bytes(broken[: data.draw(st.integers(0, len(whole)))]))
    except ValueError:
        pass
