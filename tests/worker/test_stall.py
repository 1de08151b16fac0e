"""Stalls: the times after which a unit that does not answer is put aside, and is left out."""

from __future__ import annotations

import time

import pytest

from cachestream.worker.encode import SampleChunk
from cachestream.worker.unit_reader import LONGEST_PAUSE_S, Stall, Unit, UnitRead, UnitReader


@pytest.mark.parametrize(
    ("now_s", "is_long", "is_too_long"),
    [
        (1000, False, False),
        (1009, False, False),
        (1010, True, False),
        (1119, True, False),
        (1120, True, True),
    ],
)
def test_others_go_first_after_a_third_of_what_a_process_may_hang_and_it_ends_after_four_times_that(
    now_s: float, is_long: bool, is_too_long: bool
) -> None:
    stall = Stall(1000.0, "503")
    assert stall.is_long(now_s, 30.0) == is_long
    assert stall.is_too_long(now_s, 30.0) == is_too_long


def test_pauses_grow_with_each_failed_attempt_to_a_few_seconds_and_end_when_something_comes() -> None:
    """What waits for the end of an outage of any length notices it soon."""
    reader = UnitReader.__new__(UnitReader)  # without a job, a source, and a cache
    reader._remote_of, reader._hang_timeout_s, reader._known_good = lambda _: "a", 30.0, {}
    unit_read = UnitRead(Unit(0, 0, 0))
    pauses_s = [reader._pause_s(unit_read, "503", time.monotonic()) for _ in range(2000)]
    assert pauses_s[0] <= 0.5
    assert 4.0 < max(pauses_s) <= LONGEST_PAUSE_S
    unit_read.heard(SampleChunk([0], ["0"], [0], 1))
    assert unit_read.stall is None
    assert reader._pause_s(unit_read, "503", time.monotonic()) <= 0.5
