"""Ctrl-C at any step, as of a notebook's stop button: no batch twice, at most one lost, and the loader goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import torch

from cachestream import EpochLoader
from tests.training.conftest import NewCache

SAMPLES: Final = 512
BATCH: Final = 8
INTERRUPTS: Final = 150
STOPPED_S: Final = 4.0
ROOT: Final = Path(__file__).parents[2]


@contextmanager
def an_interrupt_after(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("goes_on", [False, True], ids=["next-epoch", "same-iteration"])
def test_an_interrupt_at_any_step_loses_a_batch_at_most(new_cache: NewCache, goes_on: bool) -> None:
    rng, most_lost = random.Random(7), 0
    with EpochLoader(new_cache(4, SAMPLES // 4), BATCH, timeout_s=20) as loader:
        assert len(loader) == SAMPLES // BATCH
        for _ in range(INTERRUPTS):
            seen: list[torch.Tensor] = []
            batches = None
            with suppress(KeyboardInterrupt), an_interrupt_after(0.001 + 0.01 * rng.random()):
                while True:
                    seen, batches = [], None
                    batches = iter(loader)
                    for batch in batches:
                        seen.append(batch["number"])
                    assert torch.equal(torch.cat(seen).sort().values, torch.arange(SAMPLES))
            if batches is None:  # it came in iter()
                continue
            if goes_on:
                seen += [batch["number"] for batch in batches]
                most_lost = max(most_lost, SAMPLES // BATCH - len(seen))
            delivered = torch.cat(seen).tolist() if seen else []
            assert len(delivered) == len(set(delivered))
        assert most_lost <= 1
        assert sum(len(batch["number"]) for batch in loader) == SAMPLES


def test_a_trainer_that_was_stopped_is_not_late_when_it_goes_on(new_cache: NewCache) -> None:
    """All of its threads were stopped with it: nobody has kept it waiting."""

    def slow(batch: object) -> object:
        time.sleep(1.0)
        return batch

    cache = new_cache(1, 16)
    waker = "import os, signal, sys, time; time.sleep(0.5); os.kill({0}, signal.SIGSTOP); time.sleep({1}); os.kill({0}, signal.SIGCONT)"
    with EpochLoader(cache, 4, timeout_s=3.0, batch_transform=slow) as loader:
        stopping = subprocess.Popen([sys.executable, "-c", waker.format(os.getpid(), STOPPED_S)])
        try:
            assert sum(len(batch["number"]) for batch in loader) == 16
        finally:
            stopping.wait(60)


def test_a_trainer_that_was_stopped_before_there_was_a_sample_is_not_late_either(new_cache: NewCache) -> None:
    cache = new_cache()
    script = (
        "import os, signal, sys, time\n"
        "from cachestream import Cache\n"
        "from tests.support.caches import add_shard\n"
        "print('loaded', flush=True); time.sleep(0.5)\n"
        "os.kill({0}, signal.SIGSTOP); time.sleep({1}); os.kill({0}, signal.SIGCONT); time.sleep(0.5)\n"
        "with Cache({2!r}) as cache: add_shard(cache, ((str(n), {{'number': n}}) for n in range(16)))\n"
    )
    with EpochLoader(cache, 4, timeout_s=3.0) as loader:
        stopping = subprocess.Popen(
            [sys.executable, "-c", script.format(os.getpid(), STOPPED_S, cache.path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        try:
            assert stopping.stdout is not None
            with stopping.stdout as said:
                assert said.readline() == b"loaded\n"
            assert sum(len(batch["number"]) for batch in loader) == 16
        finally:
            stopping.wait(60)


def test_a_state_taken_after_the_end_is_that_of_the_end(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 32), 8) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        before = loader.state_dict()
    assert loader.state_dict() == before
    with EpochLoader(loader.cache, 8) as again:
        again.load_state_dict(loader.state_dict())
        assert len(list(again)) == 6
    with EpochLoader(loader.cache, 8) as whole:
        batches = iter(whole)
        for _ in range(8):
            next(batches)
    assert whole.state_dict()["epoch"] == 1
    assert list(batches) == []
