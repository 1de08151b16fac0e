"""P3: the filler is independent of the trainer. It survives a crashed trainer, restarts what crashes, serves several
jobs, and resumes where it stopped: every unit exactly once a pass.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

import cachestream as cs
from tests.contract.readers import (
    DEADLINE_S,
    FOUR,
    Told,
    is_running,
    line_of,
    numbers_in,
    pid_of,
    python,
    until,
)

# A job that has a worker until it is told how to end.
JOB: Final = """
import sys, os
import cachestream as cs
from tests.contract.readers import Told
worker = cs.start_worker(sys.argv[1], Told(sys.argv[2]), num_workers=1, concurrency=2, linger_s=float(sys.argv[3]), shard_size="16KB")
print("attached" if worker.attached else "started", flush=True)
exec(sys.stdin.readline())
worker.close()
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path / "cache", "4MB", min_free=0) as opened:
        yield opened


def told(tmp_path: Path, allowed: int | None, samples: int = 1) -> Told:
    source = Told(str(tmp_path), samples=samples)
    source.allow(allowed)
    return source


def read_again(source: Told, cached: list[int], before: int) -> int:
    """The number of units that were read after the first `before` reads although all of their samples were `cached`."""
    samples = Counter(number // source.samples for number in cached)
    return sum(samples[unit] == source.samples for unit in source.units_read[before:])


def test_a_worker_outlives_trainers_that_crash_and_the_next_start_finds_it_at_work(
    cache: cs.Cache, tmp_path: Path
) -> None:
    source = told(tmp_path, 20)
    with python(JOB, cache.path, tmp_path, 600) as job:
        assert line_of(job) == "started"
        cache.wait(10, DEADLINE_S)
        pid = pid_of(cache)
        job.kill()
        job.wait(DEADLINE_S)
    with python(JOB, cache.path, tmp_path, 600) as job:
        assert line_of(job) == "attached"
        assert "RuntimeError" in job.communicate("raise RuntimeError\n", DEADLINE_S)[1]
    source.allow(40)
    cache.wait(30, DEADLINE_S)
    with cs.start_worker(cache, source) as worker:
        assert worker.attached
        assert pid_of(cache) == pid
        source.allow(None)
        assert worker.wait(DEADLINE_S)
    assert numbers_in(cache) == source.numbers
    assert sorted(source.units_read) == source.numbers, "every unit was read exactly once"
    until(lambda: not is_running(pid), "the worker goes with the last job")


def test_a_worker_serves_its_jobs_to_the_last_and_goes_with_it_and_the_next_one_resumes(
    cache: cs.Cache, tmp_path: Path
) -> None:
    source = told(tmp_path, 10)
    with ExitStack() as stack:
        jobs = [stack.enter_context(python(JOB, cache.path, tmp_path, 0)) for _ in range(2)]
        assert sorted(map(line_of, jobs)) == ["attached", "started"], "of two that start at once, one has"
        cache.wait(5, DEADLINE_S)
        pid = pid_of(cache)
        jobs[0].communicate("\n", DEADLINE_S)
        source.allow(30)
        cache.wait(25, DEADLINE_S)
        assert pid_of(cache) == pid
        jobs[1].kill()
        until(lambda: not cache.has_worker(), "the worker has ended")
    until(lambda: not is_running(pid), "its process is gone")
    assert cache.fill_state() == "stopped"
    assert len({process for process, _ in source.reads}) == 1, "one sampling process, and no more"
    before, reads = numbers_in(cache), len(source.reads)
    source.allow(None)
    with cs.start_worker(cache, source, num_workers=2) as worker:
        assert not worker.attached
        assert worker.wait(DEADLINE_S)
    assert numbers_in(cache) == source.numbers
    assert read_again(source, before, reads) <= 1


def test_a_sampling_process_that_is_killed_is_restarted_and_costs_nothing(
    cache: cs.Cache, tmp_path: Path
) -> None:
    source = told(tmp_path, 20, samples=2)
    with cs.start_worker(cache, source, num_workers=2, concurrency=2, shard_size=FOUR) as worker:
        before, reads = list[int](), 0
        for allowed, more in ((20, 60), (60, None)):
            until(lambda: len(source.reads) > allowed, "a process waits with a unit")  # noqa: B023
            cache.wait(20, DEADLINE_S)
            before, reads = numbers_in(cache), len(source.reads)
            os.kill(source.reads[-1][0], signal.SIGKILL)
            source.allow(more)
        assert worker.wait(DEADLINE_S)
        process = worker.status().worker
        assert process is not None
        assert process.restarts == 2
    assert numbers_in(cache) == source.numbers
    assert cache.status().failures == (), "nobody is blamed for a kill from outside"
    assert read_again(source, before, reads) <= 2, "what was cached is not read again"
    assert max(Counter(source.units_read).values()) <= 3


def test_a_unit_that_ends_its_process_again_and_again_is_left_out_and_the_others_come(
    tmp_path: Path, cache: cs.Cache
) -> None:
    def transform(sample: dict[str, int]) -> dict[str, int]:
        if sample["number"] == 30:
            os.abort()
        return sample

    source = told(tmp_path, None)
    with cs.start_worker(cache, source, num_workers=1, transform=transform) as worker:
        assert worker.wait(DEADLINE_S)
    assert numbers_in(cache) == [n for n in source.numbers if n != 30]
    (failure,) = cache.status().failures
    assert (failure.kind, failure.count) == ("quarantined", 1)
    assert "SIGABRT" in failure.reason


def test_a_worker_that_is_stopped_goes_on_exactly_where_it_was(cache: cs.Cache, tmp_path: Path) -> None:
    source = told(tmp_path, 30)
    worker = cs.start_worker(cache, source, num_workers=1, concurrency=2, shard_size=FOUR)
    cache.wait(15, DEADLINE_S)
    worker.stop(DEADLINE_S)
    assert (cache.fill_state(), cache.status().pass_number) == ("stopped", 1)
    before, reads = numbers_in(cache), len(source.reads)
    source.allow(None)
    with cs.start_worker(cache, source, num_workers=2) as worker:
        assert worker.wait(DEADLINE_S)
        assert (cache.fill_state(), cache.status().pass_done) == ("complete", 1.0)
    assert numbers_in(cache) == source.numbers
    assert read_again(source, before, reads) <= 1, "what is cached is not read again"
    assert len(source.reads) <= reads + 60 - len(before) + 1, "and what is not, once"
