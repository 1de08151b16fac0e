"""The loader: an epoch has the samples cached by then, each once, and the next one is ready in time."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any, Final

import numpy as np
import pytest
import torch

from cachestream import ConfigError, EpochError, EpochLoader
from cachestream.schema import IntArray
from cachestream.training import pipeline
from cachestream.training.batches.mapped_shards import EpochMaps
from tests.support.caches import add_shard, numbered, numbers
from tests.training.conftest import NewCache

in_both_ways: Final = pytest.mark.usefixtures("gathered")


# --- what an epoch is


@in_both_ways
def test_every_epoch_has_each_cached_sample_once_in_another_order_and_new_ones_appear(
    new_cache: NewCache,
) -> None:
    cache = new_cache(3, 8)
    with EpochLoader(cache, 4, seed=1) as loader:
        assert len(loader) == 6
        first, second = numbers(loader), numbers(loader)
        assert sorted(first) == sorted(second) == list(range(24))
        assert first != second
        add_shard(cache, numbered(24, 8))
        numbers(loader)  # may have been prepared before the shard came
        assert sorted(numbers(loader)) == list(range(32))
        assert len(loader) == 8


@in_both_ways
def test_the_order_depends_on_seed_and_epoch_alone(new_cache: NewCache) -> None:
    cache = new_cache(3, 8)

    def epochs(seed: int) -> list[list[int]]:
        with EpochLoader(cache, 4, seed=seed) as loader:
            return [numbers(loader) for _ in range(3)]

    assert epochs(5) == epochs(5) != epochs(6)


@in_both_ways
def test_without_shuffle_samples_come_in_order_of_arrival(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(3, 5), 4, shuffle=False, drop_last=False) as loader:
        assert numbers(loader) == numbers(loader) == list(range(15))
        assert [len(batch["number"]) for batch in loader] == [4, 4, 4, 3]


@in_both_ways
def test_the_rest_is_dropped_or_kept_as_asked(new_cache: NewCache) -> None:
    cache = new_cache(1, 10)
    with EpochLoader(cache, 4) as loader:
        assert [len(batch["number"]) for batch in loader] == [4, 4]
    with EpochLoader(cache, 4, drop_last=False) as loader:
        assert [len(batch["number"]) for batch in loader] == [4, 4, 2]
        assert len(loader) == 3


def test_a_smaller_epoch_size_takes_the_least_used_shards_first(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(4, 10), 5, epoch_size=20) as loader:
        first, second = numbers(loader), numbers(loader)
        assert len(first) == len(second) == 20
        assert sorted(first + second) == list(range(40))


@in_both_ways
def test_a_larger_epoch_size_makes_further_passes_over_what_has_come_meanwhile(new_cache: NewCache) -> None:
    cache = new_cache(2, 10)
    with EpochLoader(cache, 4, epoch_size=100, prefetch=1) as loader:
        assert len(loader) == 25
        seen: list[int] = []
        for batch in loader:
            seen += batch["number"].tolist()
            if len(seen) == 8:
                add_shard(cache, numbered(20, 10))
        assert len(seen) == 100
        assert set(seen) == set(range(30))
        assert sorted(seen[:20]) == list(range(20))
        counts = np.bincount(numbers(loader))
        assert counts.sum() == 100
        assert counts.max() <= 4  # once a pass


def test_a_larger_epoch_size_with_a_rest_ends_with_a_smaller_batch(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 5), 4, epoch_size=23, drop_last=False) as loader:
        for _ in range(2):
            assert [len(batch["number"]) for batch in loader] == [4, 4, 4, 4, 4, 3]


@in_both_ways
def test_batches_are_never_changed_by_later_ones_and_may_be_changed_themselves(cache_of: Any) -> None:
    cache = cache_of([{"x": torch.full((20_000,), float(i)), "number": i} for i in range(40)], [13, 13, 14])
    kept: list[dict[str, torch.Tensor]] = []
    with EpochLoader(cache, 4, prefetch=2) as loader:
        for _ in range(3):
            for step, batch in enumerate(loader):
                assert torch.equal(batch["x"][:, 0], batch["number"].float())
                assert torch.equal(batch["x"][:, -1], batch["number"].float())
                if step % 2:
                    batch["x"].fill_(-1)
                else:
                    kept.append(batch)
    for batch in kept:
        assert torch.equal(batch["x"].amin(1), batch["number"].float())
        assert torch.equal(batch["x"].amax(1), batch["number"].float())


# --- moving about


def test_len_epoch_and_dataset_tell_of_the_running_epoch_or_else_of_the_next(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as loader:
        assert (loader.epoch, len(loader), len(loader.dataset)) == (0, 4, 16)
        batches = iter(loader)
        next(batches)
        add_shard(cache, numbered(16, 8))
        assert (loader.epoch, len(loader), len(loader.dataset)) == (0, 4, 16)
        assert int(loader.dataset[3]["number"]) == 3
        assert len(list(batches)) == 3
        assert loader.epoch == 1
        assert "epoch 1," in repr(loader)


def test_after_a_break_the_length_is_that_of_the_next_iteration_and_the_state_that_of_the_last_batch(
    new_cache: NewCache,
) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as first:
        batches = iter(first)
        next(batches)
        begun, rest = first.state_dict(), numbers(batches)
    add_shard(cache, numbered(16, 8))
    with EpochLoader(cache, 4) as loader:
        loader.load_state_dict(begun)
        for batch in loader:
            assert batch["number"].tolist() == rest[:4]
            assert (len(loader), len(loader.dataset)) == (4, 16)
            break
        state = loader.state_dict()
        assert (state["epoch"], state["batch"]) == (0, 2)
        assert (len(loader), len(loader.dataset)) == (6, 24)
        assert (loader.epoch, loader.batches_done, loader.state_dict()) == (0, 2, state)
        assert len(numbers(loader)) == 24
        assert loader.epoch == 2
        next(iter(loader))
        loader.set_epoch(6)
        for _ in range(2):
            assert (loader.epoch, len(loader)) == (6, 6)
        kept = iter(loader)
        next(kept)
        loader.set_epoch(7)
        assert len(loader.dataset) == 24, "of the one that is iterated still"
        loader.load_state_dict(state)
        assert (len(loader), numbers(loader)) == (4, rest[4:])


@in_both_ways
def test_a_peek_shows_the_batch_that_comes_next_and_moves_nothing(new_cache: NewCache) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as plain:
        orders = [numbers(plain) for _ in range(3)]
    with EpochLoader(cache, 4) as loader:
        for _ in range(2):
            peeked = loader.peek()
            assert peeked["number"].tolist() == orders[0][:4]
            peeked["number"].fill_(-1)  # it is a copy
        assert (loader.epoch, loader.batches_done, loader.stats.batches) == (0, 0, 0)
        assert loader.state_dict() == EpochLoader(cache, 4).state_dict()
        assert numbers(loader) == orders[0]
        assert loader.peek()["number"].tolist() == orders[1][:4]
        batches = iter(loader)
        assert loader.peek()["number"].tolist() == orders[1][:4], "nothing was taken"
        assert next(batches)["number"].tolist() == orders[1][:4]
        with pytest.raises(EpochError, match="epoch 1 is being iterated"):
            loader.peek()
        state = loader.state_dict()
        del batches
        assert loader.peek()["number"].tolist() == orders[2][:4]
        assert loader.state_dict() == state
        loader.load_state_dict(state)
        assert loader.peek()["number"].tolist() == orders[1][4:8]
        assert loader.state_dict() == state
        assert numbers(loader) == orders[1][4:]
        loader.set_epoch(0)
        assert loader.peek()["number"].tolist() == orders[0][:4]


@pytest.mark.parametrize(
    "options", [{"with_keys": True}, {"ragged": "padded"}, {"ragged": "nested"}, {"device": "cpu"}]
)
def test_a_peek_has_the_layout_of_the_batch(options: dict[str, Any], cache_of: Any) -> None:
    cache = cache_of([{"x": torch.arange(i + 1), "t": f"no. {i}"} for i in range(8)], [8])
    with EpochLoader(cache, 4, **options) as loader:
        peeked, batch = loader.peek(), next(iter(loader))
        assert list(peeked) == list(batch)
        assert peeked["t"] == batch["t"]
        assert str(peeked["x"]) == str(batch["x"])


def test_set_epoch_gives_that_epochs_order_and_keeps_what_is_prepared_when_it_is_next(
    new_cache: NewCache,
) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as loader:
        orders = [numbers(loader) for _ in range(3)]
        loader.set_epoch(1)
        assert loader.epoch == 1
        assert numbers(loader) == orders[1]
        assert numbers(loader) == orders[2]
        taken = cache.status().snapshots
        for epoch in range(3, 6):
            loader.set_epoch(epoch)
            assert loader.epoch == epoch
            numbers(loader)
        assert cache.status().snapshots <= taken + 4
        with pytest.raises(ConfigError, match="set_epoch"):
            loader.set_epoch(-1)


@in_both_ways
def test_an_iteration_left_early_ends_its_epoch(new_cache: NewCache) -> None:
    cache = new_cache(4, 8)
    with EpochLoader(cache, 4) as whole:
        orders = [numbers(whole) for _ in range(4)]
    with EpochLoader(cache, 4) as loader:
        first = iter(loader)
        assert next(first)["number"].tolist() == orders[0][:4]
        for batch in loader:
            assert batch["number"].tolist() == orders[1][:4]
            break
        with pytest.raises(EpochError, match="has ended"):
            next(first)
        assert loader.epoch == 1
        assert numbers(loader) == orders[2]
        assert numbers(loader) == orders[3]


def test_an_exhausted_iteration_stays_exhausted(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(1, 8), 4) as loader:
        batches = iter(loader)
        assert len(list(batches)) == 2
        assert list(batches) == []
        assert loader.epoch == 1


def test_a_sampler_leaves_the_global_random_state_alone_and_changes_every_epoch(new_cache: NewCache) -> None:
    before = torch.random.get_rng_state()
    with EpochLoader(new_cache(2, 8), 4, sampler=torch.utils.data.RandomSampler) as loader:
        assert numbers(loader) != numbers(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_counts_may_be_numpys(new_cache: NewCache) -> None:
    four: Any = np.int64(4)
    with EpochLoader(
        new_cache(1, 8), four, epoch_size=four, min_samples=four, prefetch=four, locality=four, seed=four
    ) as loader:
        loader.set_epoch(np.uint8(0))  # type: ignore[arg-type]
        assert len(numbers(loader)) == 4
        assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 1


@in_both_ways
def groups_of(loader: EpochLoader) -> list[int]:
    """The number of batches in each group that an epoch's batches are queued in."""
    schedule, batches = loader._pipeline.schedule, iter(loader)
    groups = iter(lambda: schedule.take(0, 60), None)
    sizes = [len(group) for group in itertools.takewhile(lambda group: not group.is_end, groups)]
    del batches  # not before: the epoch would be left
    return sizes


LARGE, SMALL = b"x" * (1 << 20), b"x" * 1000


@in_both_ways
@pytest.mark.parametrize(
    ("samples", "options", "most"),
    [
        ([LARGE] * 16, {"batch_size": 1}, 4),
        ([LARGE, b""] * 16, {"batch_size": 2}, 4),
        ([LARGE] * 16, {"batch_size": 1, "batch_transform": lambda batch: batch}, 4),
        ([LARGE] * 16, {"batch_size": 1, "sampler": [[i, i + 1] for i in range(0, 16, 2)]}, 2),
        ([SMALL] * 640, {"batch_size": 16}, 16),
        ([SMALL] * 640, {"batch_size": 640, "sampler": [[*range(i, i + 16)] for i in range(0, 640, 16)]}, 16),
    ],
    ids=["large", "mixed", "transformed", "sampled", "small", "small and sampled"],
)
def test_as_many_batches_of_samples_of_many_sizes_go_together_as_of_one_size(
    samples: list[bytes], options: dict[str, Any], most: int, cache_of: Any
) -> None:
    cache = cache_of([{"data": sample} for sample in samples], [len(samples) // 2] * 2)
    with EpochLoader(cache, **options) as loader:
        assert max(groups_of(loader)) == most


def test_stats_add_up(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 8), 4) as loader:
        assert loader.stats.batches == 0
        for _ in range(3):
            numbers(loader)
        stats = loader.stats
        assert (stats.epoch, stats.epoch_samples, stats.shards) == (2, 16, 2)
        assert (stats.samples, stats.batches, stats.skipped) == (48, 12, 0)
        assert stats.reuse_factor == pytest.approx(3.0)
        assert stats.samples_per_s > 0
        assert 0 <= stats.wait_share <= 1
        assert 0 <= stats.gap_s < stats.wait_s + 60


@in_both_ways
def test_the_next_epoch_is_ready_when_the_last_batch_is_consumed(new_cache: NewCache) -> None:
    """The first batch of the next epoch is gathered before the trainer asks for it."""
    gaps = []
    with EpochLoader(new_cache(6, 50), 4) as loader:
        for epoch in range(6):
            for number, _ in enumerate(loader, 1):
                if number == len(loader):
                    give_up = time.monotonic() + 120
                    while not is_ready(loader, epoch + 1):
                        assert time.monotonic() < give_up
                        time.sleep(0.001)
            gaps.append(loader.stats.gap_s)
    # The smallest of five: a busy machine delays some.
    assert min(gaps[1:]) < 0.05


def is_ready(loader: EpochLoader, epoch: int) -> bool:
    """Return whether a batch of `epoch` is queued."""
    return any(group.segment.request.epoch == epoch for group in tuple(loader._pipeline.schedule._groups))


def test_a_trainer_that_waits_is_not_kept_until_all_new_shards_are_open(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_URGENT_OPEN_S", 0.0)
    opened: list[int] = []
    begun, open_shards = threading.Event(), EpochMaps.open
    # Every epoch is of 32 other shards.
    with EpochLoader(new_cache(96, 4), 4, epoch_size=128, prefetch=1) as loader:
        schedule = loader._pipeline.schedule

        def open_when_waited_for(maps: EpochMaps, shards: IntArray, *, ahead: bool = False) -> Any:
            running = schedule.gathering
            if ahead and schedule._chain.next.epoch == 1 and (running is None or maps is not running.maps):
                opened.append(len(shards))
                begun.set()
                give_up = time.monotonic() + 60
                while not schedule.urgent():
                    assert time.monotonic() < give_up
                    time.sleep(0.001)
            return open_shards(maps, shards, ahead=ahead)

        monkeypatch.setattr(EpochMaps, "open", open_when_waited_for)
        for number, _ in enumerate(loader, 1):
            if number == 31:  # the preparation has begun before the trainer waits for it
                assert begun.wait(60)
        next(iter(loader))
    assert opened == [16]


# --- keys


@in_both_ways
def test_batches_hold_their_samples_keys_when_asked_for(new_cache: NewCache, cache_of: Any) -> None:
    with EpochLoader(new_cache(3, 8), 4, with_keys=True) as loader:
        for batch in loader:
            assert batch["__key__"] == [f"k{n}" for n in batch["number"].tolist()]
    for samples in ([torch.tensor(i) for i in range(8)], [(torch.tensor(i), "text") for i in range(8)]):
        with EpochLoader(cache_of(samples, [5, 3]), 4, with_keys=True) as loader:
            for batch in loader:
                assert isinstance(batch, tuple)
                assert batch[-1] == [f"key {n}" for n in batch[0].tolist()]
