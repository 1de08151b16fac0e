"""The places of the samples of batches, worked out ahead: the plan's, block by block, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.permutation import Permutation
from cachestream.schema import IntArray, Schema, Snapshot
from cachestream.training.batches.mapped_shards import EpochMaps, LocationsAhead, find_locations
from cachestream.training.plan import Plan, SampleOrder, ShuffledOrder, count_batches
from cachestream.training.rendezvous import Cancelled
from tests.training.plans import batch_positions

DEADLINE_S = 60.0


def maps_of(counts: list[int]) -> EpochMaps:
    ids = np.arange(1, len(counts) + 1, dtype=np.int64)
    return EpochMaps(Snapshot("id", "/", "/", Schema(()), ids, np.array(counts, np.int64)))


def plan_of(samples: int, batch_size: int, ranks: int) -> tuple[SampleOrder, Plan]:
    order = ShuffledOrder(samples, Permutation(samples, 1))
    return order, Plan(samples, batch_size, ranks, count_batches(samples, batch_size, ranks, drop_last=False))


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    batch_size=st.integers(1, 40),
    ranks=st.integers(1, 3),
    data=st.data(),
)
def test_places_are_those_of_the_samples_that_the_plan_gives_each_batch(
    counts: list[int], batch_size: int, ranks: int, data: st.DataObject
) -> None:
    maps = maps_of(counts)
    order, plan = plan_of(sum(counts), batch_size, ranks)
    if not plan.num_batches:
        return
    rank = data.draw(st.integers(0, ranks - 1))
    first = data.draw(st.integers(0, plan.num_batches - 1))
    stop = data.draw(st.integers(first + 1, plan.num_batches))
    places = find_locations(order, plan, rank, maps, first, stop)
    assert len(places) == stop - first
    for number in range(first, stop):
        part = places.part(number - first, number - first + 1)
        assert part.first == number
        assert part.bounds.tolist() == [0, len(part.rows)]
        samples = maps.starts[part.shards] + part.rows
        assert samples.tolist() == order.at(batch_positions(plan, rank, number)).tolist()
        assert (part.rows >= 0).all()
        assert (part.rows < np.array(counts)[part.shards]).all()


@pytest.mark.parametrize("batch_size", [1, 100, 70_000])
def test_all_batches_come_once_and_in_order_in_blocks_of_bounded_size(batch_size: int) -> None:
    order, plan = plan_of(300_000, batch_size, 1)
    with ThreadPoolExecutor(1) as executor:
        blocks = list(LocationsAhead(order, plan, 0, maps_of([1000] * 300), executor))
    assert [block.first for block in blocks] == np.cumsum([0] + [len(b) for b in blocks])[:-1].tolist()
    assert sum(len(block) for block in blocks) == plan.num_batches
    assert all(len(block.rows) <= max(65_536, batch_size) for block in blocks)


class Watched:
    """An order that tells when it is asked."""

    def __init__(self, order: SampleOrder, asked: threading.Semaphore) -> None:
        self.size = order.size
        self._order = order
        self._asked = asked

    def at(self, positions: IntArray) -> IntArray:
        self._asked.release()
        return self._order.at(positions)


def test_the_next_block_is_worked_out_while_one_is_used() -> None:
    order, plan = plan_of(100_000, 100, 1)
    asked = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as executor:
        ahead = LocationsAhead(Watched(order, asked), plan, 0, maps_of([1000] * 100), executor)
        assert asked.acquire(timeout=DEADLINE_S), "the first, before anyone wants it"
        next(iter(ahead))
        assert asked.acquire(timeout=DEADLINE_S), "the second, before anyone wants it"
    assert not asked.acquire(blocking=False), "the executor has ended: there was no third"


class Hurried(Future[Any]):
    """The result of a computation during which the process is stopped: it comes after every deadline."""

    def result(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            raise TimeoutError
        return super().result()


class Stopped(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future = Hurried()
        future.set_result(fn(*args, **options))
        return future


def test_a_process_that_was_stopped_for_long_goes_on() -> None:
    order, plan = plan_of(100_000, 100, 1)
    ahead = LocationsAhead(order, plan, 0, maps_of([1000] * 100), Stopped())
    assert sum(map(len, ahead)) == plan.num_batches


def test_when_its_thread_is_ended_there_is_nothing_more() -> None:
    order, plan = plan_of(100_000, 100, 1)
    executor = ThreadPoolExecutor(1)
    blocks = iter(LocationsAhead(order, plan, 0, maps_of([1000] * 100), executor))
    executor.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(Cancelled):
        list(blocks)
