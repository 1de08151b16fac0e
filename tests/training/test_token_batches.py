"""Batches of `max_tokens`: within the budget, each sample once, of like length, on all ranks and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachestream import Cache, ConfigError, EpochLoader, NotEnoughSamplesError
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.training.alike_batches import group_by_length, shuffle_batches
from tests.training.conftest import NewJob
from tests.training.test_select import CacheOf

LENGTHS = [1 + (7 * n) % 40 for n in range(200)]


@pytest.fixture
def cache(cache_of: CacheOf) -> Cache:
    return cache_of(
        [{"t": torch.full((length,), n), "n": n} for n, length in enumerate(LENGTHS)], [60, 80, 60]
    )


def drawn(loader: EpochLoader) -> list[list[int]]:
    return [batch["n"].tolist() for batch in loader]


def padded(batch: list[int]) -> int:
    return max(LENGTHS[n] for n in batch) * len(batch)


@pytest.mark.e2e
@given(
    lengths=st.lists(st.integers(0, 50), max_size=200),
    budget=st.integers(50, 300),
    batch_size=st.integers(1, 30),
    window=st.integers(1, 120),
    seed=st.integers(0, 99),
)
def test_batches_hold_each_sample_once_and_keep_the_budget(
    lengths: list[int], budget: int, batch_size: int, window: int, seed: int
) -> None:
    sizes = np.array(lengths, np.int64)
    order = np.random.default_rng(seed).permutation(len(sizes)).astype(np.int64)
    indices, bounds = group_by_length(sizes, order, budget, batch_size, window)
    assert sorted(indices.tolist()) == list(range(len(sizes)))
    assert bounds[0] == 0
    assert bounds[-1] == len(sizes)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        batch = sizes[indices[start:stop]]
        assert 0 < len(batch) <= batch_size
        assert batch.max() * len(batch) <= budget
        assert start // window == (stop - 1) // window
        follows = stop < len(sizes) and stop % window  # greedy: one more would not have fitted
        assert not follows or len(batch) == batch_size or batch[0] * (len(batch) + 1) > budget


@given(sizes=st.lists(st.integers(1, 5), max_size=40), ranks=st.integers(1, 5), key=st.integers(0, 2**64 - 1))
def test_shuffling_keeps_batches_whole_and_neighbours_together(
    sizes: list[int], ranks: int, key: int
) -> None:
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    indices = np.arange(bounds[-1], dtype=np.int64)
    moved, ends = shuffle_batches(indices, bounds, ranks, key)
    before = [indices[i:j].tolist() for i, j in pairwise(bounds)]
    after = [moved[i:j].tolist() for i, j in pairwise(ends)]
    assert sorted(after) == sorted(before)
    for step in range(len(after) // ranks):
        places = [before.index(batch) for batch in after[step * ranks : (step + 1) * ranks]]
        assert places == list(range(places[0], places[0] + ranks))


@pytest.mark.e2e
def test_less_is_padding_than_in_batches_of_a_fixed_size(cache: Cache) -> None:
    shares = []
    for options in ({"max_tokens": {"t": 320}}, {}):
        with EpochLoader(cache, 16, drop_last=False, **options) as loader:  # type: ignore[arg-type]
            shares.append(1 - sum(LENGTHS) / sum(map(padded, drawn(loader))))
    assert shares[0] < 0.1
    assert shares[1] > 0.3


def test_a_shard_whose_lengths_are_damaged_is_quarantined(cache: Cache, new_job: NewJob) -> None:
    shard = MappedShard(path := shard_path(cache.path, 2))
    with open(path, "r+b") as file:
        file.seek(shard.columns["t#shapes"].offset)
        file.write(b"\x01")

    def work(rank: int, make: Callable[..., EpochLoader]) -> list[list[int]]:
        # Only drawing reads the lengths.
        return drawn(make(cache, 16, max_tokens={"t": 120}, columns=["n"]))

    ranks: list[list[list[int]]] = new_job(2).run(work)
    assert len(ranks[0]) == len(ranks[1])
    samples = [n for batches in ranks for batch in batches for n in batch]
    assert len(samples) == len(set(samples)) > 120 - 2 * 16
    assert not set(samples) & set(range(60, 140))
    assert (cache.num_shards, cache.status().quarantined) == (2, 1)


def test_fewer_batches_than_ranks_are_an_error_and_no_empty_epoch(cache_of: CacheOf, new_job: NewJob) -> None:
    cache = cache_of([{"t": torch.zeros(4), "n": n} for n in range(10)], [10])
    errors: list[Any] = new_job(2).run(
        lambda _, make: drawn(make(cache, 16, max_tokens={"t": 8000}, min_samples=10))
    )
    for error in errors:
        assert isinstance(error, NotEnoughSamplesError)
        assert "each of 2 ranks takes a batch, and 10 samples make only 1" in str(error)


def test_an_epoch_size_is_the_most_that_is_drawn(cache: Cache) -> None:
    with EpochLoader(cache, 16, max_tokens={"t": 120}, epoch_size=50) as loader:
        assert sum(map(len, drawn(loader))) == 50


@pytest.mark.e2e
def test_a_sample_above_the_budget_is_refused_and_a_condition_leaves_it_out(cache: Cache) -> None:
    says = r"50 of 200 samples are longer, up to 40 tokens.*where=lambda columns"
    with EpochLoader(cache, 16, max_tokens={"t": 30}) as loader, pytest.raises(ConfigError, match=says):
        list(loader)
    with EpochLoader(
        cache, 16, max_tokens={"t": 30}, where=lambda columns: columns.lengths("t") <= 30
    ) as loader:
        assert sum(map(len, drawn(loader))) == 150


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 8192}, "give the field with the tokens, and the most in a batch"),
        ({"max_tokens": {"t": 1, "n": 2}}, "give the field with the tokens"),
        ({"max_tokens": {"t": 0}}, "max_tokens"),
        ({"max_tokens": {"t": 90}, "sampler": [1]}, "sampler= and max_tokens= do not go"),
        ({"max_tokens": {"t": 90}, "weights": True}, "weights= and max_tokens= do not go"),
        ({"max_tokens": {"t": 90}, "locality": 9}, "locality= and max_tokens= do not go"),
        ({"max_tokens": {"n": 90}}, "'n' is one number in each sample"),
        ({"max_tokens": {"u": 90}}, "no field 'u'"),
    ],
)
def test_a_wrong_use_says_what_to_give(cache: Cache, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says), EpochLoader(cache, 16, **options) as loader:
        list(loader)
