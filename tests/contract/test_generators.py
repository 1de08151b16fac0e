"""The trainer's own random numbers and threads are its own: a loader beside it leaves them as they are."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES
from tests.contract.loader_acts import PATIENCE_S, Ranks

SAMPLES = 96


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path_factory.mktemp("generators") / "cache", "20MB", min_free=0) as cache:
        with cs.start_worker(cache, [{"n": n} for n in range(SAMPLES)], num_workers=1) as worker:
            worker.wait(timeout_s=60)
        yield cache


class Own(torch.utils.data.Sampler[int]):
    """A sampler without a generator, which draws from all global ones."""

    def __init__(self, dataset: Any) -> None:
        self.size = len(dataset)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size).tolist()
        np.random.shuffle(order)  # noqa: NPY002
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return self.size


class Batches(Own):
    """The same in batches, made once for a cache that does not change."""

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return iter([order[i : i + 8] for i in range(0, len(order), 8)])


def drawn_by_function(dataset: Any) -> Any:
    return torch.utils.data.BatchSampler(torch.randperm(len(dataset)).tolist(), 8, drop_last=True)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "class": lambda: Own,
    "object": lambda: Own(range(SAMPLES)),
    "batches": lambda: Batches(range(SAMPLES)),
    "function": lambda: drawn_by_function,
    "inside torch's": lambda: torch.utils.data.BatchSampler(Own(range(SAMPLES)), 8, drop_last=True),
    "torch's": lambda: torch.utils.data.RandomSampler,
}


def train(loader: cs.EpochLoader, epochs: int) -> tuple[list[Any], list[list[int]]]:
    """The random numbers of a training loop that pauses at random, and its batches."""
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    mine, batches = [], []
    for _ in range(epochs):
        for batch in loader:
            mine.append((torch.rand(1).item(), np.random.rand(), random.random()))  # noqa: NPY002
            batches.append(batch["n"].tolist())
            time.sleep(time.time_ns() % 5 / 1000)
    return mine, batches


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_leaves_the_trainers_random_numbers_alone_and_is_the_same_in_every_run(
    kind: str, cache: cs.Cache
) -> None:
    with cs.EpochLoader(cache, 8) as loader:
        expected, _ = train(loader, 3)
    runs = []
    for _ in range(2):
        with cs.EpochLoader(cache, 8, sampler=SAMPLERS[kind]()) as loader:
            mine, batches = train(loader, 3)
        assert mine == expected
        runs.append(batches)
    assert runs[0] == runs[1]
    epochs = [[n for batch in runs[0][first : first + 12] for n in batch] for first in (0, 12, 24)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_an_epoch_of_a_sampler_without_a_generator_is_resumed_as_it_was(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 8, sampler=Own) as loader:
        whole, states = [], []
        for _ in range(2):
            for batch in loader:
                whole.append(batch["n"].tolist())
                states.append(loader.state_dict())
    for done in (4, 12, 15):
        with cs.EpochLoader(cache, 8, sampler=Own) as loader:
            loader.load_state_dict(states[done - 1])
            rest = [batch["n"].tolist() for epoch in range(done // 12, 2) for batch in loader]
        assert rest == whole[done:]


def test_looking_at_an_epoch_leaves_the_trainers_random_numbers_alone(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 8, sampler=Own) as loader:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        for look in (lambda: len(loader), loader.peek, lambda: loader.dataset):
            look()
        assert torch.equal(torch.rand(3), expected)


def test_the_errors_of_a_sampler_and_an_interrupt_in_it_come_to_the_trainer(cache: cs.Cache) -> None:
    errors: list[BaseException] = [ZeroDivisionError("mine"), KeyboardInterrupt()]

    class Failing(Own):
        def __iter__(self) -> Iterator[int]:
            if errors:
                raise errors.pop(0)
            return super().__iter__()

    with cs.EpochLoader(cache, 8, sampler=Failing) as loader:
        with pytest.raises(ZeroDivisionError, match="mine"):
            next(iter(loader))
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert sorted(n for batch in loader for n in batch["n"].tolist()) == list(range(SAMPLES))


def test_closing_a_loader_whose_sampler_waits_for_the_trainer_does_not_wait(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 8, sampler=Own) as loader:
        iter(loader)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 4
    assert cache.status().leases == 0


@pytest.mark.e2e
def test_the_threads_of_batch_transforms_leave_torchs_number_of_threads_alone(
    cache: cs.Cache, tmp_path: Path
) -> None:
    """In a process of its own: torch's threads are global."""
    script = tmp_path / "threads.py"
    script.write_text(
        textwrap.dedent(
            """
            import random, sys, threading, time, torch, cachestream as cs

            start = threading.Thread.start

            def start_slowly(thread):  # so that two threads soon meet while each sets its number
                time.sleep(random.uniform(0, 0.004))
                start(thread)

            def in_new_thread():
                found = []
                thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
                thread.start()
                thread.join()
                return found[0]

            if __name__ == "__main__":
                torch.set_num_threads(4)
                threading.Thread.start = start_slowly
                with cs.EpochLoader(cs.Cache(sys.argv[1]), 8, batch_transform=lambda batch: batch) as loader:
                    for _ in range(25):
                        for _ in loader:
                            pass
                print(in_new_thread(), torch.get_num_threads())
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script, cache.path], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == ["4", "4"]


def draws_of_its_own(path: Path) -> tuple[list[int], bool]:
    """An epoch of this rank by a function that draws from torch's global generator, and whether that stayed as it was."""
    torch.manual_seed(7 + torch.distributed.get_rank())
    with cs.Cache(path) as cache:
        options: dict[str, Any] = {
            "sampler": lambda dataset: torch.randperm(len(dataset)),
            "timeout_s": PATIENCE_S,
        }
        with cs.EpochLoader(cache, 10, **options) as loader:
            before = torch.get_rng_state()
            drawn = [n for batch in loader for n in batch["number"].tolist()]
            return drawn, torch.equal(torch.get_rng_state(), before)


def test_a_sampler_leaves_the_trainers_random_numbers_alone_on_several_ranks(
    two_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    (first, left_first), (second, left_second) = two_ranks.run(draws_of_its_own, new_path())
    assert left_first
    assert left_second
    assert len(first) == len(second) == NUM_SAMPLES // 2
    assert sorted(first + second) == list(range(NUM_SAMPLES))
    assert first != sorted(first)
