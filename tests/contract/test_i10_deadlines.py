"""Invariant 10: every wait has a deadline, after which an error says what was waited for; `close` ends every wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
        cs.EpochLoader(cache, 4, timeout_s=0.2) as loader,
    ):
        with pytest.raises(cs.NotEnoughSamplesError, match="holds 0 samples") as caught:
            wait(loader)
        assert isinstance(caught.value, TimeoutError)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), None, "x"])
def test_a_deadline_that_is_none_is_refused(wrong: Any, cache: cs.Cache) -> None:
    with pytest.raises(cs.ConfigError, match="timeout_s="):
        cs.EpochLoader(cache, 4, timeout_s=wrong)
