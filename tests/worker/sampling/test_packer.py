"""Samples into columns: what goes in comes out of the shard file, byte for byte."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import SchemaMismatchError
from cachestream.shard_format import encode_header
from cachestream.sources.base import Rows
from cachestream.storage.shard import MappedShard
from cachestream.worker.sampling.encode import to_record, to_table
from cachestream.worker.sampling.packer import Packer


def write(packer: Packer, path: Path) -> MappedShard:
    content = packer.content({"spans": []})
    path.write_bytes(encode_header(content) + b"".join(column.data.tobytes() for column in content.columns))
    shard = MappedShard(str(path))
    shard.verify()
    return shard


def add(packer: Packer, key: str, sample: Any) -> None:
    packer.add(to_record(sample, key), None)


def test_samples_of_one_shape_become_one_array(tmp_path: Path) -> None:
    packer = Packer()
    samples = [np.full((2, 3), i, np.float32) for i in range(5)]
    for i, sample in enumerate(samples):
        add(packer, f"key {i}", {"x": sample, "label": i})
    shard = write(packer, tmp_path / "shard")
    assert np.array_equal(shard.array("x"), np.stack(samples))
    assert shard.array("label").tolist() == [0, 1, 2, 3, 4]
    assert shard.keys() == [f"key {i}" for i in range(5)]


def test_samples_of_several_shapes_become_flat_data_with_offsets_and_shapes(tmp_path: Path) -> None:
    packer = Packer()
    samples = [np.arange(n * 2, dtype=np.int16).reshape(n, 2) for n in (3, 0, 1)]
    for i, sample in enumerate(samples):
        add(packer, str(i), sample)
    shard = write(packer, tmp_path / "shard")
    offsets, shapes = shard.array("0#offsets").tolist(), shard.array("0#shapes").tolist()
    assert offsets == [0, 6, 6, 8]
    assert shapes == [[3, 2], [0, 2], [1, 2]]
    assert np.array_equal(shard.array("0"), np.concatenate([s.reshape(-1) for s in samples]))


@pytest.mark.e2e
@given(
    st.lists(
        st.tuples(
            st.text(), st.binary(max_size=9), st.integers(0, 3), st.integers(0, 2**40), st.text(max_size=5)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_what_goes_in_comes_out(
    tmp_path_factory: pytest.TempPathFactory, samples: list[tuple[str, bytes, int, int, str]]
) -> None:
    packer = Packer()
    for text, data, length, number, key in samples:
        add(packer, key, {"text": text, "data": data, "ragged": np.arange(length), "number": number})
    shard = write(packer, tmp_path_factory.mktemp("packer") / "shard")

    def strings(name: str) -> list[bytes]:
        offsets, flat = shard.array(f"{name}#offsets"), shard.array(name).tobytes()
        return [flat[a:b] for a, b in itertools.pairwise(offsets)]

    assert shard.keys() == [key for *_, key in samples]
    assert [s.decode("utf-8", "surrogatepass") for s in strings("text")] == [text for text, *_ in samples]
    assert strings("data") == [data for _, data, *_ in samples]
    assert shard.array("number").tolist() == [number for *_, number, _ in samples]
    lengths = [length for _, _, length, _, _ in samples]
    expected = np.concatenate([np.arange(length) for length in lengths])
    assert np.array_equal(shard.array("ragged").reshape(-1), expected)


def test_the_size_is_at_least_what_the_columns_take() -> None:
    packer = Packer()
    for i in range(100):
        add(packer, f"{i}", {"x": np.ones(i), "y": "text"})
    in_columns = sum(c.data.nbytes for c in packer.content({}).columns)
    assert packer.size_bytes <= in_columns <= 2 * packer.size_bytes


def test_a_packer_starts_over_with_nothing_of_the_shard_before(tmp_path: Path) -> None:
    packer = Packer()
    add(packer, "long key", {"x": np.ones(1000), "other": 1})
    packer.clear()
    assert (packer.num_samples, packer.size_bytes) == (0, 0)
    add(packer, "k", {"x": np.zeros(2)})
    shard = write(packer, tmp_path / "shard")
    assert shard.keys() == ["k"]
    assert set(shard.columns) == {"x", "__key__", "__key__#offsets"}
    assert shard.array("x").tolist() == [[0.0, 0.0]]


def test_buffers_grow_past_their_first_size_without_losing_anything(tmp_path: Path) -> None:
    packer, rng = Packer(), np.random.default_rng(0)
    samples = [rng.integers(0, 255, 30_000, np.uint8) for _ in range(20)]
    for i, sample in enumerate(samples):
        add(packer, str(i), sample)
    assert np.array_equal(write(packer, tmp_path / "shard").array("0"), np.stack(samples))


@pytest.mark.parametrize(
    "other",
    [{"y": 1.0}, {"x": True}, {"x": np.ones(3)}, {"x": "text"}, {"x": 1.0, "y": 1.0}, (1.0,), 1.0],
    ids=repr,
)
def test_a_sample_of_another_kind_is_refused_and_leaves_the_shard_as_it_was(
    tmp_path: Path, other: Any
) -> None:
    packer = Packer()
    add(packer, "a", {"x": 1.0})
    with pytest.raises(SchemaMismatchError):
        add(packer, "b", other)
    add(packer, "c", {"x": 2.0})
    shard = write(packer, tmp_path / "shard")
    assert shard.keys() == ["a", "c"]
    assert shard.array("x").tolist() == [1.0, 2.0]


def test_a_sample_that_fits_the_shard_but_not_the_cache_is_refused() -> None:
    packer = Packer()
    with pytest.raises(SchemaMismatchError):
        packer.add(to_record({"x": 1.0}, "a"), to_record({"x": "text"}).schema)
    assert packer.num_samples == 0


HUGE = np.broadcast_to(np.uint8(0), (1 << 60,))  # for which no machine has the memory


@pytest.mark.parametrize("nbytes", [8, 100_000])
@pytest.mark.parametrize("count", [0, 3])
def test_a_sample_for_which_there_is_no_memory_leaves_the_shard_as_it_was(
    tmp_path: Path, count: int, nbytes: int
) -> None:
    packer = Packer()
    for i in range(count):
        add(packer, f"{i}", {"x": np.full(nbytes, i, np.uint8), "y": f"text {i}"})
    size_bytes = packer.size_bytes
    record = to_record({"x": np.ones(nbytes + 1, np.uint8), "y": ""}, "huge")
    with pytest.raises(MemoryError):
        packer.add(replace(record, columns=(record.columns[0], [HUGE])), None)
    assert (packer.num_samples, packer.size_bytes) == (count, size_bytes)
    add(packer, "last", {"x": np.full(nbytes, 9, np.uint8), "y": "the last text"})
    shard = write(packer, tmp_path / "shard")
    assert shard.keys() == [*map(str, range(count)), "last"]
    assert shard.array("x").tolist() == [[i] * nbytes for i in (*range(count), 9)]
    assert shard.array("y").tobytes().decode() == "text 0text 1text 2"[: 6 * count] + "the last text"


def test_a_table_for_which_there_is_no_memory_leaves_the_shard_as_it_was(tmp_path: Path) -> None:
    packer = Packer()
    table = to_table(
        Rows(["a", "b"], {"x": np.arange(2), "y": ["one", "other"], "z": np.zeros((2, 3), np.uint8)})
    )
    packer.add(table, None)
    texts, numbers = table.columns[1], table.columns[0]
    with pytest.raises(MemoryError):
        packer.add(replace(table, columns=(numbers, texts, HUGE.reshape(2, -1))), None)
    with pytest.raises(MemoryError):
        packer.add(replace(table, columns=(numbers, [bytes(10_000), HUGE], table.columns[2])), None)
    packer.add(table.cut(1, 2), None)
    shard = write(packer, tmp_path / "shard")
    assert shard.keys() == ["a", "b", "b"]
    assert shard.array("x").tolist() == [0, 1, 1]
    assert shard.array("y").tobytes() == b"oneotherother"


def test_an_empty_shard_has_no_content() -> None:
    with pytest.raises(SchemaMismatchError):
        Packer().content({})
