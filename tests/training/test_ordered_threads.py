"""OrderedThreads: results in order, none missing, and errors after the results before them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.training.batch_producer import OrderedThreads


@given(st.integers(1, 4), st.integers(0, 40), st.integers(0, 60))
def test_all_that_is_wanted_is_delivered_in_order(hands: int, tickets: int, wanted: int) -> None:
    delivered: list[int] = []

    def deliver(result: int) -> bool:
        if len(delivered) == wanted:
            return False
        delivered.append(result)
        return True

    def double(ticket: int) -> int:
        return 2 * ticket

    completed = OrderedThreads(hands, double, deliver).run(iter(range(tickets)))
    assert delivered == [2 * i for i in range(min(tickets, wanted))]
    assert completed == (tickets <= wanted)


@pytest.mark.parametrize("where", ["drawing", "working", "delivering"])
@pytest.mark.parametrize("hands", [1, 2, 4])
def test_an_error_is_raised_when_all_before_it_is_delivered(where: str, hands: int) -> None:
    delivered: list[int] = []

    def fail(place: str, number: int) -> None:
        if place == where and number == 7:
            raise ValueError(where)

    def tickets() -> Iterator[int]:
        for i in range(20):
            fail("drawing", i)
            yield i

    def work(ticket: int) -> int:
        fail("working", ticket)
        return ticket

    def deliver(result: int) -> bool:
        fail("delivering", result)
        delivered.append(result)
        return True

    with pytest.raises(ValueError, match=where):
        OrderedThreads(hands, work, deliver).run(tickets())
    assert delivered == list(range(7))


def test_threads_work_at_once_and_settling_waits_for_all_of_them() -> None:
    together, busy, most = threading.Barrier(2, timeout=60), 0, 0
    lock = threading.Lock()

    def work(ticket: int) -> int:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        together.wait()  # neither goes on alone
        with lock:
            busy -= 1
        return ticket

    def tickets() -> Iterator[int]:
        for i in range(8):
            if i % 4 == 0:
                workers.settle()
                assert busy == 0
            yield i

    workers = OrderedThreads(2, work, lambda _: True)
    assert workers.run(tickets())
    assert most == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cachestream-gather")]


class Ticket:
    """Stands for the maps of a batch."""


@pytest.mark.parametrize("where", ["drawing", "working", "delivering"])
@pytest.mark.parametrize("hands", [1, 2])
def test_an_error_that_is_over_keeps_nothing(where: str, hands: int) -> None:
    """A loader that is dropped in mid-epoch must not keep shards mapped until a garbage collection."""
    made: list[weakref.ref[Ticket]] = []

    def fail(place: str) -> None:
        if place == where and len(made) > 2:
            raise ValueError(where)

    def tickets() -> Iterator[Ticket]:
        while True:
            ticket = Ticket()
            made.append(weakref.ref(ticket))
            fail("drawing")
            yield ticket

    def work(ticket: Ticket) -> Ticket:
        fail("working")
        return ticket

    def deliver(_: Ticket) -> bool:
        fail("delivering")
        return True

    def run() -> None:
        with pytest.raises(ValueError, match=where):
            OrderedThreads(hands, work, deliver).run(tickets())

    gc.disable()
    try:
        run()
        assert [ref() for ref in made if ref() is not None] == []
    finally:
        gc.enable()
