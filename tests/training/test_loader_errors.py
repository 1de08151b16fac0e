"""Errors of the loader: arguments, the user's code, batches that do not come, damaged shards."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from cachestream import EpochError, EpochLoader, NotEnoughSamplesError
from cachestream.storage.shard import shard_path
from cachestream.training import prepare
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


def test_an_iteration_that_failed_before_its_first_batch_says_so_and_the_next_one_has_all(
    new_cache: NewCache,
) -> None:
    failed = threading.Event()

    def transform(batch: Any) -> Any:
        if 0 in batch["number"] and not failed.is_set():
            failed.set()
            raise OwnError("from the transform")
        failed.wait(60)  # another thread may be at the second batch, and would come to the next epoch's first
        return batch

    with EpochLoader(new_cache(2, 8), 4, shuffle=False, batch_transform=transform) as loader:
        batches = iter(loader)
        with pytest.raises(OwnError):
            next(batches)
        ended = r"this iteration of epoch 0 has ended after \d+ batches: an error \(OwnError: from the transform\); iterate"
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
            while not repr(batches._lock).startswith("<locked"):  # it is inside
                assert time.monotonic() < give_up
                time.sleep(0.001)
            with pytest.raises(EpochError, match=r"two threads take batches .* over a queue\.Queue"):
                next(batches)
            held.set()
            seen = [first.result(60), next(batches), threads.submit(next, batches).result(60), *batches]
        assert sorted(numbers(seen)) == list(range(16))


@pytest.mark.e2e
@in_both_ways
def test_a_shard_found_damaged_on_the_way_is_left_out_and_counted(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_URGENT_OPEN_S", 0.0)
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


@pytest.mark.parametrize("name", ["cachestream-gather_0", "cachestream-prepare"])
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

    with EpochLoader(new_cache(1, 8), 4, with_keys=True) as loader:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EpochError, match=r"can't start new thread: raise 'ulimit -u'"):
            next(iter(loader))
        monkeypatch.undo()
        if name == "cachestream-prepare":
            with pytest.raises(EpochError, match="closed"):
                iter(loader)
        else:
            assert sorted(numbers(loader)) == list(range(8))
