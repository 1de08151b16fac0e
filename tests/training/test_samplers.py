"""Samplers give the same order in a DataLoader over the dataset, in the loader, and on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data

from cachestream import ConfigError, EpochLoader, NotEnoughSamplesError
from cachestream.training.plan import Plan, count_batches
from cachestream.training.samplers import evaluate, interleave
from tests.support.caches import add_shard, numbered
from tests.training.conftest import NewCache, NewJob
from tests.training.plans import batch_positions


def batches_of(loader: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in loader]


GAPPY: Any = [[], [0, 1], [], [2, 3], [], [], [4], [5, 6], []]
WHOLE = [batch for batch in GAPPY if batch]


@pytest.mark.e2e
@pytest.mark.parametrize("options", [{}, {"with_keys": True}, {"batch_transform": dict}], ids=str)
def test_batches_without_samples_are_left_out_also_after_a_resume(
    options: dict[str, Any], new_cache: NewCache
) -> None:
    cache = new_cache(1, 8)
    for done in range(1, len(WHOLE)):
        with EpochLoader(cache, 2, sampler=GAPPY, **options) as loader:
            batches = iter(loader)
            assert [next(batches)["number"].tolist() for _ in range(done)] == WHOLE[:done]
            assert len(loader) == len(WHOLE)
            state = loader.state_dict()
        with EpochLoader(cache, 2, sampler=GAPPY, **options) as loader:
            loader.load_state_dict(state)
            assert len(loader) == len(WHOLE)
            assert batches_of(loader) == WHOLE[done:]
            assert batches_of(loader) == WHOLE


@pytest.mark.parametrize("with_keys", [False, True])
def test_batches_without_samples_are_left_out_on_all_ranks(
    with_keys: bool, new_cache: NewCache, new_job: NewJob
) -> None:
    cache = new_cache(1, 8)
    own: list[list[list[int]]] = [[[], [0], [], [2], [4]], [[1], [3], [], [5], []]]

    class Own(list[list[int]]):
        num_replicas = 2

    def of(samplers: list[Any]) -> list[list[list[int]]]:
        return new_job(2).run(
            lambda rank, make: batches_of(make(cache, 2, sampler=samplers[rank], with_keys=with_keys))
        )

    assert of([GAPPY, GAPPY]) == [WHOLE[0::2], WHOLE[1::2]]
    assert of(list(map(Own, own))) == [[[0], [2], [4]], [[1], [3], [5]]]


def test_a_sampler_of_batches_without_samples_is_one_that_gives_nothing(new_cache: NewCache) -> None:
    nothing: Any = [[], []]
    with (
        EpochLoader(new_cache(1, 8), 4, sampler=nothing) as loader,
        pytest.raises(NotEnoughSamplesError, match="0 samples make no batch"),
    ):
        next(iter(loader))


@pytest.mark.e2e
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_gives_all_ranks_together_each_sample_once(
    shuffle: bool, new_cache: NewCache, new_job: NewJob
) -> None:
    """The loader does not pad as the sampler would: no sample comes twice."""
    cache = new_cache(5, 7)
    for size in (1, 2, 4):

        def work(rank: int, make: Any, size: int = size) -> list[list[list[int]]]:
            sampler: Any = lambda dataset: data.DistributedSampler(dataset, size, rank, shuffle, seed=3)  # noqa: E731
            loader = make(cache, 4, sampler=sampler, drop_last=False)
            return [batches_of(loader) for _ in range(2)]

        results = new_job(size).run(work)
        for epoch in range(2):
            drawn = [n for result in results for batch in result[epoch] for n in batch]
            assert len(drawn) == len(set(drawn)) > 35 - size
        assert (results[0][0] != results[0][1]) == shuffle


class Bucket:
    """A user's distributed sampler, which gives each rank its share, optionally in batches."""

    def __init__(self, dataset: Any, rank: int, size: int, batched: bool) -> None:
        self.num_replicas = size
        mine = list(range(rank, len(dataset), size))
        self.given: list[Any] = [mine[i : i + 3] for i in range(0, len(mine), 3)] if batched else mine

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)


@pytest.mark.e2e
@pytest.mark.parametrize("batched", [False, True])
def test_each_rank_gets_what_its_own_sampler_gave_it_also_after_a_resume_on_all_from_one_checkpoint(
    batched: bool, new_cache: NewCache, new_job: NewJob
) -> None:
    cache = new_cache(5, 7)

    def options(rank: int) -> dict[str, Any]:
        return {"sampler": lambda dataset: Bucket(dataset, rank, 2, batched), "drop_last": False}

    def head(rank: int, make: Any) -> Any:
        loader = make(cache, 3, **options(rank))
        batches = iter(loader)
        first = next(batches)["number"].tolist()
        return loader.state_dict(), first, batches_of(batches)

    (state, first, rest), (_, other_first, other_rest) = new_job(2).run(head)
    assert list(chain(first, *rest)) == list(range(0, 36 if batched else 34, 2))
    assert list(chain(other_first, *other_rest)) == list(range(1, 35, 2))

    def tail(rank: int, make: Any) -> Any:
        loader = make(cache, 3, **options(rank))
        loader.load_state_dict(state)
        return batches_of(loader)

    assert new_job(2).run(tail) == [rest, other_rest]


@pytest.mark.filterwarnings("ignore:.* are not cached any more since its state was saved")
@pytest.mark.e2e
def test_each_rank_gets_its_own_where_the_nodes_have_unequal_numbers_of_ranks_also_when_one_is_replaced(
    new_cache: NewCache, new_job: NewJob
) -> None:
    """Two ranks of one cache, one of another."""
    big, small = new_cache(1, 16), new_cache(1, 8, 100)
    caches, places = [big, big, small], [(0, 2), (1, 2), (0, 1)]

    def make_of(rank: int, make: Any) -> EpochLoader:
        loader: EpochLoader = make(
            caches[rank], 2, sampler=lambda dataset: Bucket(dataset, *places[rank], batched=False)
        )
        return loader

    def head(rank: int, make: Any) -> Any:
        batches = iter(loader := make_of(rank, make))
        first = next(batches)["number"].tolist()
        return loader.state_dict(), [first, *batches_of(batches)], batches_of(loader)

    evens, odds = [[n, n + 2] for n in range(0, 16, 4)], [[n, n + 2] for n in range(1, 16, 4)]
    pairs = [[n, n + 1] for n in range(100, 108, 2)]
    heads = new_job(3).run(head)
    assert [epochs for _, *epochs in heads] == [[evens] * 2, [odds] * 2, [pairs] * 2]

    caches[2] = new_cache(1, 8, 200)

    def tail(rank: int, make: Any) -> Any:
        loader = make_of(rank, make)
        loader.load_state_dict(heads[0][0])
        return batches_of(loader)

    assert new_job(3).run(tail) == [evens[1:], odds[1:], [[n, n + 1] for n in range(200, 206, 2)]]


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=30), min_size=1, max_size=5),
    st.integers(1, 7),
    st.booleans(),
)
def test_lists_put_together_give_each_rank_its_own_when_they_are_split(
    lists: list[list[int]], batch_size: int, drop_last: bool
) -> None:
    ranks, least = len(lists), min(map(len, lists))
    together = interleave([np.array(one, np.int64) for one in lists], None, batch_size).indices
    plan = Plan(len(together), batch_size, ranks, count_batches(len(together), batch_size, ranks, drop_last))
    for rank, one in enumerate(lists):
        drawn = [batch_positions(plan, rank, i).tolist() for i in range(plan.num_batches)]
        given = [int(together[place]) for batch in drawn for place in batch]
        assert given == one[: least - least % batch_size if drop_last else least]


@pytest.mark.e2e
def test_weights_by_position_for_a_dataset_of_another_length_are_refused(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4, sampler=data.WeightedRandomSampler([1.0] * 16, 16)) as loader:
        assert len(batches_of(loader)) == 4
        add_shard(cache, numbered(16, 8))
        loader.set_epoch(5)
        with pytest.raises(ConfigError, match=r"16 weights for a dataset of 24.*weights="):
            next(iter(loader))


@pytest.mark.parametrize(
    "mask",
    [
        lambda size: [i < size // 2 for i in range(size)],
        lambda size: torch.arange(size) < size // 2,
        lambda size: np.arange(size) < size // 2,
        lambda size: data.SubsetRandomSampler([i < size // 2 for i in range(size)]),
        lambda _: [0.5, 1.5],
        lambda _: ["0", "1"],
        lambda size: [[True] * 4, [False] * (size - 4)],
    ],
)
def test_what_are_no_sample_numbers_is_refused(mask: Callable[[int], Any], new_cache: NewCache) -> None:
    with (
        EpochLoader(new_cache(2, 16), 8, sampler=lambda dataset: mask(len(dataset))) as loader,
        pytest.raises(ConfigError, match=r"the sampler yields .*give the numbers of samples"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    "spent",
    [
        iter(range(8)),
        (n for n in range(8)),
        map(int, range(8)),
        iter([[0, 1], [2, 3]]),
    ],
    ids=lambda spent: type(spent).__name__,
)
def test_what_can_be_iterated_only_once_is_no_sampler(spent: Iterator[Any], new_cache: NewCache) -> None:
    with pytest.raises(ConfigError, match=r"ends after one epoch.*function of the dataset"):
        EpochLoader(new_cache(1, 8), 4, sampler=spent)


class Peekable(data.Sampler[int]):
    """A user's sampler with a `__next__`, whose `__iter__` gives each epoch a new iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7, -1, -1))

    def __next__(self) -> int:
        return 7


@pytest.mark.parametrize(
    "sampler", [Peekable(), np.arange(8)[::-1], torch.arange(8).flip(0)], ids=lambda it: type(it).__name__
)
def test_what_can_be_iterated_again_is_a_sampler(sampler: Any, new_cache: NewCache) -> None:
    with EpochLoader(new_cache(1, 8), 8, sampler=sampler) as loader:
        for _ in range(3):
            assert batches_of(loader) == [[7, 6, 5, 4, 3, 2, 1, 0]]
    with pytest.raises(ConfigError, match=r"sampler= and locality= do not go together"):
        EpochLoader(new_cache(1, 8), 8, sampler=sampler, locality=5)


def batched(numbers: Iterator[int], size: int) -> Iterator[list[int]]:
    while True:
        yield list(itertools.islice(numbers, size))


def endless(dataset: Sized) -> Iterator[int]:
    while True:
        yield from torch.randperm(len(dataset)).tolist()


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (lambda dataset: itertools.cycle(range(len(dataset))), [8] * 6),
        (endless, [8] * 6),
        (lambda dataset: batched(endless(dataset), 8), [8] * 6),
        (lambda dataset: batched(endless(dataset), 20), [20, 20]),
        (lambda dataset: data.BatchSampler(range(len(dataset)), 8, drop_last=False), [8] * 4),
    ],
)
def test_epoch_size_ends_what_a_sampler_does_not(
    make: Callable[[Any], Any], sizes: list[int], new_cache: NewCache
) -> None:
    size = 32 if sizes == [8] * 4 else 48
    with EpochLoader(new_cache(2, 16), 8, epoch_size=size, sampler=make) as loader:
        for _ in range(3):
            assert [len(batch["number"]) for batch in loader] == sizes


@pytest.mark.e2e
def test_a_sampler_that_does_not_end_is_refused_without_epoch_size(new_cache: NewCache) -> None:
    cache = new_cache(2, 16)
    for make in (endless, lambda dataset: batched(endless(dataset), 8)):
        with (
            EpochLoader(cache, 8, sampler=make) as loader,
            pytest.raises(ConfigError, match=r"the sampler does not end.*epoch_size="),
        ):
            next(iter(loader))


def test_batches_that_are_too_few_for_epoch_size_are_refused(new_cache: NewCache) -> None:
    make = lambda dataset: data.BatchSampler(range(len(dataset)), 8, drop_last=False)  # noqa: E731
    with (
        EpochLoader(new_cache(2, 16), 8, epoch_size=64, sampler=make) as loader,
        pytest.raises(ConfigError, match="have 32 samples together, and epoch_size asks for 64"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_sampler_that_gives_a_rank_its_share_gives_its_share_of_epoch_size(
    in_batches: bool, new_cache: NewCache
) -> None:
    class Share(data.Sampler[Any]):
        num_replicas = 2

        def __iter__(self) -> Iterator[Any]:
            mine = range(0, 32, 2)
            return iter([list(mine[i : i + 4]) for i in range(0, 16, 4)] if in_batches else mine)

    with new_cache(2, 16).snapshot() as dataset:
        for most, given in ((32, 16), (16, 8), (None, 16)):
            chosen = evaluate(Share(), dataset, 0, 0, most, ranks=2)
            assert not chosen.shared
            assert len(chosen.indices) == given
