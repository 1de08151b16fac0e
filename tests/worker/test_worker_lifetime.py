"""The life of a worker: started from anywhere, shared by all who need it, gone with the last of them."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.errors import WorkerError
from cachestream.worker import launch
from tests.worker.sources import Numbers
from tests.worker.support import (
    ATTACHING,
    DEADLINE_S,
    Processes,
    fill,
    is_running,
    kill_supervisor,
    left_files,
    only_once,
    sampling_pids,
    script,
    supervisor_pid,
    wait_until,
)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_worker_is_gone_within_seconds_of_its_owner_and_leaves_nothing(
    cache: Cache, tmp_path: Path, processes: Processes, number: int
) -> None:
    with script(tmp_path / "owner.py", ATTACHING, cache.path) as run:
        assert run.line() == "started"
        cache.wait(1, DEADLINE_S)
        run.process.send_signal(number)
        run.process.wait(DEADLINE_S)
        processes.wait_until_gone()
    assert left_files(cache) == []
    assert cache.fill_state() == "stopped"


@pytest.mark.slow  # a busy machine takes longer, which is no fault
@pytest.mark.parametrize("how", ["stop", "terminate", "orphan"])
def test_where_the_machine_is_not_busy_the_worker_is_gone_within_five_seconds(
    cache: Cache, tmp_path: Path, processes: Processes, how: str
) -> None:
    with script(tmp_path / "owner.py", ATTACHING, cache.path) as run:
        assert run.line() == "started"
        cache.wait(1, DEADLINE_S)
        if how == "orphan":
            run.process.kill()
            run.process.wait(DEADLINE_S)
            processes.wait_until_gone(5.0)
        else:
            if how == "stop":
                cs.start_worker(cache, Numbers(None, pause_s=0.01)).stop()  # raises after 5 s
            else:
                os.kill(supervisor_pid(cache), signal.SIGTERM)
                wait_until(lambda: not cache.has_worker(), "it is gone", 5.0)
            run.tell()
            run.end()
    assert cache.fill_state() == "stopped"


@pytest.mark.e2e
def test_a_killed_supervisor_takes_its_processes_along_and_the_next_goes_on(
    cache: Cache, processes: Processes
) -> None:
    source = Numbers(600, pause_s=0.01)
    worker = cs.start_worker(cache, source, num_workers=2)
    cache.wait(1, DEADLINE_S)
    kill_supervisor(cache, processes, worker)
    with pytest.raises(WorkerError, match=r"was killed.*start it again"):
        cs.Worker(cache, None, None).wait(DEADLINE_S)  # which has nothing to start another with
    with cs.start_worker(cache, source, num_workers=2) as again:
        assert not again.attached
        assert again.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_a_worker_ends_when_its_cache_is_removed(cache: Cache, processes: Processes) -> None:
    cs.start_worker(cache, Numbers(None, pause_s=0.01), num_workers=1, detach=True)
    cache.wait(1, DEADLINE_S)
    cache.close()
    shutil.rmtree(cache.path, ignore_errors=True)
    shutil.rmtree(cache.path, ignore_errors=True)  # what it wrote meanwhile
    processes.wait_until_gone()
    shutil.rmtree(cache.path, ignore_errors=True)


@pytest.mark.e2e
def test_a_worker_ends_when_another_cache_has_taken_the_place_of_its_own(
    cache: Cache, processes: Processes
) -> None:
    cs.start_worker(cache, Numbers(None, pause_s=0.01), num_workers=1, detach=True)
    pids = processes.pids()
    cache.wait(1, DEADLINE_S)
    cache.close()
    os.rename(cache.path, cache.path + ".old")
    with Cache(cache.path, size_limit="20MB", min_free=0):
        wait_until(lambda: not any(map(is_running, pids)), "the old worker has ended")
    shutil.rmtree(cache.path + ".old")
    cache.recover()


def open_in(pid: int) -> set[str]:
    """The files that the process has open."""
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(fd))
    return found


@pytest.mark.e2e
def test_processes_hold_no_named_shared_memory_and_none_of_our_files(cache: Cache, tmp_path: Path) -> None:
    with open(tmp_path / "ours", "w", encoding="utf-8") as ours:
        os.set_inheritable(ours.fileno(), True)
        with cs.start_worker(cache, Numbers(None, pause_s=0.01), num_workers=1):
            cache.wait(1, DEADLINE_S)
            for pid in (supervisor_pid(cache), *sampling_pids(cache)):
                targets = open_in(pid)
                assert not [t for t in targets if "/dev/shm" in t or t == ours.name]
                assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
                modules = Path(f"/proc/{pid}/maps").read_text()
                assert "libtorch" not in modules, "a sampling process loads no torch of its own accord"


@pytest.mark.e2e
def test_the_worker_stays_when_the_handle_is_dropped(cache: Cache) -> None:
    cs.start_worker(cache, Numbers(None, pause_s=0.01), num_workers=1)
    count = cache.wait(1, DEADLINE_S)
    cache.wait(count + 1, DEADLINE_S)
    cs.start_worker(cache, Numbers(None, pause_s=0.01)).stop(DEADLINE_S)


def test_a_supervisor_that_is_killed_while_it_starts_is_a_worker_error(
    cache: Cache, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipe is closed while the job is still being sent."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(WorkerError, match="ended at once"):
        cs.start_worker(cache, Numbers(5))
    assert not processes.pids()


def test_a_system_that_refuses_a_process_is_a_worker_error(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing")
    with pytest.raises(WorkerError, match=r"no process can be started for the worker .*: raise 'ulimit -u'"):
        cs.start_worker(cache, Numbers(5))


@pytest.mark.e2e
def test_a_supervisor_that_takes_no_job_is_ended_at_the_deadline(
    cache: Cache, processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job is larger than a pipe, so that to send it would block."""
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(launch, "START_TIMEOUT_S", 1.0)
    large = bytes(1_000_000)
    with pytest.raises(WorkerError, match="did not answer within 1 s"):
        cs.start_worker(cache, Numbers(5), transform=lambda sample: (sample, large)[0])
    assert not processes.pids()


@pytest.mark.e2e
def test_a_worker_starts_from_a_process_with_a_thousand_open_files(cache: Cache) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2048 if before[1] == resource.RLIM_INFINITY else min(2048, before[1])
    if most < 2048:
        pytest.skip(f"no process may open more than {most} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        fill(cache, Numbers(5))
