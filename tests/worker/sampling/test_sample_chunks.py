"""Samples that travel together: all of them, in order, however the source behaves, and never held back for long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestream.worker.sampling import encode
from cachestream.worker.sampling.encode import Item, SampleChunk, approximate_bytes, group_into_chunks


def item(offset: int, nbytes: int = 1) -> Item:
    return offset, f"key {offset}", offset, nbytes


def offsets(found: Iterator[SampleChunk]) -> list[list[int]]:
    return [list(chunk.offsets) for chunk in found]


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
