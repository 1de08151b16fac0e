"""`in_order`: results in order, none missing, and errors that keep nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.training.batch_producer import in_order


@given(st.integers(1, 4), st.integers(0, 40), st.integers(0, 60))
def test_all_that_is_wanted_comes_in_order(threads: int, items: int, wanted: int) -> None:
    results = islice(in_order(threads, lambda item: 2 * item, iter(range(items))), wanted)
    assert list(results) == [2 * i for i in range(min(items, wanted))]


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_an_error_is_raised_when_all_before_it_has_come(num_threads: int) -> None:
    delivered: list[int] = []

    def work(item: int) -> int:
        if item == 7:
            raise ValueError("working")
        return item

    with pytest.raises(ValueError, match="working"):
        delivered.extend(in_order(num_threads, work, iter(range(20))))
    assert delivered == list(range(7))


def test_threads_work_at_once_and_end() -> None:
    together = threading.Barrier(2, timeout=60)
    assert len(list(in_order(2, lambda _: together.wait(), iter(range(8))))) == 8  # neither goes on alone
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cachestream-gather")]


class Item:
    """Stands for the maps of a batch."""


@pytest.mark.parametrize("where", ["drawing", "working", "delivering"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_an_error_that_is_over_keeps_nothing(where: str, num_threads: int) -> None:
    """A loader that is dropped in mid-epoch must not keep shards mapped until a garbage collection."""
    made: list[weakref.ref[Item]] = []

    def fail(place: str) -> None:
        if place == where and len(made) > 2:
            raise ValueError(where)

    def items() -> Iterator[Item]:
        while True:
            item = Item()
            made.append(weakref.ref(item))
            fail("drawing")
            yield item

    def work(item: Item) -> Item:
        fail("working")
        return item

    def deliver() -> None:
        for _ in in_order(num_threads, work, items()):
            fail("delivering")

    def run() -> None:
        with pytest.raises(ValueError, match=where):
            deliver()

    gc.disable()
    try:
        run()
        assert [ref() for ref in made if ref() is not None] == []
    finally:
        gc.enable()
