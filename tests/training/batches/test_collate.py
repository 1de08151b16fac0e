"""Collate functions, torch's and ours, on the samples of a dataset: what they make of plain samples."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import cachestream as cs
from cachestream import Cache
from tests.support.same import same

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


@pytest.mark.parametrize("kind", ["a dict", "with str and bytes", "a tuple"])
def test_a_batch_that_is_whole_is_not_put_together_again(cache_of: CacheOf, kind: str) -> None:
    with cache_of([SAMPLES[kind](i) for i in range(12)], [5, 7]).snapshot() as dataset:
        batch: Any = dataset.__getitems__([3, 11, 0, 3])
        whole = batch.whole()
        for made in (default_collate(batch), cs.collate(batch)):
            parts = [whole] if isinstance(whole, dict) else whole
            others = [made] if isinstance(made, dict) else made
            assert all(map(operator.is_, parts, others))


@pytest.mark.parametrize("collate", [default_collate, cs.collate])
@pytest.mark.parametrize("kind", ["a dict", "an array"])
def test_what_a_collate_function_changes_is_changed(cache_of: CacheOf, kind: str, collate: Any) -> None:
    with cache_of([SAMPLES[kind](i) for i in range(4)], [4]).snapshot() as dataset:

        def changed(*which: int) -> list[float]:
            """The largest values of batch 0, 1, 2, 3 after a thousand was added to `which` of the samples."""
            batch: Any = dataset.__getitems__(range(4))
            for i in which:
                if isinstance(batch[i], dict):
                    batch[i]["x"] = batch[i]["x"] + 1000
                else:
                    batch[i] = batch[i] + 1000
            made = collate(batch)
            values = made["x"] if isinstance(made, dict) else made
            largest: list[float] = values.flatten(1).amax(1).tolist()
            return largest

        assert changed() == [0, 1, 2, 3]
        assert changed(0) == [1000, 1, 2, 3]
        assert changed(2) == [0, 1, 1002, 3]
        assert changed(2, 0) == [1000, 1, 1002, 3]
        assert changed(0, 1, 2, 3) == [1000, 1001, 1002, 1003]


def test_a_field_that_is_added_or_taken_away_is_seen(cache_of: CacheOf) -> None:
    with cache_of([SAMPLES["a dict"](i) for i in range(4)], [4]).snapshot() as dataset:

        def with_weights(samples: Any) -> Any:
            for sample in samples:
                sample["weight"] = 2.0 * sample.pop("n")
            return default_collate(samples)

        (batch,) = DataLoader(dataset, 4, collate_fn=with_weights)
        assert set(batch) == {"x", "half", "odd", "weight"}
        assert batch["weight"].tolist() == [0, 2, 4, 6]


def test_bare_arrays_can_be_stacked_by_torch(cache_of: CacheOf) -> None:
    with cache_of([SAMPLES["an array"](i) for i in range(4)], [4]).snapshot() as dataset:
        (batch,) = DataLoader(dataset, 4, collate_fn=torch.stack)
    assert type(batch) is torch.Tensor
    assert batch[:, 0, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_are_to_everybody_else_what_they_are(cache_of: CacheOf, kind: str) -> None:
    with cache_of([SAMPLES[kind](i) for i in range(4)], [4]).snapshot() as dataset:
        batch: Any = dataset.__getitems__([0, 1])
        assert all(isinstance(sample, type(dataset[0])) for sample in batch)
        first = batch[0]
        assert isinstance(first, type(dataset[0]))
        assert same(plain(first), dataset[0])
        if isinstance(first, torch.Tensor):
            assert type(first + 1) is torch.Tensor
