"""Samples that travel together: all of them, in order, however the source behaves, and never held back for long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import SampleError
from cachestream.worker.sampling import encode
from cachestream.worker.sampling.encode import (
    Item,
    SampleChunk,
    Table,
    approximate_bytes,
    group_into_chunks,
    in_columns,
    to_record,
)
from cachestream.worker.sampling.packer import Packer


def item(offset: int, nbytes: int = 1) -> Item:
    return offset, f"key {offset}", offset, nbytes


def offsets(found: Iterator[SampleChunk]) -> list[list[int]]:
    return [list(chunk.offsets) for chunk in found]


@pytest.mark.e2e
@given(st.lists(st.tuples(st.integers(1, 2 * encode.MOST_BYTES), st.booleans()), max_size=200))
def test_every_sample_comes_once_and_in_order(samples: list[tuple[int, bool]]) -> None:
    """Some of them as chunks that the source made."""
    given_ = [
        SampleChunk([offset], ["key"], [offset], nbytes) if is_chunk else item(offset, nbytes)
        for offset, (nbytes, is_chunk) in enumerate(samples)
    ]
    found = list(group_into_chunks(iter(given_)))
    assert [offset for chunk in found for offset in chunk.offsets] == list(range(len(samples)))
    assert all(
        len(chunk.offsets) == len(chunk.keys) == len(chunk.samples) <= encode.MOST_SAMPLES for chunk in found
    )
    assert sum(chunk.nbytes for chunk in found) == sum(nbytes for nbytes, _ in samples)


def test_large_samples_go_alone() -> None:
    assert offsets(group_into_chunks(item(i, encode.MOST_BYTES) for i in range(3))) == [[0], [1], [2]]


def test_a_slow_sample_is_not_held_back_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    assert offsets(group_into_chunks(item(i) for i in range(3))) == [[0], [1], [2]]


@pytest.mark.parametrize("error", [ValueError("torn"), SystemExit(1), KeyboardInterrupt()])
def test_what_came_before_an_error_comes_before_the_error(error: BaseException) -> None:
    def failing() -> Iterator[Item]:
        yield item(0)
        yield item(1)
        raise error

    found: list[int] = []
    with pytest.raises(type(error)):
        found.extend(chunk.offsets[-1] for chunk in group_into_chunks(failing()))
    assert found[-1] == 1


def test_whatever_a_sample_is_it_takes_some_memory() -> None:
    """A sparse tensor has no nbytes, and the transform may make a dense one of it."""
    sample = {"x": torch.eye(3).to_sparse(), "y": (np.zeros(1000, np.uint8), "text"), "z": object()}
    assert 1000 < approximate_bytes(sample) < 2000


SAMPLES = st.sampled_from(
    [
        {"x": np.arange(3), "text": "a"},
        {"x": np.arange(4), "text": "bc"},
        {"x": np.arange(3.0), "text": ""},
        {"x": np.zeros(2000), "blob": b"b" * 5000},
        (b"small", 1),
        (b"large" * 2000, 2),
        torch.ones(2),
        {"x": None},
        object(),
    ]
)


@pytest.mark.e2e
@given(
    st.lists(SAMPLES, min_size=1, max_size=5)
    | st.builds(list.__mul__, st.lists(SAMPLES, min_size=1, max_size=1), st.integers(1, 5))
)
def test_samples_in_columns_are_packed_as_one_by_one(samples: list[Any]) -> None:
    """Single ones, and those that differ or cannot all be stored, stay as they are: an error is that of one sample."""
    chunk = SampleChunk(range(7, 7 + len(samples)), [f"k{i}" for i in range(len(samples))], samples, 99)
    found = in_columns(chunk)
    try:
        records = [to_record(sample, key) for sample, key in zip(samples, chunk.keys, strict=True)]
    except SampleError:
        assert found is chunk
        return
    if len(records) == 1 or len({record.schema for record in records}) > 1:
        assert found is chunk
        return
    assert isinstance(found.samples, Table)
    assert (found.offsets, found.nbytes) == (chunk.offsets, 99)
    assert in_columns(found) is found
    packer, expected = Packer(), Packer()
    packer.add(found.samples, None)
    for record in records:
        expected.add(record, None)
    assert [c.data.tobytes() for c in packer.content({}).columns] == [
        c.data.tobytes() for c in expected.content({}).columns
    ]
    assert packer.size_bytes == expected.size_bytes


def test_samples_with_a_key_that_is_no_str_stay_as_they_are() -> None:
    chunk = SampleChunk([0, 1], ["a", 1], [1, 2], 8)  # type: ignore[list-item]
    assert in_columns(chunk) is chunk
