"""P6: batches at memory speed, as far as it shows without a stopwatch: tensors of the samples' dtype and shape in memory
that is used again and never shared, moved while the interpreter is free; and no pickle in the cache.
"""

from __future__ import annotations

import itertools
import pickle
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, NUM_VARIOUS, shown, various

# Batches of a megabyte and more out of a small cache: its samples come again and again.
ROWS: Final = 10_000  # of 4 KiB: 40 MB, above what malloc takes from its heap
MANY: Final = 40  # turns; a thread that kept the interpreter to itself would leave a few
TENSORS: Final = {
    "number": (torch.int64, ()),
    "x": (torch.float32, (4,)),
    "image": (torch.uint8, (3, 2, 2)),
    "half": (torch.float16, (2,)),
    "third": (torch.float64, ()),
    "even": (torch.bool, ()),
}


def repeated(batches: int) -> Callable[[Any], Any]:
    """A sampler of so many batches of `ROWS`, which together have every sample about equally often."""
    return lambda dataset: np.arange(batches * ROWS) * 7 % len(dataset)


def check(batch: Any) -> None:
    """Check that each row is full of its number."""
    assert torch.equal(batch["x"], batch["number"][:, None].float().expand(-1, batch["x"].shape[1]))


@pytest.mark.parametrize("options", [{}, {"with_keys": True}], ids=shown)
def test_fields_of_one_shape_are_tensors_and_others_lists_all_exact(
    kinds: cs.Cache, options: dict[str, Any]
) -> None:
    seen: list[int] = []
    with cs.EpochLoader(kinds, 4, **options) as loader:
        for batch in loader:
            assert set(batch) == {*various(0), *(["__key__"] if options else [])}
            for name, (dtype, shape) in TENSORS.items():
                assert (batch[name].dtype, batch[name].shape) == (dtype, (4, *shape)), name
                assert batch[name].is_contiguous()
                assert not batch[name].requires_grad
            for name in ("tokens", "text", "data"):
                assert isinstance(batch[name], list)
            for row, number in enumerate(batch["number"].tolist()):
                for name, value in various(number).items():
                    got = batch[name][row]
                    if isinstance(value, str | bytes):
                        assert got == value
                    else:
                        assert np.array_equal(got.numpy(), np.asarray(value)), name
            if options:
                assert batch["__key__"] == [str(n) for n in batch["number"].tolist()]
            seen += batch["number"].tolist()
    assert sorted(seen) == list(range(NUM_VARIOUS))


@pytest.mark.parametrize(
    "options",
    [{}, {"with_keys": True}, {"batch_transform": lambda batch: batch}],
    ids=["plain", "keys", "transform"],
)
def test_batches_that_are_held_or_changed_share_no_memory_with_others(
    cache: cs.Cache, options: dict[str, Any]
) -> None:
    held, rows = [], []
    with cs.EpochLoader(cache, 20, prefetch=2, **options) as loader:
        for _ in range(3):
            for step, batch in enumerate(loader):
                check(batch)
                match step % 3:
                    case 0:
                        held.append(batch)
                    case 1:
                        rows.append(
                            (int(batch["number"][7]), batch["x"][7])
                        )  # a row holds its batch's memory
                    case 2:
                        batch["x"].fill_(-1.0)
    for batch in held:
        check(batch)
    for number, row in rows:
        assert torch.equal(row, torch.full((1024,), float(number)))
    places = [(t.data_ptr(), t.numel() * t.itemsize) for batch in held for t in (batch["x"], batch["number"])]
    places.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))


def test_batches_of_a_dataset_share_no_memory_either(cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:
        held = [dataset[start : start + 20] for start in range(0, NUM_SAMPLES, 20)]
        dataset[5]["x"].fill_(-1.0)
        for _ in range(3):
            dataset[:]["x"].fill_(-1.0)
        for batch in held:
            check(batch)
        check(dataset[:])


def test_memory_is_used_again_whatever_the_number_of_fields(tmp_path: Path) -> None:
    """Nine fields of nine sizes, each too large for the heap of malloc."""
    rows, source = 4000, [{f"f{i}": np.full(1024 + 16 * i, n, np.uint8) for i in range(9)} for n in range(8)]
    with (
        cs.Cache(tmp_path / "c", "4MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1) as worker,
    ):
        worker.wait(timeout_s=120)
        sampler: Any = lambda dataset: np.arange(16 * rows) * 7 % len(dataset)  # noqa: E731
        with cs.EpochLoader(cache, rows, sampler=sampler, prefetch=1, min_samples=1) as loader:
            batches = iter(loader)
            for _ in range(6):
                next(batches)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            assert sum(1 for _ in batches) == 10
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 10 * 9 * rows * 1024 / 4096 / 4


@pytest.mark.parametrize("options", [{}, {"with_keys": True}], ids=["plain", "keys"])
def test_memory_of_batches_that_are_gone_is_used_again(cache: cs.Cache, options: dict[str, Any]) -> None:
    """A fresh buffer is a fault for each of its pages, of 4 KiB as rows are."""
    with cs.EpochLoader(cache, ROWS, sampler=repeated(16), prefetch=1, min_samples=1, **options) as loader:
        batches = iter(loader)
        for _ in range(6):
            check(next(batches))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        steps = sum(1 for _ in batches)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert steps == 10
    assert faults < steps * ROWS / 4


@contextmanager
def counting() -> Iterator[Callable[[], int]]:
    """A thread of Python's that counts, and gives up the interpreter after each number; the number so far."""
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0)  # some 60 µs, so that whoever waits for the interpreter gets it

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody is made to give it up
    thread.start()
    try:
        yield lambda: turns
    finally:
        over.set()
        sys.setswitchinterval(interval)
        thread.join()


def wait_for_turns(turns: Callable[[], int], move: Callable[[], object]) -> None:
    """Repeat `move`, of tens of milliseconds, until another thread had `MANY` turns meanwhile."""
    deadline, most = time.monotonic() + 60, 0
    while most < MANY:
        assert time.monotonic() < deadline, (
            f"another thread had {most} turns at most while samples were moved"
        )
        before = turns()
        move()
        most = max(most, turns() - before)


def test_the_interpreter_is_free_while_a_dataset_moves_samples(cache: cs.Cache) -> None:
    indices = np.arange(3 * ROWS) % NUM_SAMPLES
    with cache.snapshot() as dataset, counting() as turns:
        dataset[:]
        wait_for_turns(turns, lambda: dataset[indices])


@pytest.mark.parametrize("options", [{}, {"with_keys": True}], ids=["plain", "keys"])
def test_the_interpreter_is_free_while_a_loader_moves_batches(
    cache: cs.Cache, options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"sampler": repeated(12), "prefetch": 1, "min_samples": 1, **options}
    with cs.EpochLoader(cache, ROWS, **given) as loader, counting() as turns:
        batches = (batch for _ in range(1000) for batch in loader)
        next(batches)
        wait_for_turns(turns, lambda: next(batches))


# What bytes that are no pickle raise: any of their first few may be an instruction of one.
NO_PICKLE: Final = (
    *(pickle.UnpicklingError, EOFError, ValueError, LookupError, MemoryError, ArithmeticError),
    *(AttributeError, ImportError, TypeError),
)


def test_a_cache_holds_safetensors_that_anyone_can_open_and_no_pickle(varied: Path) -> None:
    keys: list[str] = []
    for path in (varied / "shards").rglob("*.safetensors"):
        columns = load_file(path)
        assert all(array.dtype != object for array in columns.values())
        number = columns["number"]
        assert np.array_equal(columns["x"], np.repeat(number[:, None], 4, 1).astype(np.float32))
        assert columns["image"].dtype == np.uint8
        keys += [str(n) for n in number]
    assert sorted(map(int, keys)) == list(range(NUM_VARIOUS))
    for path in varied.rglob("*"):
        if path.is_file():
            with pytest.raises(NO_PICKLE):
                pickle.loads(path.read_bytes())


def test_a_value_that_only_pickle_could_hold_is_no_sample(tmp_path: Path) -> None:
    source = [{"x": 1.0}, {"x": 2.0, "odd": {1, 2}}, {"x": 3.0}]
    with (
        cs.Cache(tmp_path / "c", "4MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1) as worker,
    ):
        worker.wait(timeout_s=120)
        status = cache.status()
        assert (status.num_samples, status.skipped) == (2, 1)
        assert status.failures[0].reason.startswith("field 'odd' is a set: store arrays, tensors, numbers")
