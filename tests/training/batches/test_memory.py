"""Memory on loan: never two live tensors on one buffer, and buffers that come back when the last one dies."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from cachestream.training.batches.memory import BufferPool, PinnedMemory

SIZE = 1 << 20


def lend_tensor(pool: BufferPool, value: int) -> torch.Tensor:
    tensor = torch.from_numpy(pool.lend(SIZE).array)
    tensor.fill_(value)
    return tensor


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[10:20],
    "a view of another dtype": lambda tensor: tensor.view(torch.float32),
    "a row of a reshaped view": lambda tensor: tensor.view(4, -1)[2],
    "an array": lambda tensor: tensor.numpy(),
    "a slice of an array": lambda tensor: tensor.numpy()[5:],
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a detached alias": lambda tensor: tensor.detach(),
    "a dlpack capsule": lambda tensor: tensor.__dlpack__(),
    "parts of a split": lambda tensor: torch.tensor_split(tensor, 8)[3],
}


@pytest.mark.e2e
def test_a_buffer_stays_on_loan_as_long_as_anything_refers_to_its_memory() -> None:
    pools = {view: BufferPool(keep=2) for view in VIEWS}
    addresses, kept, others = {}, {}, {}
    for view, pool in pools.items():
        tensor = lend_tensor(pool, 1)
        addresses[view], kept[view] = tensor.data_ptr(), VIEWS[view](tensor)
        del tensor
        others[view] = lend_tensor(pool, 2)
        assert others[view].data_ptr() != addresses[view], view
    kept.clear()
    gc.collect()
    assert {view: lend_tensor(pool, 3).data_ptr() for view, pool in pools.items()} == addresses


def test_held_batches_keep_their_values_while_others_come_and_go() -> None:
    pool = BufferPool(keep=3)
    held: dict[int, torch.Tensor] = {}
    for number in range(200):
        held[number % 7] = lend_tensor(pool, number % 251)
        if number % 3 == 0:
            held.pop(number % 5, None)
        for place, tensor in held.items():
            last = max(n for n in range(number + 1) if n % 7 == place)
            assert int(tensor[0]) == int(tensor[-1]) == last % 251


def test_a_pool_keeps_no_more_free_buffers_than_it_was_told() -> None:
    pool = BufferPool(keep=2)
    loans = [pool.lend(SIZE) for _ in range(6)]
    del loans
    assert repr(pool) == f"<BufferPool {2 * SIZE} bytes free>"


def test_loans_that_end_in_other_threads_come_back_too() -> None:
    pool = BufferPool(keep=16)
    failures: list[str] = []

    def use(value: int) -> None:
        for _ in range(300):
            tensor = lend_tensor(pool, value)
            if not bool((tensor[::4096] == value).all()):
                failures.append("another thread wrote into a live tensor")

    threads = [threading.Thread(target=use, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert 1 <= len(pool._free[SIZE]) <= 8  # each thread holds a tensor while it asks for the next


def test_small_memory_is_fresh_and_exact() -> None:
    loan = BufferPool(keep=2).lend(100)
    assert loan.array.shape == (100,)
    assert loan.array.dtype == np.uint8


def test_memory_of_many_sizes_is_not_kept_for_ever() -> None:
    pool = BufferPool(keep=2)
    for size in range(SIZE, SIZE + 300):
        pool.lend(size)
    assert len(pool._free) <= 64


def test_memory_in_a_cycle_of_garbage_is_not_lent_before_it_has_gone() -> None:
    pool = BufferPool(keep=2)
    cycle: list[object] = [lend_tensor(pool, 1)]
    cycle.append(cycle)
    other = lend_tensor(pool, 2)
    del cycle
    gc.collect()
    again = lend_tensor(pool, 3)
    assert bool((other == 2).all())
    assert bool((again == 3).all())


def test_memory_outlives_the_pool_it_is_of() -> None:
    pool = BufferPool(keep=2)
    tensor = lend_tensor(pool, 7)
    del pool
    gc.collect()
    others = [torch.full((SIZE,), 9, dtype=torch.uint8) for _ in range(8)]
    assert bool((tensor == 7).all())
    assert len(others) == 8


def test_a_signal_at_any_line_of_a_loan_costs_no_later_one() -> None:
    pool = BufferPool(keep=2)
    lines = left = 0

    def interrupt(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left, lines
        if frame.f_code is not BufferPool.lend.__code__:
            return None
        if event == "line":
            lines, left = lines + 1, left - 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupt

    for number in range(1, 40):
        left = number
        sys.settrace(interrupt)
        with suppress(KeyboardInterrupt):
            pool.lend(SIZE)
        sys.settrace(None)
        tensors = [lend_tensor(pool, value) for value in (1, 2, 3)]
        assert [int(tensor[0]) for tensor in tensors] == [1, 2, 3]
        del tensors
    assert lines > 40


class Buffer:
    """Stands for a buffer of pinned memory."""


def test_pinned_memory_stays_below_its_limit_as_torch_keeps_it() -> None:
    pins = PinnedMemory(10 * 1024)
    new: Any = Buffer
    held = [new() for _ in range(4)]
    assert [pins.admits(buffer, 3000) for buffer in held] == [True, True, False, False]  # of 4096 bytes each
    assert pins.admits(new(), 1025)  # exactly what is left
    assert not pins.admits(new(), 1)
    held.clear()
    other = new()
    assert not pins.admits(other, 5000)  # torch keeps the two for others of their size
    assert pins.admits(other, 4096)
    assert PinnedMemory(None).admits(other, 1 << 40)
    assert not PinnedMemory(0).admits(other, 1)
