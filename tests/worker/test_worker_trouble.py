"""A supervisor to which the system refuses something for a moment goes on as if it had not."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cachestream as cs
from cachestream import Cache
from cachestream.errors import CacheError
from cachestream.worker.health import Trouble
from cachestream.worker.supervisor import Supervisor
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, failures_of, only_once, sampling_pids, supervisor_pid, wait_until


def log_of(cache: Cache) -> str:
    return Path(cache.directory.worker_file("log.txt")).read_text(encoding="utf-8")


def take_descriptors(pid: int) -> tuple[int, int]:
    """Let the process open nothing any more; returns its limits before."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    return before


def test_a_supervisor_that_is_out_of_descriptors_for_a_moment_goes_on_and_replaces_what_died(
    cache: Cache,
) -> None:
    source = Numbers(200, pause_s=0.01)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        cache.wait(1, DEADLINE_S)
        supervisor, (first,) = supervisor_pid(cache), sampling_pids(cache)
        before = take_descriptors(supervisor)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "Too many open files" in log_of(cache) or not worker.is_alive(), "it is told so")
        wait_until(
            lambda: "ended the process by SIGKILL" in log_of(cache) or not worker.is_alive(), "it sees"
        )
        assert worker.is_alive()
        resource.prlimit(supervisor, resource.RLIMIT_NOFILE, before)
        assert worker.wait(DEADLINE_S)
        assert sampling_pids(cache) != [first]
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


def test_a_supervisor_that_cannot_lock_a_file_as_it_leaves_tries_again() -> None:
    def attach_lock(timeout_s: float) -> Any:
        del timeout_s
        raise CacheError("attach.lock: Too many open files")

    supervisor: Any = Supervisor.__new__(Supervisor)  # without a job and a cache
    supervisor._stop, supervisor._trouble = threading.Event(), Trouble()
    supervisor._record, supervisor._job = SimpleNamespace(state="filling"), SimpleNamespace(when_full="evict")
    supervisor._attachments = SimpleNamespace(
        stop_requested=lambda: False, is_needed=lambda: False, attach_lock=attach_lock
    )
    assert supervisor._try(supervisor._leave) is False
