"""Ranks that agree through a real store; threads stand in for processes, for speed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from cachestream import EpochLoader, NotEnoughSamplesError
from tests.support.caches import add_shard, numbered, set_fill_state
from tests.training.conftest import NewCache, NewJob
from tests.training.jobs import PATIENCE_S

Epochs = list[list[list[int]]]  # [epoch][batch] is a list of numbers


def epochs_of(loader: EpochLoader, count: int) -> Epochs:
    found = []
    for _ in range(count):
        expected = len(loader)
        found.append([batch["number"].tolist() for batch in loader])
        assert len(found[-1]) == expected
    return found


def test_a_peek_and_a_length_after_a_break_cost_no_epoch_where_ranks_agree(
    new_cache: NewCache, new_job: NewJob
) -> None:
    cache = new_cache(4, 10)

    def work(rank: int, make: Callable[..., EpochLoader]) -> tuple[Any, ...]:
        loader = make(cache, 5)
        first = loader.peek()["number"].tolist()
        for batch in loader:
            assert batch["number"].tolist() == first
            break
        ahead = loader.peek()["number"].tolist() if rank else None  # one of them alone
        length = len(loader)
        following = [batch["number"].tolist() for batch in loader]
        assert ahead in (None, following[0])
        return loader.epoch, length, len(following), first

    results = new_job(2).run(work)
    assert [result[:3] for result in results] == [(2, 4, 4)] * 2
    assert set(results[0][3]).isdisjoint(results[1][3])


@pytest.mark.e2e
@pytest.mark.parametrize("made_by", [0, 2])
@pytest.mark.parametrize(
    "sampler", [None, lambda data: BatchSampler(SequentialSampler(data), 3, drop_last=False)]
)
def test_a_checkpoint_of_one_rank_resumes_ranks_of_other_caches_too(
    sampler: Any, made_by: int, new_cache: NewCache, new_job: NewJob
) -> None:
    large = new_cache(4, 10, 1000)
    caches = [new_cache(2, 10), large, large]

    def head(rank: int, make: Callable[..., EpochLoader]) -> tuple[dict[str, Any], list[list[int]]]:
        batches = iter(loader := make(caches[rank], 2, sampler=sampler))
        for _ in range(6 if sampler is None else 4):
            next(batches)
        return loader.state_dict(), [batch["number"].tolist() for batch in batches]

    heads = new_job(3).run(head)

    def tail(rank: int, make: Callable[..., EpochLoader]) -> list[list[int]]:
        loader = make(caches[rank], 2, sampler=sampler)
        loader.load_state_dict(heads[made_by][0])
        return [batch["number"].tolist() for batch in loader]

    assert new_job(3).run(tail) == [rest for _, rest in heads]


@pytest.mark.filterwarnings("ignore:.* are not cached any more since its state was saved")
@pytest.mark.e2e
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("done", [3, 7])
def test_an_epoch_of_fixed_length_keeps_it_when_it_is_resumed_with_more_or_fewer_caches(
    done: int, before: int, after: int, new_cache: NewCache, new_job: NewJob
) -> None:
    """Each rank has a cache of its own, as on nodes of one rank each; those that come have none of the epoch."""
    caches = [new_cache(1, 90, 1000 * rank) for rank in range(3)]
    length = 8 * before

    def head(rank: int, make: Callable[..., EpochLoader]) -> dict[str, Any]:
        batches = iter(loader := make(caches[rank], 1, epoch_size=length, drop_last=False))
        for _ in range(done):
            next(batches)
        return loader.state_dict()

    state = new_job(before).run(head)[0]

    def tail(rank: int, make: Callable[..., EpochLoader]) -> list[list[list[int]]]:
        loader = make(caches[rank], 1, epoch_size=length, drop_last=False)
        loader.load_state_dict(state)
        return [[batch["number"].tolist() for batch in loader] for _ in range(2)]

    tails = new_job(after).run(tail)
    left = (8 - done) * before
    assert [len(rest) for rest, _ in tails] == [left // after] * after
    assert [len(whole) for _, whole in tails] == [length // after] * after


@pytest.mark.e2e
def test_a_cache_that_comes_to_a_resumed_epoch_with_nothing_is_waited_for(
    new_cache: NewCache, new_job: NewJob
) -> None:
    caches = [new_cache(1, 40), new_cache()]

    def head(_: int, make: Callable[..., EpochLoader]) -> dict[str, Any]:
        batches = iter(loader := make(caches[0], 2))
        next(batches)
        return loader.state_dict()

    (state,) = new_job(1).run(head)
    set_fill_state(caches[1], "filling")
    waits = threading.Event()

    def tail(rank: int, make: Callable[..., EpochLoader]) -> list[list[int]]:
        loader = make(caches[rank], 2)
        loader.load_state_dict(state)
        batches = iter(loader)
        if rank == 1:
            waits.set()
        else:
            waits.wait(20)
            add_shard(caches[1], numbered(1000, 12))
        return [batch["number"].tolist() for batch in batches]

    rest, came = new_job(2).run(tail)
    assert len(rest) == len(came) == 6
    assert sorted(n for batch in came for n in batch) == list(range(1000, 1012))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_samples_evicted_since_a_checkpoint_are_skipped_and_told_equally_on_all_ranks(
    size: int, new_cache: NewCache, new_job: NewJob
) -> None:
    cache = new_cache(4, 12)

    def head(_: int, make: Callable[..., EpochLoader]) -> tuple[list[int], dict[str, Any]]:
        batches = iter(loader := make(cache, 3))
        return next(batches)["number"].tolist(), loader.state_dict()

    heads = new_job(2).run(head)
    cache.quarantine(2, "a test")
    drawn = {n for numbers, _ in heads for n in numbers}
    left = set(range(48)) - set(range(12, 24)) - drawn

    def tail(_: int, make: Callable[..., EpochLoader]) -> Any:
        loader = make(cache, 2, drop_last=False)
        loader.load_state_dict(heads[0][1])
        try:
            batches = iter(loader)
            next(batches)
        except UserWarning as warning:  # an error here: before the first batch, which is still to come
            return str(warning), [batch["number"].tolist() for batch in batches]
        return "nothing", []

    told, rest = zip(*new_job(size).run(tail), strict=True)
    lost = len(set(range(12, 24)) - drawn)
    assert {text.partition(" are not cached")[0] for text in told} == {f"{lost} samples of epoch 0"}
    assert len({len(batches) for batches in rest}) == 1
    again = [n for batches in rest for batch in batches for n in batch]
    assert len(again) == len(set(again))
    assert set(again) <= left
    assert len(again) > len(left) - size


# --- trouble


def test_a_failed_epoch_can_be_tried_again_by_all(new_cache: NewCache, new_job: NewJob) -> None:
    cache = new_cache(1, 2)
    set_fill_state(cache, "complete")
    failed = threading.Barrier(2)

    def work(rank: int, make: Callable[..., EpochLoader]) -> Epochs:
        loader = make(cache, 4)
        with pytest.raises(NotEnoughSamplesError):
            next(iter(loader))
        failed.wait(PATIENCE_S)
        if rank == 0:
            add_shard(cache, numbered(2, 20))
        failed.wait(PATIENCE_S)
        return epochs_of(loader, 2)

    results = new_job(2).run(work)
    assert [[len(epoch) for epoch in result] for result in results] == [[2, 2]] * 2


@pytest.mark.e2e
def test_a_rank_whose_trainer_pauses_still_answers_the_others(new_cache: NewCache, new_job: NewJob) -> None:
    """A rank that computes for longer than the deadline in mid-epoch is not taken for dead."""
    cache, job = new_cache(4, 24), new_job(2)
    job.deadline_s = 2.0

    def work(rank: int, make: Callable[..., EpochLoader]) -> int:
        loader = make(cache, 2, prefetch=1)
        batches = iter(loader)
        next(batches)
        if rank == 1:
            threading.Event().wait(job.deadline_s + 1)
        return 1 + len(list(batches)) + len(list(loader))

    assert job.run(work) == [48, 48]
