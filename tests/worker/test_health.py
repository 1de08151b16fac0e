"""Deaths: who is suspected, how heavily, how long to wait, and when to give up."""

from __future__ import annotations

import signal

import pytest

from cachestream.worker.health import (
    BREAKER_CRASHES,
    BREAKER_ISOLATIONS,
    BREAKER_KILLS,
    BREAKER_WINDOW_S,
    TROUBLE_S,
    Death,
    SystemErrors,
    hanging_positions,
    is_crash_loop,
    longest_pause_s,
    recent_deaths,
    suspects_of,
    was_suspended,
)
from cachestream.worker.planner import QUARANTINE_AT

SEGFAULT = Death(0.0, -signal.SIGSEGV, suspects=3)
KILL = Death(0.0, -signal.SIGKILL, suspects=3)
HANG = Death(0.0, -signal.SIGKILL, hanging=True, suspects=1)
STOPPED = Death(0.0, -signal.SIGKILL, hanging=True, stopped=True, suspects=3)
ERROR = Death(0.0, 1, orderly=True, suspects=3)
NO_START = Death(0.0, 1)


def weights(death: Death, positions: list[int]) -> dict[int, int]:
    return {found.position: found.deaths for found in suspects_of(death, positions)}


def deaths_until_quarantine(death: Death) -> int:
    """One death with others in flight, the next ones alone."""
    weight, count = weights(death, [1, 2, 3])[1], 1
    while weight < QUARANTINE_AT:
        weight, count = weight + weights(death, [1])[1], count + 1
    return count


@pytest.mark.parametrize("death", [SEGFAULT, HANG])
def test_a_unit_that_kills_or_hangs_is_given_up_after_two_tries(death: Death) -> None:
    assert deaths_until_quarantine(death) == 2


@pytest.mark.parametrize("death", [KILL, STOPPED])
def test_kills_from_outside_weigh_little(death: Death) -> None:
    assert deaths_until_quarantine(death) == 5


def test_all_that_was_in_flight_is_suspected_alike_and_once() -> None:
    assert weights(SEGFAULT, [5, 3, 5, 9]) == {3: 4, 5: 4, 9: 4}
    assert weights(SEGFAULT, [5, 5]) == {5: 8}
    assert weights(SEGFAULT, []) == {}


def test_nobody_is_suspected_when_the_process_ended_by_itself() -> None:
    assert weights(ERROR, [1, 2]) == {}


def test_a_process_that_beats_does_not_hang() -> None:
    assert hanging_positions(10.0, 5.0, (6.0, 3), [(5.0, 1), (9.9, 2)]) is None


def test_only_what_hangs_is_suspected_of_it() -> None:
    assert hanging_positions(10.0, 5.0, (9.0, 3), [(1.0, 1), (9.9, 2)]) == [1]
    assert hanging_positions(10.0, 5.0, (1.0, 3), [(9.0, 1)]) == [3]
    assert hanging_positions(10.0, 5.0, (1.0, 3), [(1.0, 1)]) == [1, 3]


def test_a_main_thread_that_hangs_outside_of_transforms_accuses_nobody() -> None:
    assert hanging_positions(10.0, 5.0, (1.0, None), [(9.0, 1)]) == []


@pytest.mark.parametrize(
    ("death", "most"),
    [
        (NO_START, BREAKER_CRASHES),
        (ERROR, BREAKER_CRASHES),
        (SEGFAULT, BREAKER_ISOLATIONS),
        (KILL, BREAKER_KILLS),
    ],
)
def test_the_breaker_opens_after_so_many_deaths_in_a_row(death: Death, most: int) -> None:
    assert not is_crash_loop([death] * (most - 1), 1.0, 1)
    assert is_crash_loop([death] * most, 1.0, 1)


def test_deaths_before_a_success_or_long_ago_do_not_count() -> None:
    settled = Death(0.0, 1, progressed=True)
    assert recent_deaths([SEGFAULT, settled, SEGFAULT, KILL], 1.0) == [KILL, SEGFAULT]
    assert recent_deaths([SEGFAULT, KILL], 1e4) == []


def test_more_processes_may_meet_more_bad_units_at_first() -> None:
    assert not is_crash_loop([SEGFAULT] * 23, 1.0, 8)
    assert is_crash_loop([SEGFAULT] * 24, 1.0, 8)


def test_a_process_that_did_something_closes_the_breaker() -> None:
    progressed = Death(0.0, 1, progressed=True)
    assert not is_crash_loop([NO_START] * 4 + [progressed] + [NO_START] * 4, 1.0, 1)


def test_deaths_of_long_ago_do_not_count() -> None:
    now_s = BREAKER_WINDOW_S + 2
    recent = Death(now_s, 1)
    assert not is_crash_loop([NO_START] * 10 + [recent] * 4, now_s, 1)


def test_pauses_double_up_to_a_minute_unless_a_bad_unit_is_being_found() -> None:
    assert [longest_pause_s([NO_START] * n) for n in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0]
    assert longest_pause_s([NO_START] * 100) == 60.0
    assert longest_pause_s([NO_START] * 5 + [SEGFAULT]) == 0.5
    assert longest_pause_s([NO_START] * 5 + [Death(0.0, 1, progressed=True)]) == 0.5


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (SEGFAULT, "ended the process by SIGSEGV"),
        (Death(0.0, -40), "ended the process by signal 40"),
        (ERROR, "ended the process with exit code 1"),
        (HANG, "hung"),
        (STOPPED, "had been stopped"),
    ],
)
def test_a_death_is_told_in_words(death: Death, words: str) -> None:
    assert str(death) == words


def test_only_a_gap_that_would_cost_much_of_the_patience_means_a_stop() -> None:
    assert not was_suspended(10.0, timeout_s=30.0)
    assert was_suspended(16.0, timeout_s=30.0)


def test_errors_of_the_system_are_borne_for_a_minute_and_forgotten_once_it_is_quiet() -> None:
    errors = SystemErrors()
    for second in range(int(TROUBLE_S) + 1):
        errors = errors.again(100.0 + second)
        assert not errors.is_lasting
    assert errors.again(errors.last_s + 1.0).is_lasting
    assert not errors.again(errors.last_s + 10.0).is_lasting
