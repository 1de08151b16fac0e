"""Several units in flight, delivered in order, within bounds. Every interleaving is staged with Events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.worker.sampling.encode import SampleChunk
from cachestream.worker.sampling.fetcher import Delivery, Fetcher
from cachestream.worker.sampling.unit import Stall, Unit, UnitRead
from tests.worker.support import wait_until

DEADLINE_S = 120.0


def unit_read(position: int) -> UnitRead:
    return UnitRead(Unit(position, position, 0))


class Remote:
    """A source under the test's control: each unit yields when the test lets it, and says that it began."""

    def __init__(self) -> None:
        self.begun: dict[int, threading.Event] = {}
        self.given: dict[int, list[SampleChunk | float | BaseException | None]] = {}
        self.put: list[tuple[int, int]] = []  # (unit, chunks put so far): after each chunk the fetcher took
        self._changed = threading.Condition()

    def of(self, *units: int) -> list[UnitRead]:
        for unit in units:
            self.begun[unit], self.given[unit] = threading.Event(), []
        return [unit_read(unit) for unit in units]

    def give(self, unit: int, *chunks: SampleChunk | float | BaseException | None) -> None:
        """Let `unit` yield chunks and pauses, raise an error, or end (None)."""
        with self._changed:
            self.given[unit] += chunks
            self._changed.notify_all()

    def wait_until_taken(self, unit: int, count: int) -> None:
        """Wait until the fetcher has room for `count` chunks of `unit` and has come back for more."""
        with self._changed:
            assert self._changed.wait_for(lambda: (unit, count) in self.put, DEADLINE_S)

    def read(self, unit_read: UnitRead, number: int) -> Iterator[SampleChunk | float]:
        unit, taken = unit_read.unit.number, 0
        self.begun[unit].set()
        while True:
            with self._changed:
                self.put.append((unit, taken))
                self._changed.notify_all()
                while len(self.given[unit]) <= taken:
                    assert self._changed.wait(DEADLINE_S)
                given = self.given[unit][taken]
            if given is None:
                return
            if isinstance(given, BaseException):
                raise given
            yield given
            taken += 1


def chunk(offset: int, nbytes: int = 1) -> SampleChunk:
    return SampleChunk([offset], [f"key {offset}"], [offset], nbytes)


@contextmanager
def fetching(
    read: Callable[[UnitRead, int], Iterator[SampleChunk | float]],
    threads: int = 2,
    max_bytes: int = 100,
    patience_s: float = DEADLINE_S,
    *,
    may_read_here: bool = False,
) -> Iterator[Fetcher]:
    before = set(threading.enumerate())
    fetcher = Fetcher(read, threads, max_bytes, lambda _: None, patience_s, may_read_here=may_read_here)
    try:
        yield fetcher
    finally:
        fetcher.stop()
        for thread in set(threading.enumerate()) - before:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def drain(fetcher: Fetcher) -> list[tuple[int, list[int], BaseException | None]]:
    """All that comes: (position, offsets, error) of each unit, in the order of delivery."""
    found = []
    while len(fetcher):
        found.append(drain_one(fetcher))
    return found


def next_of(fetcher: Fetcher) -> Delivery:
    """The next delivery, waited for as a sampling process does."""
    found: list[Delivery] = []

    def has_come() -> bool:
        found.extend(filter(None, [fetcher.next(0.25)]))
        return bool(found)

    wait_until(has_come, "something comes")
    return found[0]


def drain_one(fetcher: Fetcher) -> tuple[int, list[int], BaseException | None]:
    """The unit that comes next, whole."""
    offsets: list[int] = []
    while True:
        delivery = next_of(fetcher)
        offsets += [offset for chunk in delivery.chunks for offset in chunk.offsets]
        if delivery.finished:
            return delivery.unit_read.unit.position, offsets, delivery.unit_read.error


def test_units_are_delivered_in_the_order_they_were_submitted_whoever_is_done_first() -> None:
    remote = Remote()
    with fetching(remote.read) as fetcher:
        fetcher.submit(remote.of(0, 1))
        remote.give(1, chunk(0), None)
        assert remote.begun[0].wait(DEADLINE_S)
        remote.wait_until_taken(1, 1)
        assert fetcher.next(0.0) is None, "unit 1 is done, but unit 0 comes first"
        remote.give(0, chunk(0), chunk(1), None)
        assert drain(fetcher) == [(0, [0, 1], None), (1, [0], None)]


def test_samples_of_the_next_unit_come_before_it_is_done() -> None:
    remote = Remote()
    with fetching(remote.read) as fetcher:
        fetcher.submit(remote.of(0))
        remote.give(0, chunk(0))
        delivery = fetcher.next(DEADLINE_S)
        assert delivery is not None
        assert [offset for chunk in delivery.chunks for offset in chunk.offsets] == [0]
        assert not delivery.finished
        remote.give(0, None)
        last = fetcher.next(DEADLINE_S)
        assert last is not None
        assert (last.chunks, last.finished) == ([], True)


def test_an_error_comes_with_its_own_unit_after_the_samples_before_it() -> None:
    remote, error = Remote(), ValueError("torn")
    with fetching(remote.read) as fetcher:
        fetcher.submit(remote.of(0, 1, 2))
        remote.give(1, chunk(0), error)
        remote.give(0, chunk(0), None)
        remote.give(2, None)
        assert drain(fetcher) == [(0, [0], None), (1, [0], error), (2, [], None)]


def test_a_silent_unit_lets_others_go_first_and_comes_as_soon_as_there_is_something_of_it() -> None:
    remote = Remote()
    with fetching(remote.read, patience_s=0.05) as fetcher:
        first, second, third = remote.of(0, 1, 2)
        fetcher.submit([first, second, third])
        first.stall = Stall(0.0, "gone")
        assert remote.begun[1].wait(DEADLINE_S)
        assert fetcher.stalls() == ([first.stall], False), "another one is read"
        remote.give(1, chunk(0), None)
        assert drain_one(fetcher) == (1, [0], None)
        remote.give(0, chunk(0))
        delivery = fetcher.next(DEADLINE_S)
        assert delivery is not None
        assert delivery.unit_read is first
        remote.give(2, chunk(0), None)
        remote.give(0, None)
        assert sorted(drain(fetcher)) == [(0, [], None), (2, [0], None)]


def test_a_unit_that_is_not_silent_yet_keeps_its_place() -> None:
    remote = Remote()
    with fetching(remote.read, patience_s=2.0) as fetcher:
        first, second = remote.of(0, 1)
        fetcher.submit([first, second])
        remote.give(1, chunk(0), None)
        remote.wait_until_taken(1, 1)
        assert fetcher.next(0.1) is None
        assert fetcher.awaited is first
        assert drain_one(fetcher) == (1, [0], None), "once its patience is over"
        remote.give(0, None)
        assert drain(fetcher) == [(0, [], None)]


def test_a_silent_unit_keeps_its_thread_and_another_takes_its_place() -> None:
    remote = Remote()
    with fetching(remote.read, threads=1, patience_s=0.05) as fetcher:
        fetcher.submit(remote.of(0, 1, 2))
        assert remote.begun[0].wait(DEADLINE_S)
        wait_until(lambda: fetcher.next(0.05) or remote.begun[1].is_set(), "the next one is read")
        assert fetcher.reading <= 1, "the silent one is not counted"
        remote.give(1, None)
        assert drain_one(fetcher) == (1, [], None)
        wait_until(lambda: fetcher.next(0.05) or remote.begun[2].is_set(), "and the one after it")
        remote.give(0, 0.01, chunk(7), None)
        remote.give(2, None)
        assert sorted(drain(fetcher)) == [(0, [7], None), (2, [], None)]


def test_all_that_are_silent_are_told_with_their_stalls() -> None:
    remote = Remote()
    with fetching(remote.read, patience_s=0.05) as fetcher:
        units = remote.of(0, 1)
        fetcher.submit(units)
        for unit in (0, 1):
            assert remote.begun[unit].wait(DEADLINE_S)
        for one in units:
            one.stall = Stall(0.0, f"{one.unit.number} is gone")
        assert fetcher.stalls() == ([one.stall for one in units], True)
        remote.give(1, chunk(0))
        remote.wait_until_taken(1, 1)
        assert fetcher.stalls() == ([units[0].stall], False)
        for unit in (0, 1):
            remote.give(unit, None)
        assert len(drain(fetcher)) == 2


def test_the_memory_of_units_behind_a_silent_one_is_bounded_and_they_go_on_when_they_are_next() -> None:
    remote = Remote()
    with fetching(remote.read, max_bytes=10, patience_s=0.05) as fetcher:
        fetcher.submit(remote.of(0, 1))
        remote.give(1, *[chunk(offset, 6) for offset in range(9)], None)
        assert drain_one(fetcher) == (1, list(range(9)), None)
        remote.give(0, chunk(0, 50), None)
        assert drain(fetcher) == [(0, [0], None)]


def test_waking_ends_a_wait_from_another_thread() -> None:
    with fetching(Remote().read) as fetcher:
        timer = threading.Timer(0.05, fetcher.wake)
        timer.start()
        assert fetcher.next(DEADLINE_S) is None
        timer.join()


def test_stopping_ends_every_pause() -> None:
    remote = Remote()
    with fetching(remote.read) as fetcher:
        fetcher.submit(remote.of(0, 1))
        for unit in (0, 1):
            remote.give(unit, 36_000.0)
            assert remote.begun[unit].wait(DEADLINE_S)
    # `fetching` has seen all threads end.


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), MemoryError()])
def test_whatever_a_source_raises_ends_its_unit_and_no_thread(error: BaseException) -> None:
    remote = Remote()
    with fetching(remote.read, threads=1) as fetcher:
        fetcher.submit(remote.of(0, 1))
        remote.give(0, error)
        remote.give(1, chunk(0), None)
        assert drain(fetcher) == [(0, [], error), (1, [0], None)]


def test_later_units_wait_at_the_bound_and_go_on_when_they_are_next() -> None:
    remote = Remote()
    with fetching(remote.read, max_bytes=10) as fetcher:
        fetcher.submit(remote.of(0, 1))
        remote.give(1, chunk(0, 6), chunk(1, 6), chunk(2, 6), None)
        remote.wait_until_taken(1, 2)
        assert (1, 3) not in remote.put, "12 bytes of 10 wait: no more"
        remote.give(0, chunk(0, 1), None)
        assert drain(fetcher) == [(0, [0], None), (1, [0, 1, 2], None)]


def test_the_next_unit_goes_on_although_later_ones_have_filled_the_memory() -> None:
    remote = Remote()
    with fetching(remote.read, max_bytes=10) as fetcher:
        fetcher.submit(remote.of(0, 1))
        remote.give(1, chunk(0, 50))
        remote.wait_until_taken(1, 1)
        remote.give(0, chunk(0, 5), chunk(1, 5), None)
        remote.wait_until_taken(0, 2)
        remote.give(1, None)
        assert drain(fetcher) == [(0, [0, 1], None), (1, [0], None)]


def test_the_next_unit_has_a_bound_too_while_nobody_takes_its_samples() -> None:
    """A tar of any size, while the packing waits for space."""
    remote = Remote()
    with fetching(remote.read, max_bytes=10) as fetcher:
        fetcher.submit(remote.of(0))
        remote.give(0, *[chunk(offset, 4) for offset in range(9)], None)
        remote.wait_until_taken(0, 3)
        assert (0, 4) not in remote.put
        assert drain(fetcher) == [(0, list(range(9)), None)]


def test_only_as_many_threads_as_are_in_use_begin_units() -> None:
    remote = Remote()
    with fetching(remote.read, threads=3) as fetcher:
        fetcher.use(1)
        fetcher.submit(remote.of(0, 1, 2))
        assert remote.begun[0].wait(DEADLINE_S)
        assert not remote.begun[1].is_set()
        fetcher.use(2)
        assert remote.begun[1].wait(DEADLINE_S)
        assert not remote.begun[2].is_set()
        for unit in range(3):
            remote.give(unit, None)
        assert len(drain(fetcher)) == 3


def test_waiting_ends_at_its_deadline_with_nothing() -> None:
    with fetching(Remote().read) as fetcher:
        assert fetcher.next(0.01) is None


def test_stopping_frees_the_threads_that_wait_at_the_bound() -> None:
    remote = Remote()
    with fetching(remote.read, max_bytes=1) as fetcher:
        fetcher.submit(remote.of(0, 1))
        remote.give(1, chunk(0, 5), chunk(1, 5))
        remote.wait_until_taken(1, 1)
        remote.give(0, chunk(0, 5), chunk(1, 5))
        remote.wait_until_taken(0, 1)
    # `fetching` has seen all threads end.


@pytest.mark.e2e
@given(
    st.lists(st.lists(st.integers(1, 40), max_size=6), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 60),
    st.integers(1, 5),
)
def test_everything_comes_once_and_in_order_whatever_the_sizes(
    units: list[list[int]], threads: int, max_bytes: int, group: int
) -> None:
    def read(unit_read: UnitRead, number: int) -> Iterator[SampleChunk]:
        for offset, nbytes in enumerate(units[unit_read.unit.number]):
            yield chunk(offset, nbytes)

    with fetching(read, threads, max_bytes) as fetcher:
        for start in range(0, len(units), group):
            fetcher.submit([unit_read(unit) for unit in range(len(units))[start : start + group]])
        found = drain(fetcher)
    assert found == [(i, list(range(len(sizes))), None) for i, sizes in enumerate(units)]


def test_the_caller_reads_one_unit_at_a_time_from_a_disk_and_threads_read_several() -> None:
    readers: dict[int, threading.Thread] = {}

    def read(unit_read: UnitRead, _number: int) -> Iterator[SampleChunk | float]:
        readers[unit_read.unit.number] = threading.current_thread()
        yield chunk(0)
        yield 0.0  # a pause
        yield chunk(1)
        if unit_read.unit.number == 1:
            raise OSError("unreadable")

    with fetching(read, 1, may_read_here=True) as fetcher:
        fetcher.submit([unit_read(0), unit_read(1)])
        first, second = drain_one(fetcher), drain_one(fetcher)
        assert first == (0, [0, 1], None)
        assert second[:2] == (1, [0, 1]), "what came before the error is delivered"
        assert isinstance(second[2], OSError)
        assert {readers[0], readers[1]} == {threading.current_thread()}
        fetcher.use(2)
        fetcher.submit([unit_read(2), unit_read(3)])
        assert [position for position, *_ in drain(fetcher)] == [2, 3]
        assert threading.current_thread() not in (readers[2], readers[3])
        fetcher.use(1)
        fetcher.submit([unit_read(4)])
        assert [position for position, *_ in drain(fetcher)] == [4]
        assert readers[4] is threading.current_thread()


def test_a_unit_that_the_caller_reads_comes_piece_by_piece_and_ends_with_a_stop() -> None:
    goes_on = threading.Event()

    def read(_unit_read: UnitRead, _number: int) -> Iterator[SampleChunk | float]:
        yield from map(chunk, range(5))
        goes_on.set()
        yield DEADLINE_S  # a pause, which the stop ends

    with fetching(read, 1, max_bytes=1, may_read_here=True) as fetcher:
        fetcher.submit([unit_read(0)])
        delivery = next_of(fetcher)
        assert 0 < len(delivery.chunks) < 5, "the caller heeds its messages between"
        assert not delivery.finished
        fetcher.stop()
        while not goes_on.is_set():
            next_of(fetcher)
        assert next_of(fetcher).finished
