"""The public class Worker: one process's view of the worker of a cache."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import cachestream as cs
from tests.contract.readers import DEADLINE_S, FOUR, Told, is_running, numbers_in, pid_of, python, until

DETACHED = """
import sys
import cachestream as cs
from tests.contract.readers import Told
cs.start_worker(sys.argv[1], Told(sys.argv[2]), num_workers=1, shard_size="16KB", detach=True)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path / "cache", "4MB", min_free=0) as opened:
        yield opened


@pytest.fixture
def source(tmp_path: Path) -> Told:
    return Told(str(tmp_path))


def test_it_tells_what_it_does_from_its_start_to_its_end(cache: cs.Cache, source: Told) -> None:
    source.allow(10)
    assert (cache.fill_state(), cache.status().worker) == ("none", None)
    with cs.start_worker(cache, source, num_workers=2, concurrency=2, shard_size=FOUR) as worker:
        assert worker.is_alive()
        assert cache.has_worker()
        assert (worker.cache, worker.attached, worker.linger_s) == (cache, False, 0.0)
        assert repr(worker) == f"<Worker of {cache.path}: filling, owner>"
        with cs.start_worker(Path(cache.path), source) as second:
            assert second.attached
            assert repr(second) == f"<Worker of {cache.path}: filling, attached>"
        assert worker.is_alive(), "the first still needs it"
        cache.wait(5, DEADLINE_S)
        with pytest.raises(cs.WorkerTimeoutError, match=r"not complete within 0\.1 s; wait longer") as late:
            worker.wait(0.1)
        assert isinstance(late.value, TimeoutError)
        assert str(pickle.loads(pickle.dumps(late.value))) == str(late.value)
        status = worker.status()
        assert (status.fill_state, status.num_units, status.pass_number) == ("filling", 60, 1)
        assert status.pass_done is not None
        assert 0 < status.pass_done < 0.5
        assert status.worker is not None
        assert is_running(status.worker.pid)
        assert (len(status.worker.states), status.worker.restarts) == (2, 0)
        for nonsense in ("1", float("nan"), True):
            for method in (worker.wait, worker.stop):
                with pytest.raises(cs.ConfigError, match=r"timeout_s=.*: give seconds"):
                    method(nonsense)  # type: ignore[arg-type]
        source.allow(None)
        assert worker.wait(DEADLINE_S) is True
        assert worker.wait() is True, "at once"
        assert worker.is_alive(), "it rests"
        status = worker.status()
        assert (status.fill_state, status.pass_done, status.num_samples) == ("complete", 1.0, 60)
        assert status.worker is not None
        assert (status.worker.totals.samples, status.worker.totals.units) == (60, 60)
    assert not worker.is_alive()
    assert worker.status().worker is None
    assert (cache.fill_state(), numbers_in(cache)) == ("complete", source.numbers)
    worker.close()
    worker.stop()


def test_stop_ends_it_for_all_who_need_it_and_wait_tells_that_the_pass_is_not_complete(
    cache: cs.Cache, source: Told
) -> None:
    source.allow(10)
    with cs.start_worker(cache, source, num_workers=1, shard_size=FOUR) as first:
        cache.wait(8, DEADLINE_S)
        pid = pid_of(cache)
        second = cs.start_worker(cache, source)
        second.stop(DEADLINE_S)
        assert not first.is_alive()
        assert first.wait(DEADLINE_S) is False
        assert cache.fill_state() == "stopped"
        until(lambda: not is_running(pid), "its process is gone")
    assert 8 <= len(numbers_in(cache)) <= 10, "what is cached stays"


def test_a_detached_worker_outlives_its_caller_and_is_stopped_by_another(
    cache: cs.Cache, source: Told
) -> None:
    source.allow(10)
    with python(DETACHED, cache.path, source.folder) as caller:
        _, errors = caller.communicate(timeout=DEADLINE_S)
        assert caller.returncode == 0, errors
    source.allow(None)
    until(lambda: cache.fill_state() == "complete", "it fills the cache")
    with cs.start_worker(cache, source) as attached:
        assert attached.attached
    assert cache.has_worker(), "who attached may go"
    cs.start_worker(cache, source, detach=True).stop(DEADLINE_S)
    assert not cache.has_worker()
    assert numbers_in(cache) == source.numbers


def test_a_worker_that_fails_raises_its_error_with_the_traceback_from_the_background(cache: cs.Cache) -> None:
    def transform(sample: dict[str, int]) -> dict[str, int]:
        raise ZeroDivisionError(f"no {sample['x']}")

    endless = cs.CallableSource(lambda _: {"x": 7})
    with cs.start_worker(cache, endless, num_workers=1, transform=transform) as worker:
        with pytest.raises(cs.WorkerError, match="ZeroDivisionError: no 7") as failed:
            worker.wait(DEADLINE_S)
        until(lambda: not worker.is_alive(), "it has ended")
        assert cache.fill_state() == "failed"
        assert "no 7" in worker.status().fill_message
    assert not isinstance(failed.value, cs.WorkerTimeoutError)
    copy = pickle.loads(pickle.dumps(failed.value))
    assert (str(copy), copy.remote_traceback) == (str(failed.value), failed.value.remote_traceback)


def test_what_cannot_be_loaded_in_the_background_is_told_with_its_traceback(cache: cs.Cache) -> None:
    class OnlyAtHome(Told):
        def __reduce__(self) -> tuple[object, ...]:
            return load, ()

    def load() -> object:
        raise ModuleNotFoundError("No module named 'only_at_home'")

    with (
        cs.start_worker(cache, OnlyAtHome(""), num_workers=1) as worker,
        pytest.raises(cs.WorkerError, match="cannot be loaded in the background") as failed,
    ):
        worker.wait(DEADLINE_S)
    assert "Traceback" in failed.value.remote_traceback
    assert "only_at_home" in failed.value.remote_traceback


def test_a_signal_ends_the_worker_in_order_and_nobody_replaces_it(cache: cs.Cache, source: Told) -> None:
    source.allow(10)
    with cs.start_worker(cache, source, num_workers=1, shard_size=FOUR) as worker:
        cache.wait(8, DEADLINE_S)
        os.kill(pid_of(cache), signal.SIGTERM)
        assert worker.wait(DEADLINE_S) is False
        assert (cache.fill_state(), cache.status().fill_message) == ("stopped", "")
        assert 8 <= len(numbers_in(cache)) <= 10
