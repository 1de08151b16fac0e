"""Processes that are stopped for a while (Ctrl-Z, a debugger, a suspended job): all go on when they do, and nobody is blamed."""

from __future__ import annotations

import os
import signal
import time

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.storage.telemetry import Board
from tests.worker.sources import Numbers
from tests.worker.support import (
    DEADLINE_S,
    Processes,
    failures_of,
    is_running,
    log_of,
    only_once,
    supervisor_pid,
    wait_until,
)


@pytest.mark.e2e
def test_a_reader_that_is_stopped_while_it_reads_holds_the_filling_up_and_does_not_end_it(
    cache: Cache,
) -> None:
    source = Numbers(200, pause_s=0.005)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        cache.wait(1, DEADLINE_S)
        with cache.catalogue.reading() as tables:
            tables.totals()
            wait_until(
                lambda: "was locked by another process" in log_of(cache), "the supervisor cannot commit"
            )
        assert worker.wait(DEADLINE_S)
        assert Board(cache.directory.worker_file("board")).restarts == 0, "it did not crash"
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


@pytest.mark.e2e
def test_a_job_that_is_suspended_as_a_whole_goes_on_where_it_was(cache: Cache, processes: Processes) -> None:
    source, timeout_s = Numbers(30, pause_s=0.1), 1.5
    with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=timeout_s) as worker:
        cache.wait(1, DEADLINE_S)
        first = supervisor_pid(cache)
        others = [pid for pid in processes.pids() if pid != first]
        for pid in (first, *others):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * timeout_s)
        os.kill(first, signal.SIGCONT)
        time.sleep(timeout_s / 4)  # the others come later: it sees them stopped
        for pid in filter(is_running, others):
            os.kill(pid, signal.SIGCONT)
        assert worker.wait(DEADLINE_S)
        assert Board(cache.directory.worker_file("board")).restarts == 0, "nobody was ended"
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}
