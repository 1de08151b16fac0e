"""Invariant 10: every wait has a deadline, after which an error says what was waited for; `close` ends every wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES

PATIENCE_S: Final = 60.0


class Gate:
    """A batch transform that waits until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, batch: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(2 * PATIENCE_S)
        return batch


def test_a_batch_that_does_not_come_is_an_error_that_says_where_it_is_and_may_be_asked_for_again(
    cache: cs.Cache,
) -> None:
    gate = Gate()
    with cs.EpochLoader(cache, 50, batch_transform=gate, timeout_s=0.5) as loader:
        try:
            batches = iter(loader)
            assert gate_error(batches).startswith("no batch of epoch 0 within 0.5 s")
            assert gate.reached.wait(PATIENCE_S)
            assert "gathering epoch 0" in gate_error(batches)
        finally:
            gate.opened.set()
        seen: list[int] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(seen) < NUM_SAMPLES:
            try:
                seen += next(batches)["number"].tolist()
            except cs.EpochError:
                assert time.monotonic() < deadline
    assert sorted(seen) == list(range(NUM_SAMPLES))


def gate_error(batches: Any) -> str:
    with pytest.raises(cs.EpochError) as caught:
        next(batches)
    return str(caught.value)


def test_a_loader_that_is_closed_ends_the_wait_of_another_thread(cache: cs.Cache) -> None:
    gate = Gate()
    loader = cs.EpochLoader(cache, 50, batch_transform=gate, timeout_s=2 * PATIENCE_S)
    with ThreadPoolExecutor(2) as threads:
        try:
            waiting = threads.submit(next, iter(loader))
            assert gate.reached.wait(PATIENCE_S)
            closing = threads.submit(loader.close)
            with pytest.raises(cs.EpochError, match="closed"):
                waiting.result(PATIENCE_S)
        finally:
            gate.opened.set()
        closing.result(PATIENCE_S)


WAITS: Final[dict[str, Callable[[cs.EpochLoader], object]]] = {
    "cache.wait": lambda loader: loader.cache.wait(1, timeout_s=0.2),
    "the first batch": lambda loader: next(iter(loader)),
    "len": len,
    "peek": lambda loader: loader.peek(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_samples_that_do_not_come_are_an_error_at_the_deadline(
    wait: Callable[[cs.EpochLoader], object], tmp_path: Path
) -> None:
    with (
        cs.Cache(tmp_path / "empty", "4MB", min_free=0) as cache,
        cs.EpochLoader(cache, 4, timeout_s=1.0) as loader,
    ):
        began_s = time.monotonic()
        with pytest.raises(cs.NotEnoughSamplesError, match="holds 0 samples") as caught:
            wait(loader)
        assert isinstance(caught.value, TimeoutError)
        assert time.monotonic() - began_s < PATIENCE_S


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), None, "x"])
def test_a_deadline_that_is_none_is_refused(wrong: Any, cache: cs.Cache) -> None:
    with pytest.raises(cs.ConfigError, match="timeout_s="):
        cs.EpochLoader(cache, 4, timeout_s=wrong)


LOCKS = """
import sqlite3, sys
catalogue = sqlite3.connect(sys.argv[1], isolation_level=None)
catalogue.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_wait_ends_at_its_deadline_while_another_process_holds_the_catalogue(cache: cs.Cache) -> None:
    command = [sys.executable, "-c", LOCKS, str(Path(cache.path, "catalogue.sqlite"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as locker:
        assert locker.stdout is not None
        assert locker.stdout.readline().strip() == "locked"
        began_s = time.monotonic()
        with pytest.raises(cs.CacheStreamError):
            cache.wait(NUM_SAMPLES + 1, timeout_s=1)
        assert time.monotonic() - began_s < 5
        locker.kill()


def test_an_eviction_function_that_takes_its_time_holds_no_lock_that_others_wait_for(cache: cs.Cache) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(rows: Sequence[Any]) -> Sequence[Any]:
        asked.set()
        assert answer.wait(60)
        return rows

    mine = cs.Cache(cache.path, eviction=slow)
    evicting = threading.Thread(target=mine.evict, args=("1MB",))
    evicting.start()
    try:
        assert asked.wait(60)
        cache.min_free = 1
        with cache.snapshot() as dataset:
            assert len(dataset) == NUM_SAMPLES
    finally:
        answer.set()
        evicting.join()
        mine.close()
    assert cache.num_samples < NUM_SAMPLES
