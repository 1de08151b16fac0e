"""The pace of the trainer, measured with a fake clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.training.schedule import Pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def paced(steps_s: list[float]) -> Pace:
    """The pace of a trainer with these times per batch."""
    clock = Clock()
    pace = Pace(4, clock)
    pace.record(1)
    for step_s in steps_s:
        clock.now_s += step_s
        pace.record(1)
    return pace


@pytest.mark.parametrize("pause_s", [0.25, 30.0, 3600.0])
def test_a_trainer_that_pauses_is_no_slow_trainer(pause_s: float) -> None:
    assert not paced([0.008] * 10 + [pause_s] + [0.008] * 3).is_slow


def test_a_trainer_that_has_become_slow_is_a_slow_trainer() -> None:
    assert not paced([0.002] * 10).is_slow
    assert paced([0.002] * 10 + [0.05] * 5).is_slow


def test_a_trainer_that_took_its_first_batches_at_once_is_known_soon() -> None:
    """Some trainers take one batch ahead: the next segment is not prepared too early because of it."""
    assert paced([0.0001] + [1.0] * 10).time_until_taken(2) == pytest.approx(2.5, rel=0.2)


@given(st.lists(st.floats(0.02, 2.0), min_size=4, max_size=50))
def test_a_pace_lies_between_the_shortest_step_and_the_longest(steps_s: list[float]) -> None:
    """The time for two batches is that for two and a half steps."""
    pace = paced(steps_s)
    assert 2.5 * min(steps_s) * 0.999 <= pace.time_until_taken(2) <= 2.5 * max(steps_s) * 1.001


def test_until_the_pace_is_known_that_of_the_epoch_before_is_expected() -> None:
    """A short epoch ends before its pace is known; the next one must be prepared by then."""
    new = Pace(4, Clock())
    assert not new.should_prepare(200, 0, 0, 0.0)
    fast, slow = paced([0.002] * 10).for_next_epoch(), paced([0.2] * 10).for_next_epoch()
    assert fast.should_prepare(200, 0, 0, 0.0)
    assert not slow.should_prepare(200, 0, 0, 0.0)
    assert fast.for_next_epoch().should_prepare(200, 0, 0, 0.0), "nor was it known in the epoch between"
    assert not fast.is_slow
    assert not slow.is_slow, "which is told by this epoch's own pace only"
