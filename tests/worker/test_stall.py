"""Stalls: the times after which a unit that does not answer is put aside, and is left out."""

from __future__ import annotations

import threading

import pytest

from cachestream.worker.unit_reader import Answers, Stall, UnitRead, UnitReader


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


def test_a_remote_is_back_when_it_answers_after_an_outage_and_for_those_who_wait_since_before() -> None:
    answers = Answers()
    assert answers.is_away("a", 0.0)
    assert not answers.is_back("a", 0.0)
    answers.heard("a", 1.0)
    assert answers.is_back("a", 0.5)
    assert not answers.is_back("a", 1.0)
    for now_s in (2.0, 6.0, 10.0):
        assert not answers.is_away("a", now_s)
        answers.heard("a", now_s)
    assert not answers.is_back("a", 1.5), (
        "it answered all the time: what does not come is not the remote's fault"
    )
    assert answers.is_away("a", 16.0)
    assert not answers.is_back("a", 12.0)
    answers.heard("a", 17.0)
    assert answers.is_back("a", 12.0)
    assert not answers.is_back("b", 12.0)


def test_a_second_outage_is_probed_though_another_unit_ended_the_first_one() -> None:
    reader = UnitReader.__new__(UnitReader)  # without a job, a source, and a cache
    reader._remote_of, reader._answers = lambda _: "a", Answers()
    reader._probe, reader._counting = None, threading.Lock()
    for outage_s in (1000.0, 2000.0):
        probe = UnitRead(0, 0, 0, lambda _: False, paused_at_s=outage_s, again_at_s=outage_s + 500.0)
        assert not reader.may_try_again(probe, outage_s)
        assert probe.again_at_s <= outage_s + 5.0, "it is tried sooner"
        reader._answers.heard("a", outage_s + 1.0)
        assert reader.may_try_again(probe, outage_s + 1.0)
