"""A worker whose job has died goes on for a while, so that the job, started again, finds it at work."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import cachestream as cs
from cachestream import Cache, ConfigError
from cachestream.storage import locks
from cachestream.worker import attachments
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, ROOT, supervisor_pid, wait_until

LONG_S: Final = 600.0
JOB: Final = """
import sys
import cachestream as cs
from tests.worker.sources import Numbers
worker = cs.start_worker(sys.argv[1], Numbers(100_000, pause_s=0.01), num_workers=1, linger_s=float(sys.argv[2]))
print("there", flush=True)
exec(sys.stdin.readline())
"""


@contextmanager
def job(cache: Cache, linger_s: float) -> Iterator[subprocess.Popen[str]]:
    """A process that has a worker, and runs the line that it is given."""
    with subprocess.Popen(
        [sys.executable, "-c", JOB, cache.path, str(linger_s)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


def test_a_process_that_attaches_while_another_looks_keeps_its_file(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is there for a moment before its lock is."""
    path, look = cache.directory.worker_file("1-1-0.attached"), locks.is_held
    Path(path).touch()
    attached = []

    def is_held(probed: str) -> bool:
        found = look(probed)
        attached.append(locks.lock_file(path))
        return found

    monkeypatch.setattr(attachments, "is_held", is_held)
    assert attachments.Attachments(cache.directory).is_needed()
    (held,) = attached
    assert held is not None
    assert held.is_ours
    held.release(unlink=True)
    assert not attachments.Attachments(cache.directory).is_needed()


@pytest.mark.e2e
@pytest.mark.parametrize("end", ["killed", "raise OSError"])
def test_a_worker_goes_on_after_its_job_has_died_and_is_found_by_the_next(cache: Cache, end: str) -> None:
    with job(cache, LONG_S) as process:
        pid = supervisor_pid(cache)
        if end == "killed":
            process.send_signal(signal.SIGKILL)
        else:
            process.communicate(f"{end}\n", timeout=DEADLINE_S)
        process.wait(DEADLINE_S)
    before = cache.num_samples
    wait_until(lambda: cache.num_samples > before, "it goes on sampling")
    worker = cs.start_worker(cache, Numbers(100_000, pause_s=0.01), num_workers=1)
    try:
        assert worker.attached
        assert supervisor_pid(cache) == pid
    finally:
        worker.close(60)
    assert not cache.has_worker()


@pytest.mark.e2e
def test_a_worker_ends_at_once_with_a_job_that_ends_in_order(cache: Cache) -> None:
    with job(cache, LONG_S) as process:
        process.communicate("pass\n", timeout=DEADLINE_S)
        assert process.returncode == 0
    wait_until(lambda: not cache.has_worker(), "it has ended")


@pytest.mark.e2e
def test_a_worker_that_waits_for_a_job_gives_way_to_one_that_wants_another_share(cache: Cache) -> None:
    with job(cache, LONG_S) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    worker = cs.start_worker(cache, Numbers(100_000, pause_s=0.01), num_workers=1, partition=(0, 2))
    try:
        assert not worker.attached
        with pytest.raises(ConfigError, match="with the share 0/2, not all units"):
            cs.start_worker(cache, Numbers(100_000, pause_s=0.01), num_workers=1)
    finally:
        worker.stop(60)


@pytest.mark.parametrize("linger_s", [-1.0, float("nan"), 1e9, None, "x", True])
def test_a_time_that_makes_no_sense_is_refused(cache: Cache, linger_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"linger_s=.*: give seconds, 0 or more, 86400 at most"):
        cs.start_worker(cache, Numbers(10), linger_s=linger_s)
