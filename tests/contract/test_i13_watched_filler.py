"""Invariant 13: whoever fills is watched. A supervisor that dies is replaced by whoever still needs it, or all are told."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import cachestream as cs
from tests.contract.readers import DEADLINE_S, FOUR, Told, is_running, numbers_in, pid_of, python, until
from tests.contract.test_worker import DETACHED


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path / "cache", "4MB", min_free=0) as opened:
        yield opened


def kill(cache: cs.Cache) -> int:
    """Kill the worker; its process id."""
    pid = pid_of(cache)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid), "it is dead")
    return pid


def test_a_killed_supervisor_is_replaced_by_the_process_that_needs_it_while_it_fills_and_while_it_rests(
    cache: cs.Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "cachestream")
    source = Told(str(tmp_path))
    source.allow(20)
    with cs.start_worker(cache, source, num_workers=1, concurrency=2, shard_size=FOUR) as worker:
        until(lambda: len(source.reads) > 20, "it waits with a unit")
        first, reader = pid_of(cache), source.reads[-1][0]
        os.kill(first, signal.SIGKILL)
        source.allow(None)
        assert worker.wait(DEADLINE_S), "it waits for the one that takes its place"
        assert pid_of(cache) not in (0, first)
        until(lambda: not is_running(reader), "its sampling process is gone")
        assert numbers_in(cache) == source.numbers
        assert f"(pid {first}) ended without a word" in caplog.text
        second = kill(cache)
        until(lambda: pid_of(cache) not in (0, second), "another one rests in its place")
        cache.evict(to=cache.size_bytes - 50_000)
        until(lambda: numbers_in(cache) == source.numbers, "what was evicted comes again")
    assert not cache.has_worker()
    assert cache.status().failures == ()


@pytest.mark.e2e
def test_a_supervisor_that_nobody_can_replace_is_told_to_who_looks_trains_or_waits_and_the_next_goes_on(
    cache: cs.Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "cachestream")
    source = Told(str(tmp_path))
    source.allow(20)
    with python(DETACHED, cache.path, tmp_path) as caller:
        caller.communicate(timeout=DEADLINE_S)
    cache.wait(16, DEADLINE_S)
    words = f"(pid {kill(cache)}) ended without a word"
    assert cache.fill_state() == "stopped"
    assert words in cache.status().fill_message
    assert cache.status().worker is None
    with cs.EpochLoader(cache, 4) as loader:
        until(lambda: list(loader) and words in caplog.text, "the loader is told")
    with pytest.raises(cs.NotEnoughSamplesError, match="ended without a word"):
        cache.wait(60, timeout_s=0.1)
    before = numbers_in(cache)
    source.allow(None)
    with cs.start_worker(cache, source, num_workers=2) as worker:
        assert not worker.attached
        assert worker.wait(DEADLINE_S)
    assert numbers_in(cache) == source.numbers
    assert set(before) <= set(source.numbers)
    assert cache.status().fill_message == ""
