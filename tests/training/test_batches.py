"""Torch's own collate on samples of a dataset: what it makes of plain ones, but not sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from cachestream import Cache
from cachestream.training.batches import SampleBatch

CacheOf = Callable[[list[Any], list[int]], Cache]

SAMPLES: dict[str, Callable[[int], Any]] = {
    "a dict": lambda i: {"x": np.full((3, 2), i, np.float32), "n": i, "half": i / 2, "odd": bool(i % 2)},
    "with str and bytes": lambda i: {"name": f"s{i}", "raw": b"b" * (i + 1), "n": i},
    "a tuple": lambda i: (np.full((3, 2), i, np.uint8), i),
    "an array": lambda i: np.full((4, 5), i, np.float16),
    "a number": lambda i: i,
    "a str": lambda i: f"s{i}",
    "bytes": lambda i: b"b" * (i + 1),
}


def plain(sample: Any) -> Any:
    """`sample` in the container that anybody else would give."""
    if isinstance(sample, torch.Tensor):
        return sample.clone()
    kind = next(kind for kind in (dict, tuple, str, bytes) if isinstance(sample, kind))
    return kind(sample)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", SAMPLES)
def test_it_gives_what_it_gives_for_plain_samples(cache_of: CacheOf, kind: str) -> None:
    with cache_of([SAMPLES[kind](i) for i in range(12)], [5, 7]).snapshot() as dataset:
        batch: Any = dataset.__getitems__([3, 11, 0, 3])
        samples = [plain(sample) for sample in batch]
        expected = default_collate(samples)
        assert same(default_collate(batch), expected)
        assert same(default_collate(list(batch)), expected)
        assert same(default_collate(batch[1:]), default_collate(samples[1:]))
        assert same(default_collate([batch[0], batch[2]]), default_collate([samples[0], samples[2]]))
        assert same(next(iter(DataLoader(dataset, 12))), default_collate([dataset[i] for i in range(12)]))


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_batch_that_is_whole_is_not_taken_apart(
    cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    looked_at: list[Any] = []
    look = SampleBatch.__getitem__

    def count(batch: SampleBatch, index: Any) -> Any:
        looked_at.append(index)
        return look(batch, index)

    monkeypatch.setattr(SampleBatch, "__getitem__", count)
    with cache_of([SAMPLES[kind](i) for i in range(12)], [5, 7]).snapshot() as dataset:
        for _ in DataLoader(dataset, 6):
            pass
    assert set(looked_at) <= {0}


@pytest.mark.parametrize("key", ["x", None])
def test_fields_whose_shape_varies_come_as_lists(cache_of: CacheOf, key: str | None) -> None:
    arrays = [np.full(i + 1, i, np.float32) for i in range(4)]
    cache = cache_of([array if key is None else {key: array} for array in arrays], [4])
    with cache.snapshot() as dataset:
        (batch,) = DataLoader(dataset, 4)
    assert [len(x) for x in (batch if key is None else batch[key])] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_are_to_everybody_else_what_they_are(cache_of: CacheOf, kind: str) -> None:
    with cache_of([SAMPLES[kind](i) for i in range(4)], [4]).snapshot() as dataset:
        batch = dataset.__getitems__([0, 1])
        assert [type(sample) for sample in batch] == [type(dataset[0])] * 2
        first = batch[0]
        assert isinstance(first, type(dataset[0]))
        assert same(plain(first), dataset[0])
        if isinstance(first, torch.Tensor):
            assert type(first + 1) is torch.Tensor
