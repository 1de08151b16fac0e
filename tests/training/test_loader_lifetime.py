"""The life of a loader: leases, threads, maps and files as it is closed, forgotten, copied or forked."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from cachestream import Cache, EpochError, EpochLoader
from tests.support.caches import numbers
from tests.training.conftest import NewCache
from tests.worker.support import wait_until

in_both_ways: Final = pytest.mark.usefixtures("gathered")


def leases(cache: Cache) -> int:
    return cache.status().leases


def test_a_loader_closed_after_its_last_batch_ends_the_epoch_as_ever(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(1, 8), 4) as loader:
        batches = iter(loader)
        assert [next(batches)["number"].shape for _ in range(2)] == [(4,), (4,)]
        loader.close()
        assert list(batches) == []


@pytest.mark.e2e
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


@pytest.mark.e2e
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
            threading.Timer(0.2, held.set).start()
            leave(loader)
            began = time.monotonic()
            with pytest.raises(EpochError, match=says):
                waiting.result(100)
            assert time.monotonic() - began < 60  # not the loader's 120 s


@pytest.mark.e2e
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


@pytest.mark.e2e
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


@pytest.mark.e2e
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


@pytest.mark.e2e
@in_both_ways
def test_a_loader_forgotten_after_a_failure_that_nobody_saw_leaves_no_shard_mapped(
    new_cache: NewCache,
) -> None:
    """The maps are freed by reference counts, before a garbage collection, which may be hours later."""
    cache, count = new_cache(4, 8), itertools.count()

    def transform(batch: Any) -> Any:
        if next(count) > 10:
            raise ValueError("in the next epoch")
        return batch

    loader = EpochLoader(cache, 4, batch_transform=transform)
    assert len(numbers(loader)) == 32
    window = loader._background.window
    wait_until(lambda: any(task.error is not None for task in window._tasks), "the next epoch fails")
    gc.collect()
    gc.disable()
    try:
        del loader
        wait_until(lambda: cache.path not in Path("/proc/self/maps").read_text(), "no shard is mapped")
    finally:
        gc.enable()


SCRIPT = """
import os, signal, sys, cachestream as cs
cs.EpochLoader  # has what a loader needs imported before the forks
for how in ("leave", "interrupt"):
    if os.fork() == 0:
        break
    print(how, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
sys.stderr.flush()
os.dup2(os.open(f"{sys.argv[2]}/{how}", os.O_WRONLY | os.O_CREAT), 2)
loader = cs.EpochLoader(cs.Cache(sys.argv[1]), 4, epoch_size=20_000)
batches = iter(loader)
for _ in range(50):
    next(batches)
if how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    for _ in batches:
        pass
print("left", flush=True)
"""  # a process that is forked ends as the one that forked it: with all that an interpreter does at its end


@pytest.mark.e2e
def test_the_interpreter_ends_in_the_midst_of_an_epoch(new_cache: NewCache, tmp_path: Path) -> None:
    cache = new_cache(4, 100)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, cache.path, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    said = {how: (tmp_path / how).read_text() for how in ("leave", "interrupt")}
    assert done.stdout.split("\n") == ["left", "leave 0", "interrupt -2", ""], (done.stderr, said)
    assert "Traceback" not in said["leave"]
    cache.evict(0)
    assert cache.num_shards == 0


HANGING = """
import sys, threading, cachestream as cs
from cachestream.training import background
background._EXIT_JOIN_S = 0.5
def hang(batch):
    threading.Event().wait()
loader = cs.EpochLoader(cs.Cache(sys.argv[1]), 4, batch_transform=hang, timeout_s=2)
try:
    next(iter(loader))
except cs.EpochError as error:
    print(error)
"""


@pytest.mark.e2e
def test_the_interpreter_ends_though_a_transform_hangs_for_ever(new_cache: NewCache) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, new_cache(4, 100).path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no batch of epoch 0 within 2 s" in done.stdout


@pytest.mark.e2e
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
