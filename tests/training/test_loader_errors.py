"""Errors of the loader: arguments, the user's code, batches that do not come, damaged shards."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

import pytest
from torch.utils.data import DataLoader

from cachestream import ConfigError, EpochError, EpochLoader, NotEnoughSamplesError
from cachestream.storage.shard import shard_path
from cachestream.training import pipeline
from cachestream.training.epoch_snapshots import EpochSnapshots
from tests.support.caches import add_shard, numbered, numbers, set_fill_state
from tests.training.conftest import NewCache

in_both_ways: Final = pytest.mark.usefixtures("gathered")


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


def test_a_sampler_for_another_dataset_is_refused(new_cache: NewCache) -> None:
    with (
        EpochLoader(new_cache(1, 8), 4, sampler=lambda _: [0, 8]) as loader,
        pytest.raises(ConfigError, match="sample 8 of a dataset of 8"),
    ):
        next(iter(loader))


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
        ({"weights": {1: 2.0}}, "are str, not 1: take them"),
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


def test_a_path_in_place_of_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give a cachestream\.Cache"):
        EpochLoader("/scratch", 4)  # type: ignore[arg-type]


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
    monkeypatch.setattr(EpochSnapshots, "finish", lambda _: unlocked.wait(60))

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


@in_both_ways
def test_threads_that_share_an_iteration_are_told_at_once_and_may_take_turns(new_cache: NewCache) -> None:
    held, transforming = threading.Event(), threading.Event()

    def transform(batch: Any) -> Any:
        transforming.set()
        held.wait(60)
        return batch

    with EpochLoader(new_cache(2, 8), 4, batch_transform=transform) as loader:
        batches: Any = iter(loader)
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(next, batches)
            assert transforming.wait(60)
            give_up = time.monotonic() + 60
            while not repr(batches._iteration._lock).startswith("<locked"):  # it is inside
                assert time.monotonic() < give_up
                time.sleep(0.001)
            with pytest.raises(EpochError, match=r"two threads take batches .* over a queue\.Queue"):
                next(batches)
            held.set()
            seen = [first.result(60), next(batches), threads.submit(next, batches).result(60), *batches]
        assert sorted(numbers(seen)) == list(range(16))


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


def test_a_data_loader_over_the_loader_says_what_to_do_instead(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 8), 4) as loader:
        wrong: Any = DataLoader(cast(Any, loader), batch_size=None)
        with pytest.raises(TypeError, match=r"for batch in loader.*cache\.snapshot\(\)"):
            next(iter(wrong))
        assert len(numbers(loader)) == 16


@pytest.mark.parametrize("name", ["cachestream-gather", "cachestream-prepare"])
def test_a_loader_that_gets_no_threads_says_what_to_raise(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refuse(
        thread: threading.Thread,
    ) -> None:  # as the kernel does: whether it would here is not ours to say
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with EpochLoader(new_cache(1, 8), 4) as loader:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EpochError, match=r"can't start new thread: raise 'ulimit -u'"):
            iter(loader)
        monkeypatch.undo()
        with pytest.raises(EpochError, match="closed"):
            iter(loader)
