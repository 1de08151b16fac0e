"""Batches that the trainer's own thread asks for: the same ones as torch gathers, whatever the trainer does meanwhile."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from cachestream import Cache, EpochError, EpochLoader, collate
from cachestream.training import loader as loader_module
from cachestream.training import tasks, window
from cachestream.training.batches import memory
from cachestream.training.batches.transfer import (
    BatchTransform,
    Staged,
    Transfer,
    make_transfer,
    map_tensors,
)
from tests.support.caches import numbers
from tests.support.same import same
from tests.training.conftest import NewCache
from tests.worker.support import wait_until

CacheOf = Callable[[list[Any], list[int]], Cache]

if memory.in_c is None:
    pytest.skip("installed without the part in C", allow_module_level=True)

SAMPLES: dict[str, Callable[[int], Any]] = {
    "a number": lambda i: i,
    "numbers and bools": lambda i: {"n": i, "half": i / 2, "odd": bool(i % 2)},
    "a tuple": lambda i: (np.full((3, 5), i, np.float32), i),
    "every width": lambda i: {
        str(np.dtype(kind)): np.full(7, i % 2, kind)
        for kind in ("u1", "i2", "f2", "f4", "f8", "c8", "c16", "?")
    },
    "bfloat16": lambda i: {"x": torch.full((3,), i, dtype=torch.bfloat16)},
    "nothing in it": lambda i: {"empty": np.empty((0, 3), np.float32), "n": i},
    "a large one": lambda i: {"x": np.full(70_001, i, np.uint8), "n": i},
}


class Elsewhere(Transfer):
    """Moves batches, as to a GPU, to other memory: whoever looks at the memory that they were gathered in is too late."""

    moves: ClassVar[bool] = True
    sent: ClassVar[int] = 0
    wipes: ClassVar[bool] = True

    def send(self, batch: Any, transform: BatchTransform | None) -> Staged:
        assert transform is None
        moved = map_tensors(batch, torch.clone)
        if self.wipes:
            map_tensors(batch, torch.Tensor.zero_)
        Elsewhere.sent += 1
        return Staged(moved)


@pytest.fixture(params=["in host memory", "moved"])
def moved(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if batches are moved out of the memory that they are gathered in."""
    is_moved: bool = request.param == "moved"
    if is_moved:
        monkeypatch.setattr(Elsewhere, "sent", 0)
        monkeypatch.setattr(loader_module, "make_transfer", lambda _, keep, __: Elsewhere(keep))
    return is_moved


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in SAMPLES),
        ("a tuple", {"drop_last": False}),
        ("a tuple", {"shuffle": False}),
        ("every width", {"prefetch": 1}),
        ("every width", {"epoch_size": 90}),
    ],
)
def test_the_batches_are_those_that_torch_gathers(
    cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch, moved: bool, kind: str, options: dict[str, Any]
) -> None:
    cache = cache_of([SAMPLES[kind](i) for i in range(61)], [20, 1, 40])
    with EpochLoader(cache, 4, seed=3, **options) as loader:
        ours = [list(loader) for _ in range(3)]
    assert bool(Elsewhere.sent) == moved
    monkeypatch.setattr(memory, "in_c", None)
    monkeypatch.setattr(loader_module, "make_transfer", make_transfer)
    with EpochLoader(cache, 4, seed=3, **options) as loader:
        theirs = [list(loader) for _ in range(3)]
    for mine, others in zip(ours, theirs, strict=True):
        assert len(mine) == len(others)
        assert all(map(same, mine, others))


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_samples_of_a_dataset_are_those_that_torch_gathers(
    cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cache = cache_of([SAMPLES[kind](i) for i in range(61)], [20, 1, 40])
    wanted = np.random.default_rng(0).integers(-61, 61, 200)

    def ask() -> list[Any]:
        with cache.snapshot() as dataset:
            return [collate(dataset.__getitems__(wanted)), dataset[[]], dataset[60]]

    ours = ask()
    monkeypatch.setattr(memory, "in_c", None)
    assert all(map(same, ours, ask()))


@pytest.mark.usefixtures("moved")
def test_a_batch_that_is_changed_in_place_is_no_matter_to_autograd_for_the_others(
    new_cache: NewCache,
) -> None:
    weights = torch.ones(4, requires_grad=True)
    with EpochLoader(new_cache(4, 100), 4) as loader:
        batches = iter(loader)
        next(batches)
        for one, other in zip(batches, batches, strict=False):
            loss = (weights * one["number"]).sum()
            other["number"].zero_()
            loss.backward()


@pytest.mark.e2e
def test_what_moves_is_on_its_way_before_the_trainer_comes_for_it(
    cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Elsewhere, "sent", 0)
    monkeypatch.setattr(loader_module, "make_transfer", lambda _, keep, __: Elsewhere(keep))
    cache = cache_of([SAMPLES["a large one"](i % 61) for i in range(600)], [600])
    with EpochLoader(cache, 32, prefetch=4) as loader:
        gathering, ahead = loader._background.gathering, []
        for taken, _ in enumerate(loader, 1):
            ahead.append(Elsewhere.sent - taken)
            if (
                gathering._held and gathering._queue is not None
            ):  # it computes until all that is asked for is there
                assert gathering._queue.wait(gathering._held[-1][0], 60.0)
    assert min(ahead[2:-4]) >= 1
    assert max(ahead) <= 4


@pytest.mark.e2e
def test_few_batches_are_in_memory_at_a_time(cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    init = memory._Buffer.__init__

    def count(buffer: Any, num_bytes: int, pins: Any) -> None:
        made.append(num_bytes)
        init(buffer, num_bytes, pins)

    monkeypatch.setattr(memory._Buffer, "__init__", count)
    cache = cache_of([np.full(1 << 20, i % 251, np.uint8) for i in range(64)], [32, 32])
    with EpochLoader(cache, 8, prefetch=3) as loader:
        for _ in range(4):
            for batch in loader:
                assert (batch[:, 0] == batch[:, -1]).all()
    # Three ahead, the one in hand, the one that comes, and what is held until the next look.
    assert sum(size >= 8 << 20 for size in made) <= 6


@pytest.mark.e2e
@pytest.mark.usefixtures("moved")
def test_an_interrupt_at_any_line_while_a_batch_is_looked_at_costs_none_and_repeats_none(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`peek` hands over and submits as `next` does, and the epoch goes on after it."""
    monkeypatch.setattr(Elsewhere, "wipes", False)  # what was interrupted is sent once more
    files, lines, left = (tasks.__file__, window.__file__, memory.__file__), 0, 0

    def place(frame: FrameType) -> tuple[str, int]:
        return frame.f_code.co_filename, frame.f_lineno

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left, lines
        if frame.f_code.co_filename not in files:
            return None
        # Tracing also stops between the end of a `with` block and the release of its lock; a signal does not.
        if event == "line" and not linecache.getline(*place(frame)).lstrip().startswith("with "):
            lines, left = lines + 1, left - 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupt

    with EpochLoader(new_cache(4, 50), 2, seed=1, timeout_s=30) as loader:
        for number in range(1, 150):
            len(loader)
            left = number
            sys.settrace(interrupt)
            try:
                with suppress(KeyboardInterrupt):
                    loader.peek()
            finally:
                sys.settrace(None)
            assert sorted(numbers(loader)) == list(range(200)), number
    assert lines > 1000


@pytest.mark.e2e
@pytest.mark.usefixtures("moved")
def test_many_loaders_end_and_leave_no_thread(new_cache: NewCache) -> None:
    cache, before = new_cache(2, 500), len(os.listdir("/proc/self/task"))
    for _ in range(20):
        loader = EpochLoader(cache, 2)
        next(iter(loader))
        loader.close()
    give_up_s = time.monotonic() + 30.0  # a thread that has given its queue back is still there for a moment
    while len(os.listdir("/proc/self/task")) > before and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) <= before
    assert not any(thread.name.startswith("cachestream") for thread in threading.enumerate())


@pytest.mark.e2e
def test_what_a_closed_queue_still_writes_to_is_let_go_once_it_is_written(new_cache: NewCache) -> None:
    block, place = np.ones(1 << 20, np.uint8), np.zeros(1, np.int64)
    base, out, copies = np.array([block.ctypes.data], np.int64), np.zeros(1 << 20, np.uint8), 1000
    assert memory.in_c is not None
    queue = memory.in_c.Queue(1)
    sources = (base.ctypes.data, block.nbytes) * copies
    queue.submit(place.ctypes.data, place.ctypes.data, 1, sources, (out.ctypes.data,) * copies, False)
    with EpochLoader(new_cache(1, 8), 4) as loader, EpochLoader(loader.cache, 4) as other:
        gathering, held = loader._background.gathering, Transfer(4)
        gathering._queue = queue
        gathering._held.append((1, held))
        wait_until(lambda: out[-1], "it is being written to")
        gone = weakref.ref(held)
        del held
        gathering.close(0.0)
        assert gone() is not None

        def is_gone() -> bool:
            other._background.gathering.close(0.0)
            return gone() is None

        wait_until(is_gone, "another loader that is closed lets it go")


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_told_that_it_has_no_threads(new_cache: NewCache) -> None:
    with EpochLoader(new_cache(2, 500), 2) as loader:
        batches = iter(loader)
        next(batches)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                for _ in batches:
                    pass
            except EpochError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            assert b"do not survive a fork" in pipe.read()
        os.waitpid(child, 0)
        assert len(numbers(batches)) == 998
