"""The number of units read at once: as many as pay, fewer if they only get in each other's way."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cachestream.storage.telemetry import Board
from cachestream.worker.sampling.fetcher import REST_TURNS, Concurrency, ReadTuner


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1), st.floats(0, 16)), max_size=60),
)
def test_the_number_of_reads_stays_within_its_bounds_whatever_is_measured(
    most: int, turns: list[tuple[float, float, float]]
) -> None:
    state = Concurrency(min(4, most), min(4, most))
    for rate, waiting, busy in turns:
        state = state.next(rate, waiting, most, busy=busy)
        assert 1 <= state.active <= most


def test_reads_double_while_that_pays_and_go_back_when_it_does_not() -> None:
    state = Concurrency(4, 4)
    for _ in range(10):
        state = state.next(100.0 * state.active, 1.0, 64)  # latency-bound: each read brings as much
    assert state.active == 64
    state = Concurrency(4, 4)
    for _ in range(3):
        state = state.next(100.0, 1.0, 64)  # bound by something else
    assert state.active == 4


def test_small_units_get_more_reads_as_soon_as_they_come_and_large_ones_have_to_pay() -> None:
    state = Concurrency(1, 1)
    for active in (2, 4, 4):
        state = state.came(64)
        assert state.active == active
    assert Concurrency(1, 1).came(1).active == 1
    assert Concurrency(2, 2).came(3).active == 3
    state = Concurrency(1, 1)
    for active in (1, 2, 1):  # a slow network: two share it
        state = state.next(100.0, 1.0, 64)
        assert state.active == active
    assert state.came(64).active == 1
    assert Concurrency(2, 1, 100.0).came(64).active == 2, "a trial is not disturbed"


class Reads:
    """The part of a Fetcher that is tuned."""

    reading, active = 1, 0

    def use(self, threads: int) -> None:
        self.active = threads


def test_the_first_units_let_more_be_read_unless_trials_alone_decide(tmp_path: Path) -> None:
    board = Board(str(tmp_path / "board"))
    board.reset(os.getpid(), 1, 0.0)
    for only_trials, expected in ((False, 4), (True, 1)):
        reads = Reads()
        tuner = ReadTuner(reads, board.slot(0), 64, only_trials=only_trials)
        for _ in range(3):
            tuner.unit_came()
        assert reads.active == expected


def test_as_long_as_nothing_comes_nothing_is_known() -> None:
    """A slow network: more reads would only share it."""
    state = Concurrency(4, 4)
    for rate in (0.0, 0.0, 30.0, 100.0):
        state = state.next(rate, 1.0, 64)
        assert state.active == (8 if rate == 100.0 else 4)
    state = state.next(100.0, 1.0, 64)
    assert state.active == 4


def test_a_process_that_the_interpreter_holds_up_reads_one_unit_at_a_time() -> None:
    state = Concurrency(4, 4)
    for _ in range(6):
        state = state.next(100.0 / state.active, 1.0, 64, busy=1.0)  # more threads, fewer samples
    assert (state.active, state.settled) == (1, 1)
    seen = set()
    for _ in range(3 * REST_TURNS):
        seen.add(state.active)
        state = state.next(100.0 / state.active, 1.0, 64, busy=1.0)
    assert seen == {1, 2}, "it tries two now and then"


def test_reads_that_run_side_by_side_stay_as_many() -> None:
    """Decoders that need no interpreter: half as many bring half as much."""
    state, seen = Concurrency(4, 4), []
    for _ in range(REST_TURNS):
        state = state.next(100.0 * min(state.active, 4), 1.0, 64, busy=4.0)
        seen.append(state.active)
    assert seen[:4] == [4, 8, 2, 4]
    assert set(seen[4:]) == {4}


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1), st.booleans()), max_size=60),
)
def test_a_remote_that_asks_to_slow_down_gets_fewer_reads_and_never_none(
    most: int, turns: list[tuple[float, float, bool]]
) -> None:
    state = Concurrency(min(4, most), min(4, most))
    for rate, waiting, throttled in turns:
        before, state = state, state.next(rate, waiting, most, throttled=throttled)
        assert 1 <= state.active <= most
        if throttled:
            # What was under way is forgiven for one turn after each halving, and may end a recovery, no more.
            assert state.active == max(1, before.active // 2) or before.goal
        if before.goal:
            assert state.active <= before.active + 1


def test_reads_are_halved_at_once_and_come_back_one_by_one() -> None:
    state = Concurrency(32, 32).next(100.0, 1.0, 64, throttled=True)
    assert state.active == 16
    state = state.next(100.0, 1.0, 64, throttled=True)
    assert state.active == 16  # that was still the burst
    state = state.next(100.0, 1.0, 64, throttled=True)
    assert state.active == 8
    seen = [state.active]
    while state.goal:
        state = state.next(100.0, 1.0, 64)
        seen.append(state.active)
    assert sorted(set(seen)) == list(range(8, 33))
    assert seen == sorted(seen)
    assert len(seen) > 2 * 24  # at least two turns, 0.6 s, each


@given(st.integers(2, 40))
def test_against_a_remote_that_takes_so_many_the_reads_stay_near_that(capacity: int) -> None:
    state, refused, served = Concurrency(4, 4), 0, 0
    for _ in range(400):
        throttled = state.active > capacity
        refused += throttled
        served += min(state.active, capacity)
        state = state.next(100.0 * min(state.active, capacity), 1.0, 64, throttled=throttled)
    assert refused < 100
    assert served > 0.6 * 400 * capacity
