"""Another program fills the disk while a worker runs: whatever happens then, the worker waits, and goes on when there is space."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache, CacheFullError, NotEnoughSamplesError
from cachestream.cli.facts import one_line
from cachestream.storage.telemetry import ROW, private_slot
from cachestream.worker.sampling.unit_reader import FetchMeter
from tests.worker.sources import Numbers
from tests.worker.support import (
    DEADLINE_S,
    Processes,
    in_use,
    left_files,
    log_of,
    only_once,
    sampling_pids,
    wait_until,
)

BLOCK = 4096


@pytest.fixture
def cache(small_disk: Path, processes: Processes) -> Iterator[Cache]:
    """A cache on a disk of 8 MB; its worker is gone before the disk is."""
    with Cache(small_disk / "cache", size_limit="4MB", min_free=0) as cache:
        yield cache
        processes.end()


def fill(disk: Path) -> None:
    """Take the last block of the disk."""
    with open(disk / "theirs", "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(BLOCK))
        except OSError:
            return


def last_shard(cache: Cache) -> int:
    with cache.catalogue.reading() as tables:
        return int(tables.meta("last_shard_id", 0))


def wait_for_refusal(cache: Cache, disk: Path, worker: cs.Worker) -> None:
    """Until the supervisor has met the full disk, and lives."""

    def has_met_it() -> bool:
        fill(disk)  # a transaction that ends gives its journal back
        return not worker.is_alive() or "waiting for that" in log_of(cache)

    wait_until(has_met_it, "the supervisor meets the full disk")
    assert worker.is_alive(), log_of(cache)


def check_that_it_goes_on(cache: Cache, disk: Path, worker: cs.Worker) -> None:
    before = last_shard(cache)
    os.unlink(disk / "theirs")
    wait_until(lambda: last_shard(cache) > before + 1, "shards are published again")
    assert cache.fill_state() == "filling"
    worker.close()
    only_once(cache)
    assert cache.verify().ok
    assert not left_files(cache)


@pytest.mark.e2e
def test_processes_that_are_killed_while_the_disk_is_full_are_replaced(
    cache: Cache, small_disk: Path
) -> None:
    source = Numbers(None, nbytes=20_000, pause_s=0.02)
    with cs.start_worker(cache, source, num_workers=2) as worker:
        cache.wait(20, DEADLINE_S)
        pids = sampling_pids(cache)
        fill(small_disk)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_for_refusal(cache, small_disk, worker)
        check_that_it_goes_on(cache, small_disk, worker)


def test_a_process_without_space_for_the_bandwidth_s_budget_says_that_the_disk_is_full(
    cache: Cache, small_disk: Path
) -> None:
    """By which the supervisor knows that it did not crash."""
    fill(small_disk)
    with pytest.raises(CacheFullError, match="budget: No space left on device; free some disk"):
        FetchMeter(private_slot(), 1e6, cache.directory.worker_file("budget"))


@pytest.mark.e2e
def test_a_history_that_cannot_grow_ends_no_worker(cache: Cache, small_disk: Path) -> None:
    rows = np.zeros(BLOCK // ROW.itemsize - 1, ROW)  # the next but one needs another block
    rows["time_s"] = np.linspace(time.time() - 100.0, time.time() - 10.0, len(rows))
    Path(cache.directory.worker_file("history")).write_bytes(rows.tobytes())
    source = Numbers(None, nbytes=20_000, pause_s=0.02)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        cache.wait(20, DEADLINE_S)
        wait_for_refusal(cache, small_disk, worker)
        check_that_it_goes_on(cache, small_disk, worker)


@pytest.mark.e2e
def test_a_worker_is_stopped_in_time_while_the_disk_is_full(
    cache: Cache, small_disk: Path, processes: Processes
) -> None:
    source = Numbers(None, nbytes=20_000, pause_s=0.02)
    worker = cs.start_worker(cache, source, num_workers=2)
    cache.wait(20, DEADLINE_S)
    fill(small_disk)
    worker.stop(DEADLINE_S)
    processes.wait_until_gone()
    os.unlink(small_disk / "theirs")
    with cs.start_worker(cache, source, num_workers=2), in_use(cache):
        before = last_shard(cache)
        wait_until(lambda: last_shard(cache) > before, "the next one publishes")
    only_once(cache)
    assert not left_files(cache)


@pytest.mark.e2e
def test_a_disk_that_takes_no_files_although_it_has_space_is_named_until_it_does(
    cache: Cache, small_disk: Path
) -> None:
    """As with quotas: what is free says nothing."""
    subprocess.run(["mount", "-o", "remount,nr_inodes=60", str(small_disk)], check=True)
    with cs.start_worker(
        cache, Numbers(10_000, nbytes=1_000, pause_s=0.002), num_workers=2, shard_size="50KB"
    ):
        wait_until(
            lambda: "No space left on device" in cache.status().disk_message, "the disk's words in the status"
        )
        assert "free some disk" in one_line(cache.status())
        with pytest.raises(NotEnoughSamplesError, match="No space left on device while"):
            cache.wait(min_samples=10**6, timeout_s=0.1)
        wait_until(lambda: "; trying again" in log_of(cache), "the disk's words in the log")
        assert log_of(cache).count("; trying again") <= 2, "once a process"
        have = cache.num_samples
        subprocess.run(["mount", "-o", "remount,nr_inodes=10000", str(small_disk)], check=True)
        wait_until(lambda: cache.num_samples > have, "more samples")
        wait_until(lambda: not cache.status().disk_message, "the words are gone")


@pytest.mark.e2e
def test_a_worker_that_is_to_stop_at_its_limit_does_not_stop_for_a_disk_that_others_have_filled(
    cache: Cache, small_disk: Path
) -> None:
    source = Numbers(None, nbytes=20_000, pause_s=0.02)
    with cs.start_worker(cache, source, num_workers=2, when_full="stop") as worker:
        cache.wait(5, DEADLINE_S)

        def has_waited() -> bool:
            fill(small_disk)
            status = worker.status().worker
            return status is None or status.totals.space_wait_s > 2.0

        wait_until(has_waited, "both wait for space")
        assert worker.is_alive()
        assert cache.fill_state() == "filling"
        os.unlink(small_disk / "theirs")
        wait_until(lambda: not worker.is_alive(), "it has stopped")
    assert cache.fill_state() == "full"
    assert cache.size_bytes > 3_000_000
