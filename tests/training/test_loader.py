"""The loader: an epoch has the samples cached by then, each once, and the next one is ready in time."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, cast

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from cachestream import Cache, ConfigError, EpochError, EpochLoader, NotEnoughSamplesError
from cachestream.storage.shard import shard_path
from cachestream.training import cold_start, pipeline
from cachestream.training.batches import memory
from cachestream.training.shared_snapshot import SnapshotHolder
from tests.support.caches import add_shard, numbered, set_fill_state, skip_samples
from tests.training.conftest import NewCache
from tests.worker.support import wait_until


def numbers(batches: Iterable[Any]) -> list[int]:
    return [n for batch in batches for n in batch["number"].tolist()]


def leases(cache: Cache) -> int:
    return cache.status().leases


@pytest.fixture(params=["by threads in C", "by torch"])
def gathered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test of what batches hold, or who waits for them, with the part in C and without it."""
    if request.param == "by torch":
        monkeypatch.setattr(memory, "in_c", None)
    elif memory.in_c is None:
        pytest.skip("installed without the part in C")


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


def test_a_peek_where_there_is_nothing_says_why_and_can_be_tried_again(new_cache: NewCache) -> None:
    failed: list[None] = []

    def transform(batch: Any) -> Any:
        # Not the first call: two threads transform, and the second one may be quicker.
        if not failed and 0 in batch["number"]:
            failed.append(None)
            raise OwnError("from the transform")
        return batch

    cache = new_cache(0, 0)
    set_fill_state(cache, "complete")
    with EpochLoader(cache, 4, shuffle=False, batch_transform=transform) as loader:
        with pytest.raises(NotEnoughSamplesError):
            loader.peek()
        add_shard(cache, numbered(0, 8))
        with pytest.raises(OwnError):
            loader.peek()
        assert len(loader.peek()["number"]) == 4
        assert sorted(numbers(loader)) == list(range(8))
        assert loader.epoch == 1


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


# --- samplers


def test_samplers_of_all_kinds_draw_what_they_would_from_the_epochs_dataset(new_cache: NewCache) -> None:
    data = torch.utils.data
    cache = new_cache(2, 8)
    everything = list(range(16))
    cases: list[tuple[Any, Any]] = [
        (data.SequentialSampler, lambda seen: seen == everything),
        (data.RandomSampler, lambda seen: sorted(seen) == everything and seen != everything),
        (lambda dataset: data.SubsetRandomSampler(range(0, len(dataset), 2)), lambda seen: sorted(seen) == everything[::2]),
        (lambda _: data.WeightedRandomSampler([0.0] * 15 + [1.0], 8), lambda seen: seen == [15] * 8),
        (lambda dataset: data.DistributedSampler(dataset, 1, 0), lambda seen: sorted(seen) == everything),
        (data.RandomSampler(everything), lambda seen: sorted(seen) == everything),
        (lambda _: [3, 1, 2, 0], lambda seen: seen == [3, 1, 2, 0]),
        (lambda _: iter(range(8)), lambda seen: seen == everything[:8]),
    ]  # fmt: skip
    for sampler, fits in cases:
        with EpochLoader(cache, 4, sampler=sampler) as loader:
            assert all(fits(numbers(loader)) for _ in range(2)), sampler


@in_both_ways
def test_a_batch_samplers_batches_are_kept(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 8), 4, sampler=lambda _: [[1, 2, 3], [4], [9, 8]]) as loader:
        assert len(loader) == 3
        assert [batch["number"].tolist() for batch in loader] == [[1, 2, 3], [4], [9, 8]]


def test_a_sampler_leaves_the_global_random_state_alone_and_changes_every_epoch(new_cache: NewCache) -> None:
    before = torch.random.get_rng_state()
    with EpochLoader(new_cache(2, 8), 4, sampler=torch.utils.data.RandomSampler) as loader:
        assert numbers(loader) != numbers(loader)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_sampler_for_another_dataset_is_refused(new_cache: NewCache) -> None:
    with (
        EpochLoader(new_cache(1, 8), 4, sampler=lambda _: [0, 8]) as loader,
        pytest.raises(ConfigError, match="sample 8 of a dataset of 8"),
    ):
        next(iter(loader))


# --- errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": True}, "batch_size=True"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"epoch_size": -5}, "epoch_size=-5"),
        ({"turnover": 1.5}, "turnover=1.5"),
        ({"turnover": None}, "turnover=None"),
        ({"turnover": "x"}, "turnover='x'"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": None}, "timeout_s=None: give seconds, 0.001 or more"),
        ({"timeout_s": "x"}, "timeout_s='x'"),
        ({"timeout_s": math.nan}, "timeout_s=nan"),
        ({"batch_transform": 5}, "batch_transform=5: give a function"),
        ({"record": 5}, "record=5: give a path"),
        ({"replay": 5}, "replay=5: give a path"),
        ({"weights": {1: 2.0}}, "1 is none"),
        ({"weights": {"a": "b"}}, "give numbers"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"device": "cuda:77"}, "device='cuda:77'"),
        ({"sampler": 5}, "sampler=5"),
        ({"max_cache_size": 5}, "max_cache_size"),
        ({"prefetch_factor": 2}, "it is called 'prefetch'"),
        ({"weights": [1]}, "sampler="),
        ({"num_replicas": 2}, "torch.distributed"),
        ({"num_workers": 2}, "start_worker"),
        ({"shufle": True}, "do you mean 'shuffle'?"),
        ({"collate_fn": len}, "batch_transform="),
        ({"generator": None}, "give seed="),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_advice(
    options: dict[str, Any], says: str, new_cache: NewCache
) -> None:
    with pytest.raises(ConfigError) as caught:
        EpochLoader(new_cache(1, 8), **{"batch_size": 4, **options})
    assert says in str(caught.value)


@pytest.mark.parametrize("returned", [None, 5])
def test_a_sampler_function_that_returns_no_sampler_is_refused(returned: Any, new_cache: NewCache) -> None:
    with (
        EpochLoader(new_cache(1, 8), 4, sampler=lambda _: returned) as loader,
        pytest.raises(ConfigError, match=f"returned {returned} .*let it return a torch sampler"),
    ):
        next(iter(loader))


def test_counts_may_be_numpys(new_cache: NewCache) -> None:
    four: Any = np.int64(4)
    with EpochLoader(
        new_cache(1, 8), four, epoch_size=four, min_samples=four, prefetch=four, locality=four, seed=four
    ) as loader:
        loader.set_epoch(np.uint8(0))  # type: ignore[arg-type]
        assert len(numbers(loader)) == 4
        assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 1


def test_a_path_in_place_of_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give a cachestream\.Cache"):
        EpochLoader("/scratch", 4)  # type: ignore[arg-type]


def test_too_few_samples_are_an_error_at_once_when_no_more_will_come(new_cache: NewCache) -> None:
    cache = new_cache(1, 3)
    set_fill_state(cache, "complete")
    with EpochLoader(cache, 4) as loader:
        began = time.monotonic()
        with pytest.raises(NotEnoughSamplesError, match=r"holds 3 samples, 4 are needed.*'complete'"):
            next(iter(loader))
        with pytest.raises(NotEnoughSamplesError):
            len(loader)
        assert time.monotonic() - began < 60  # not the loader's 120 s
        add_shard(cache, numbered(3, 5))
        assert len(numbers(loader)) == 8
        assert loader.epoch == 1
    with EpochLoader(cache, 20, drop_last=False) as loader:
        assert len(numbers(loader)) == 8


@pytest.mark.parametrize(
    ("have", "advice"), [(0, "correct what fails"), (3, "correct"), (8, "smaller batch")]
)
def test_too_few_samples_because_others_were_skipped_says_why(
    new_cache: NewCache, have: int, advice: str
) -> None:
    cache = new_cache(1, have) if have else new_cache(0, 0)
    set_fill_state(cache, "complete")
    skip_samples(cache, 7, "ValueError: even!")
    with EpochLoader(cache, 9) as loader, pytest.raises(NotEnoughSamplesError) as caught:
        next(iter(loader))
    assert "7 skipped, most often: transform: ValueError: even! (first: a.npy)" in str(caught.value)
    assert advice in str(caught.value)


def test_a_full_disk_is_what_those_who_wait_are_told(new_cache: NewCache) -> None:
    full = r"the disk has .* left, and min_free keeps 1 PB of it free"
    with Cache(new_cache(0, 0).path, min_free=10**15) as cache:
        set_fill_state(cache, "stopped")  # as it is while a worker waits for space, or after
        with EpochLoader(cache, 4, timeout_s=2.0) as loader, pytest.raises(NotEnoughSamplesError, match=full):
            next(iter(loader))
        with pytest.raises(NotEnoughSamplesError, match=full):
            cache.wait(1, timeout_s=0)
        assert "make room on it" in cache.status().disk_message


def test_a_cold_start_that_finds_nothing_but_what_is_skipped_warns_once(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples come only after the warning."""
    cache = new_cache(0, 0)
    skip_samples(cache, 7, "ValueError: even!")
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            add_shard(cache, numbered(0, 8))

    listener = Listener()
    monkeypatch.setattr(cold_start, "_WARN_AFTER_S", 0.0)
    logging.getLogger("cachestream").addHandler(listener)
    try:
        with EpochLoader(cache, 4) as loader:
            assert len(numbers(loader)) == 8
    finally:
        logging.getLogger("cachestream").removeHandler(listener)
    assert len(said) == 1
    assert "0 samples were cached, and 7 skipped, most often: transform: ValueError: even!" in said[0]


def test_too_few_samples_are_an_error_at_the_deadline_when_more_might_come(new_cache: NewCache) -> None:
    with (
        EpochLoader(new_cache(1, 3), 4, timeout_s=2.0) as loader,
        pytest.raises(NotEnoughSamplesError, match="start a worker"),
    ):
        next(iter(loader))


def test_the_first_epoch_waits_for_the_samples_asked_for(new_cache: NewCache) -> None:
    cache = new_cache(1, 4)
    with EpochLoader(cache, 4, min_samples=12) as loader:
        filler = threading.Timer(0.2, lambda: [add_shard(cache, numbered(4 + 4 * i, 4)) for i in range(2)])
        filler.start()
        assert len(numbers(loader)) == 12
        filler.join()


def test_an_epoch_size_below_one_batch_is_refused(new_cache: NewCache) -> None:
    with (
        EpochLoader(new_cache(1, 8), 4, epoch_size=3) as loader,
        pytest.raises(ConfigError, match="epoch_size=3"),
    ):
        len(loader)


class OwnError(Exception):
    """An error that only the test knows."""


def test_an_error_of_the_preparation_does_not_wait_for_the_catalogue(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was stopped may have locked it, and the error names that rank."""
    unlocked = threading.Event()
    monkeypatch.setattr(SnapshotHolder, "finish", lambda _: unlocked.wait(60))

    def sampler(_: Any) -> Any:
        raise OwnError("from the sampler")

    with EpochLoader(new_cache(1, 8), 4, sampler=sampler, timeout_s=5) as loader:
        with pytest.raises(OwnError, match="from the sampler"):
            next(iter(loader))
        unlocked.set()


@in_both_ways
def test_errors_of_a_batch_transform_reach_the_training_thread_as_they_are(new_cache: NewCache) -> None:
    failed = threading.Event()

    def transform(batch: Any) -> Any:
        if 8 in batch["number"] and not failed.is_set():
            failed.set()
            raise OwnError("from the transform")
        return {**batch, "number": batch["number"] + 100}

    with EpochLoader(new_cache(2, 8), 4, shuffle=False, batch_transform=transform) as loader:
        batches = iter(loader)
        assert next(batches)["number"].tolist() + next(batches)["number"].tolist() == list(range(100, 108))
        for _ in range(2):
            with pytest.raises(OwnError, match="from the transform"):
                next(batches)
        assert sorted(numbers(loader)) == list(range(100, 116))
        assert loader.epoch == 2


def test_an_iteration_that_failed_before_its_first_batch_says_so_and_the_next_one_has_all(
    new_cache: NewCache,
) -> None:
    failed = threading.Event()

    def transform(batch: Any) -> Any:
        if 0 in batch["number"] and not failed.is_set():  # of the first: another thread may be at the second
            failed.set()
            raise OwnError("from the transform")
        return batch

    with EpochLoader(new_cache(2, 8), 4, shuffle=False, batch_transform=transform) as loader:
        batches = iter(loader)
        with pytest.raises(OwnError):
            next(batches)
        ended = r"this iteration of epoch 0 has ended with an error \(OwnError: from the transform\); iterate"
        for _ in range(2):
            with pytest.raises(EpochError, match=ended):
                next(batches)
        assert sorted(numbers(loader)) == list(range(16))
        with pytest.raises(EpochError, match=ended):
            next(batches)


def test_a_stop_iteration_of_the_users_own_code_does_not_end_the_epoch_as_if_all_were_well(
    new_cache: NewCache,
) -> None:
    with (
        EpochLoader(new_cache(2, 8), 4, batch_transform=lambda _: next(iter(()))) as loader,
        pytest.raises(EpochError, match="raised StopIteration"),
    ):
        list(loader)


def patiently(batches: Iterator[Any]) -> list[Any]:
    """The rest of an epoch, whose loader may raise timeouts in between."""
    found, give_up = [], time.monotonic() + 120
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found
        except EpochError:
            assert time.monotonic() < give_up


@in_both_ways
def test_a_batch_that_does_not_come_is_an_error_with_a_diagnosis(new_cache: NewCache) -> None:
    transforming, released = threading.Event(), threading.Event()

    def transform(batch: Any) -> Any:
        transforming.set()
        released.wait(120)
        return batch

    with EpochLoader(new_cache(2, 8), 4, batch_transform=transform, timeout_s=0.3) as loader:
        batches = iter(loader)
        with pytest.raises(EpochError, match=r"no batch of epoch 0 within 0.3 s"):
            next(batches)
        assert transforming.wait(120)
        with pytest.raises(EpochError, match=r"no batch of epoch 0 within 0.3 s .*gathering epoch 0"):
            next(batches)
        released.set()
        assert len(patiently(batches)) == 4


def test_a_closed_loader_says_so(new_cache: NewCache) -> None:
    loader = EpochLoader(new_cache(1, 8), 4)
    batches = iter(loader)
    loader.close()
    loader.close()
    for again in (lambda: iter(loader), lambda: next(batches)):
        with pytest.raises(EpochError, match="closed"):
            again()


def test_a_loader_closed_after_its_last_batch_ends_the_epoch_as_ever(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(1, 8), 4) as loader:
        batches = iter(loader)
        assert [next(batches)["number"].shape for _ in range(2)] == [(4,), (4,)]
        loader.close()
        assert list(batches) == []


@in_both_ways
@pytest.mark.parametrize("transform", [None, lambda batch: batch], ids=["plain", "transformed"])
def test_a_loader_that_another_thread_closes_ends_no_epoch_as_if_all_were_well(
    transform: Any, new_cache: NewCache
) -> None:
    cache = new_cache(4, 500)
    for number in range(20):
        loader = EpochLoader(cache, 1, batch_transform=transform)
        batches, begun = iter(loader), threading.Event()

        def train(batches: Iterator[Any] = batches, begun: threading.Event = begun) -> int:
            for count, _ in enumerate(batches):
                if count == 5:
                    begun.set()
                time.sleep(0.0001)
            return -1

        with ThreadPoolExecutor(1) as threads:
            training = threads.submit(train)
            assert begun.wait(60)
            time.sleep(number * 0.0003)
            loader.close()
            with pytest.raises(EpochError, match="closed"):
                training.result(60)


@in_both_ways
def test_a_thread_that_waits_for_a_batch_hears_at_once_that_the_loader_is_closed_or_elsewhere(
    new_cache: NewCache,
) -> None:
    held, transforming = threading.Event(), threading.Event()

    def transform(batch: Any) -> Any:
        transforming.set()
        held.wait(60)
        return batch

    for leave, says in (
        (EpochLoader.close, "closed"),
        (lambda loader: loader.set_epoch(7) or iter(loader), "left"),
    ):
        held.clear()
        transforming.clear()
        with (
            EpochLoader(new_cache(2, 8), 4, batch_transform=transform) as loader,
            ThreadPoolExecutor(1) as threads,
        ):
            waiting = threads.submit(next, iter(loader))
            assert transforming.wait(60)
            threading.Timer(1.0, held.set).start()
            leave(loader)
            began = time.monotonic()
            with pytest.raises(EpochError, match=says):
                waiting.result(100)
            assert time.monotonic() - began < 60  # not the loader's 120 s


@in_both_ways
def test_threads_that_share_an_iteration_are_told_at_once_and_may_take_turns(new_cache: NewCache) -> None:
    held, transforming = threading.Event(), threading.Event()

    def transform(batch: Any) -> Any:
        transforming.set()
        held.wait(60)
        return batch

    with EpochLoader(new_cache(2, 8), 4, batch_transform=transform) as loader:
        batches = iter(loader)
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(next, batches)
            assert transforming.wait(60)
            give_up = time.monotonic() + 60
            while not repr(loader._position._lock).startswith("<locked"):  # it is inside
                assert time.monotonic() < give_up
                time.sleep(0.001)
            with pytest.raises(EpochError, match=r"two threads take batches .* over a queue\.Queue"):
                next(batches)
            held.set()
            seen = [first.result(60), next(batches), threads.submit(next, batches).result(60), *batches]
        assert sorted(numbers(seen)) == list(range(16))


@in_both_ways
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns where threads run
def test_a_forked_child_is_told_to_make_a_loader_of_its_own(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(1, 8), 4) as loader:
        next(iter(loader))
        child = os.fork()
        if child == 0:
            try:
                iter(loader)
            except EpochError as error:
                loader.close()
                os._exit(0 if "make one in each process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(numbers(loader)) == 8


# --- damage


def test_a_damaged_shard_is_put_aside_before_the_epoch_begins(new_cache: NewCache) -> None:
    cache = new_cache(3, 8)
    snapshot, lease = cache.take_snapshot()
    lease.release()
    path = shard_path(cache.path, int(snapshot.shard_ids[1]))
    with open(path, "r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff")
    with EpochLoader(cache, 4) as loader:
        assert sorted(numbers(loader)) == [*range(8), *range(16, 24)]
        assert cache.num_shards == 2
        assert cache.status().quarantined == 1


@in_both_ways
def test_a_shard_found_damaged_on_the_way_is_left_out_and_counted(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_URGENT_OPEN_S", 0.0)
    cache = new_cache(24, 4)
    snapshot, lease = cache.take_snapshot()
    lease.release()
    os.truncate(shard_path(cache.path, int(snapshot.shard_ids[20])), 100)
    with EpochLoader(cache, 4, prefetch=1) as loader:
        seen = numbers(loader)
        assert sorted(seen) == [n for n in range(96) if n // 4 != 20]
        assert loader.stats.skipped == 4
        assert sorted(numbers(loader)) == sorted(seen)
        assert cache.num_shards == 23


# --- what is held, and what is left


def test_an_epochs_shards_are_leased_until_it_ends_or_is_left(new_cache: NewCache) -> None:
    cache = new_cache(6, 8)
    with EpochLoader(cache, 4, prefetch=1) as loader:
        batches = iter(loader)
        next(batches)
        assert leases(cache) >= 1
        list(batches)
        assert leases(cache) <= 1  # of the next epoch, prepared by now
        iter(loader)
        iter(loader)
        next(iter(loader))
        assert 1 <= leases(cache) <= 2
    assert leases(cache) == 0


def ours() -> list[threading.Thread]:
    """The threads of loaders, without those of other tests."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("cachestream-")]


def test_short_epochs_over_a_cache_that_stays_share_a_lease_and_are_counted_each(new_cache: NewCache) -> None:
    cache = new_cache(3, 4)
    with EpochLoader(cache, batch_size=4) as loader:
        leases = set()
        for _ in range(8):
            leases.add(loader.dataset.snapshot.lease)
            assert sum(1 for _ in loader) == 3
        assert len(leases) <= 2, "more only where they take ten seconds"
        add_shard(cache, numbered(12, 4))
        assert [sum(1 for _ in loader) for _ in range(3)][-1] == 4
    status = cache.status()
    assert status.leases == 0
    with cache.catalogue.reading() as tables:
        uses = {row.id: row.uses for row in tables.shards()}
    assert uses[1] == status.snapshots >= 11, "the one prepared ahead counts too"


@in_both_ways
def test_many_epochs_leave_no_more_threads_files_or_memory_than_one(new_cache: NewCache) -> None:
    cache = new_cache(4, 8)
    with EpochLoader(cache, 4) as loader:
        numbers(loader)
        files, threads = len(os.listdir("/proc/self/fd")), ours()
        for _ in range(100):
            numbers(loader)
        assert len(os.listdir("/proc/self/fd")) <= files + 2
        assert ours() == threads
        assert leases(cache) <= 2


@in_both_ways
def test_a_forgotten_loader_ends_its_threads(new_cache: NewCache) -> None:
    loader = EpochLoader(new_cache(2, 8), 4)
    next(iter(loader))
    gone = weakref.ref(loader)
    mine = ours()
    assert len(mine) == 3
    del loader
    gc.collect()
    assert gone() is None
    for thread in mine:
        thread.join(60)
        assert not thread.is_alive()


@in_both_ways
@pytest.mark.parametrize("after", [1, None], ids=["amid-an-epoch", "after-an-epoch"])
def test_forgotten_loaders_leave_no_shard_mapped(after: int | None, new_cache: NewCache) -> None:
    cache = new_cache(4, 100)

    def maps() -> list[str]:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            return [line for line in lines if cache.path in line]

    for _ in range(10):
        loader = EpochLoader(cache, 4)
        assert len(numbers(itertools.islice(loader, after))) == (4 * after if after else 400)
        del loader
    wait_until(lambda: not maps(), "no shard is mapped")


@in_both_ways
def test_a_loader_forgotten_after_a_failure_that_nobody_saw_leaves_no_shard_mapped(
    new_cache: NewCache,
) -> None:
    """The maps are freed by reference counts, before a garbage collection, which may be hours later."""
    cache, count = new_cache(4, 8), itertools.count()

    def transform(batch: Any) -> Any:
        if next(count) > 10:
            raise OwnError("in the next epoch")
        return batch

    loader = EpochLoader(cache, 4, batch_transform=transform)
    assert len(numbers(loader)) == 32
    schedule = loader._pipeline.schedule
    wait_until(lambda: schedule._chain.failure is not None, "the next epoch fails")
    gc.collect()
    gc.disable()
    try:
        del loader
        wait_until(lambda: cache.path not in Path("/proc/self/maps").read_text(), "no shard is mapped")
    finally:
        gc.enable()


SCRIPT = """
import sys, cachestream as cs
loader = cs.EpochLoader(cs.Cache(sys.argv[1]), 4, epoch_size=100_000)
batches = iter(loader)
for _ in range(50):
    next(batches)
if sys.argv[2] == "interrupt":
    import os, signal
    os.kill(os.getpid(), signal.SIGINT)
    for _ in batches:
        pass
print("left", flush=True)
"""


@pytest.mark.parametrize(("how", "code"), [("leave", 0), ("interrupt", -2)])
def test_the_interpreter_ends_in_the_midst_of_an_epoch(how: str, code: int, new_cache: NewCache) -> None:
    cache = new_cache(4, 100)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, cache.path, how],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, "left" in done.stdout) == (code, how == "leave"), done.stderr
    assert "Traceback" not in done.stderr or how == "interrupt"
    cache.evict(0)
    assert cache.num_shards == 0


@in_both_ways
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
    return any(
        group.segment.request.epoch == epoch for group in tuple(loader._pipeline.schedule._queue._groups)
    )


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


# --- what it is not


def test_a_data_loader_over_the_loader_says_what_to_do_instead(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 8), 4) as loader:
        wrong: Any = DataLoader(cast(Any, loader), batch_size=None)
        with pytest.raises(TypeError, match=r"for batch in loader.*cache\.snapshot\(\)"):
            next(iter(wrong))
        assert len(numbers(loader)) == 16


@pytest.mark.parametrize("move", [pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_that_is_copied_says_that_another_one_is_to_be_made(
    new_cache: NewCache, move: Callable[[Any], Any]
) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as loader:
        with pytest.raises(TypeError, match=f"Make another one.*{cache.path}.*state_dict"):
            move(loader)
        assert len(numbers(loader)) == 16


def test_a_limit_that_is_lowered_while_training_is_reached_as_epochs_end(new_cache: NewCache) -> None:
    """Each epoch is prepared while the previous one leases its shards: together they could lease all shards
    for ever.
    """
    cache = new_cache(400, 8)
    with EpochLoader(cache, 8) as loader:
        for batch in loader:
            assert len(batch["number"]) == 8
        batches = iter(loader)
        next(batches)
        cache.size_limit = limit = cache.size_bytes - 100 * 4096
        assert cache.size_bytes > limit
        for _ in range(3):
            for batch in loader:
                assert len(batch["number"]) == 8
        assert cache.size_bytes <= limit
        assert 200 < cache.num_shards < 400
        batches = iter(loader)
        next(batches)
        cache.size_limit = limit = limit - 50 * 4096
    assert cache.size_bytes <= limit  # with the end of the loader


def test_a_loader_that_gets_no_threads_says_what_to_raise(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(
        thread: threading.Thread,
    ) -> None:  # as the kernel does: whether it would here is not ours to say
        if thread.name == "cachestream-gather":
            raise RuntimeError("can't start new thread")
        start(thread)

    with EpochLoader(new_cache(1, 8), 4) as loader:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EpochError, match=r"can't start new thread: raise 'ulimit -u'"):
            iter(loader)
        monkeypatch.undo()
        with pytest.raises(EpochError, match="closed"):
            iter(loader)
