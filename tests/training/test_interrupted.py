"""Ctrl-C, or a notebook's stop button: the iteration fails, the state stays exact, and the next iteration
goes on.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from cachestream import EpochError, EpochLoader
from cachestream.training.position import Segment
from tests.support.caches import add_shard
from tests.training.conftest import NewCache

SAMPLES: Final = 512
BATCH: Final = 8
INTERRUPTS: Final = 5
STOPPED_S: Final = 2.6
ROOT: Final = Path(__file__).parents[2]


def numbers(loader: EpochLoader) -> list[int]:
    """The sorted numbers of the samples of one iteration."""
    return sorted(int(number) for batch in loader for number in batch["number"])


@contextmanager
def an_interrupt_after(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    others = signal.setitimer(signal.ITIMER_REAL, seconds)  # pytest-timeout's
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


# An interrupt that comes in a finalizer is lost, and Python says so.
@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("with_keys", [False, True], ids=["gathered-in-c", "gathered-by-a-thread"])
def test_an_interrupted_epoch_leaves_its_exact_state_and_the_next_iteration_goes_on(
    new_cache: NewCache, with_keys: bool
) -> None:
    rng, seen = random.Random(7), list[dict[str, Any]]()
    with EpochLoader(new_cache(4, SAMPLES // 4), BATCH, timeout_s=20, with_keys=with_keys) as loader:
        assert len(loader) == SAMPLES // BATCH
        for attempt in range(INTERRUPTS):
            epoch, seen, until_s = loader.epoch, [], time.monotonic() + 5.0
            before = loader.state_dict()
            try:
                with an_interrupt_after(0.001 + 0.02 * rng.random()):
                    while time.monotonic() < until_s:
                        batches = iter(loader)
                        epoch, seen = loader.epoch, []
                        for batch in batches:
                            seen.append(batch)  # no interrupt comes between the two lines
            except (KeyboardInterrupt, RuntimeError) as error:
                # At the first step of Condition.wait, CPython 3.11 makes a RuntimeError of the interrupt.
                assert KeyboardInterrupt in {type(error), type(error.__context__)}  # noqa: PT017
            state = loader.state_dict()
            if not seen and state == before:
                continue  # the interrupt came in iter(), and the state is that of the epoch interrupted before
            if len(seen) in {0, SAMPLES // BATCH}:
                assert state["batch"] == 0
                # Without a batch the interrupt may have come in iter().
                assert state["epoch"] in ({epoch + 1} if seen else {epoch, epoch + 1})
                continue
            assert (state["epoch"], state["batch"]) == (epoch, len(seen))
            if attempt % 2:
                loader.load_state_dict(state)
                delivered = [int(number) for batch in seen for number in batch["number"]]
                assert sorted(delivered + numbers(loader)) == list(range(SAMPLES))
        assert numbers(loader) == list(range(SAMPLES))


@pytest.mark.e2e
@pytest.mark.parametrize("gathered", [0, 4])
def test_an_interrupt_while_a_batch_is_waited_for_ends_the_iteration(
    new_cache: NewCache, gathered: int
) -> None:
    held = threading.Event()

    def transform(batch: Any) -> Any:
        if batch["number"][0] >= 4 * gathered:  # not by calls: a second thread may be ahead of the first
            signal.setitimer(signal.ITIMER_REAL, 0.5)  # however long those before it took
            held.wait(60)
        return batch

    first: list[Any] = []
    options: dict[str, Any] = {"shuffle": False, "batch_transform": transform, "timeout_s": 60}
    with EpochLoader(new_cache(2, 16), 4, **options) as loader:
        batches = iter(loader)
        with pytest.raises(KeyboardInterrupt), an_interrupt_after(60.0):
            first.extend(batches)
        held.set()
        state = loader.state_dict()
        assert (state["epoch"], state["batch"]) == (0, len(first))
        assert bool(first) == bool(gathered)
        with pytest.raises(EpochError, match=r"ended after \d+ batches: an error \(KeyboardInterrupt"):
            next(batches)
        assert numbers(loader) == list(range(32))
        assert loader.stats.epoch == (1 if first else 0)
        loader.load_state_dict(state)
        delivered = [int(number) for batch in first for number in batch["number"]]
        assert sorted(delivered + numbers(loader)) == list(range(32))


@pytest.mark.e2e
def test_an_interrupt_before_there_is_a_sample_costs_no_epoch(new_cache: NewCache) -> None:
    cache = new_cache()
    with EpochLoader(cache, 4, timeout_s=60) as loader:
        before = loader.state_dict()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), an_interrupt_after(0.5):
                next(iter(loader))
            assert loader.state_dict() == before
        add_shard(cache, ((str(n), {"number": n}) for n in range(16)))
        assert numbers(loader) == list(range(16))
        assert loader.stats.epoch == 0


@pytest.mark.e2e
def test_an_interrupt_before_the_first_batch_after_a_resume_keeps_the_place(new_cache: NewCache) -> None:
    held = threading.Event()

    def transform(batch: Any) -> Any:
        held.wait(60)
        return batch

    cache = new_cache(2, 16)
    with EpochLoader(cache, 4, timeout_s=60) as loader:
        batches = iter(loader)
        first = [int(number) for _ in range(3) for number in next(batches)["number"]]
        state = loader.state_dict()
    with EpochLoader(cache, 4, batch_transform=transform, timeout_s=60) as loader:
        loader.load_state_dict(state)
        with pytest.raises(KeyboardInterrupt), an_interrupt_after(1.0):
            next(iter(loader))
        held.set()
        assert loader.state_dict() == state
        assert sorted(first + numbers(loader)) == list(range(32))


# A child process: a test process that stopped itself would stay so for ever if nobody continued it.
STOPPED_TRAINER: Final = """
import sys, time
from cachestream import Cache, EpochLoader

def slow(batch):
    time.sleep(0.6)
    return batch

with Cache(sys.argv[1]) as cache, EpochLoader(cache, 4, timeout_s=2.0, batch_transform=slow) as loader:
    print("ready", flush=True)
    print(sum(len(batch["number"]) for batch in loader))
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    "samples",
    [
        pytest.param(16, id="between two batches"),
        pytest.param(0, id="before there is a sample", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_was_stopped_is_not_late_when_it_goes_on(new_cache: NewCache, samples: int) -> None:
    """The time in which the whole process was stopped does not count as waiting."""
    cache = new_cache(1, samples) if samples else new_cache()
    command = [sys.executable, "-c", STOPPED_TRAINER, cache.path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "ready\n"
            time.sleep(0.3)
            trainer.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            trainer.send_signal(signal.SIGCONT)
            if not samples:
                add_shard(cache, ((str(n), {"number": n}) for n in range(16)))
            assert trainer.communicate(timeout=60)[0] == "16\n"
        finally:
            trainer.kill()


@pytest.mark.e2e
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


def test_an_interrupt_while_the_threads_are_started_leaves_one_of_each(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "cachestream-prepare":
            raise KeyboardInterrupt

    with EpochLoader(new_cache(2, 8), 4) as loader:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            iter(loader)
        monkeypatch.undo()
        assert numbers(loader) == list(range(16))
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("cachestream-prepare") == 1


def test_an_interrupt_while_an_epoch_is_closed_leaves_no_lease_behind(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, calls = Segment.close, itertools.count(1)

    def interrupted(segment: Segment) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        close(segment)

    cache = new_cache(2, 8)
    with EpochLoader(cache, 4) as loader:
        monkeypatch.setattr(Segment, "close", interrupted)
        batches = iter(loader)
        kept = [next(batches) for _ in range(4)]
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        state = loader.state_dict()
        assert (len(kept), state["epoch"], state["batch"]) == (4, 1, 0)
        segment = loader._background.window._retired[0]
        assert numbers(loader) == list(range(16))
        assert segment.dataset._closed
        assert loader.epoch == 2
    assert cache.status().leases == 0
