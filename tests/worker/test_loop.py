"""A supervisor and its processes, by a clock of the tests: deaths, silence, retries, space, and the end."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.storage.locks import HeldFile
from cachestream.storage.telemetry import NO_SPACE, STATE_NAMES
from tests.worker.loop import FAIL, HANG, HANG_S, KILLED, filling
from tests.worker.support import failures_of, only_once

UNITS = 20
KB = 1000


def keys_but(*units: int) -> set[str]:
    return {f"{unit}/0" for unit in range(UNITS) if unit not in units}


def use(cache: Cache) -> None:
    """An epoch over all that is cached begins and ends: then it may be evicted."""
    with suppress(cs.NotEnoughSamplesError):
        cache.take_snapshot()[1].release()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_all_units_are_read_once(cache: Cache, num_workers: int) -> None:
    with filling(cache, UNITS, num_workers=num_workers) as loop:
        loop.complete()
        assert sorted(loop.reads) == list(range(UNITS))
        assert loop.restarts == 0
    assert only_once(cache) == keys_but()
    assert failures_of(cache) == {}


# --- deaths and silence


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("segfault", "ended the process by SIGSEGV"),
        ("exit 3", "ended the process with exit code 3"),
        (HANG, "hung"),
    ],
)
def test_units_that_kill_or_hang_are_left_out_after_two_tries_and_the_others_come(
    cache: Cache, does: str, words: str
) -> None:
    with filling(cache, UNITS, {4: does, 11: does}, num_workers=2) as loop:
        loop.complete()
        assert {unit: loop.reads.count(unit) for unit in (4, 11)} == {4: 2, 11: 2}
        assert loop.restarts == 4
    assert only_once(cache) == keys_but(4, 11)
    assert failures_of(cache) == {"quarantined": 2}
    assert {row.reason for row in cache.status().failures} == {f"reading it {words}, again and again"}


def test_who_hangs_is_ended_when_its_time_is_over_and_not_before(cache: Cache) -> None:
    with filling(cache, UNITS, {4: HANG}) as loop:
        loop.run(lambda: 4 in loop.reads)
        (first,) = loop.processes
        loop.rest(HANG_S - 1.0)
        assert loop.processes == [first]
        assert first.code is None
        loop.run(lambda: loop.restarts, 2.0)
        loop.complete()


def test_a_kill_from_outside_is_nobody_s_fault(cache: Cache) -> None:
    with filling(cache, UNITS, {4: KILLED}) as loop:
        loop.run(lambda: loop.restarts == 1)
        loop.does.clear()
        loop.complete()
    assert only_once(cache) == keys_but()
    assert failures_of(cache) == {}


def test_a_job_that_is_suspended_as_a_whole_goes_on_where_it_was(cache: Cache) -> None:
    with filling(cache, UNITS) as loop:
        loop.run(lambda: len(loop.reads) == 5)
        loop.is_suspended = True
        loop.now_s += 100 * HANG_S
        loop.rest(HANG_S / 4)  # the others come later: the supervisor sees them stopped
        loop.is_suspended = False
        loop.complete()
        assert loop.restarts == 0
        assert sorted(loop.reads) == list(range(UNITS))


def test_processes_that_are_stopped_alone_are_replaced_and_accuse_nobody(cache: Cache) -> None:
    with filling(cache, UNITS) as loop:
        loop.run(lambda: len(loop.reads) == 5)
        loop.is_suspended = True
        assert loop.run(lambda: loop.restarts) == pytest.approx(HANG_S, abs=1.0)
        loop.is_suspended = False
        loop.complete()
        assert loop.restarts == 1
    assert only_once(cache) == keys_but()
    assert failures_of(cache) == {}


def test_a_worker_whose_processes_die_of_whatever_they_read_gives_up_and_says_so(cache: Cache) -> None:
    with filling(cache, UNITS, dict.fromkeys(range(UNITS), "exit 3"), num_workers=2) as loop:
        assert loop.end() == 1
    state = cache.filling.state()
    assert state.phase == "failed"
    assert "what they read ended the process with exit code 3" in state.message
    assert cache.num_samples == 0


def test_a_supervisor_without_descriptors_for_a_moment_goes_on_and_replaces_what_died(cache: Cache) -> None:
    with filling(cache, UNITS, {4: KILLED}) as loop:
        loop.run(lambda: 4 in loop.reads)
        loop.has_no_descriptors = True
        loop.rest(30.0)
        assert not loop.processes
        loop.has_no_descriptors, loop.does = False, {}
        loop.complete()
        assert loop.restarts == 1
    assert only_once(cache) == keys_but()
    assert failures_of(cache) == {}


def test_a_supervisor_that_gets_no_descriptors_for_a_minute_gives_up(cache: Cache) -> None:
    with filling(cache, UNITS, {4: KILLED}) as loop:
        loop.run(lambda: 4 in loop.reads)
        loop.has_no_descriptors, begun_s = True, loop.now_s
        assert loop.end() == 1
        assert loop.now_s - begun_s == pytest.approx(60.0, abs=10.0)
    assert "Too many open files" in cache.filling.state().message


# --- retries


def test_units_that_failed_are_read_again_at_the_next_start_and_no_others(cache: Cache) -> None:
    for units in (set(range(UNITS)), {5, 9}):
        with filling(cache, UNITS, {5: FAIL, 9: "segfault"}) as loop:
            loop.complete()
            assert set(loop.reads) == units
        assert failures_of(cache) == {"sample": 1, "quarantined": 1}
    with filling(cache, UNITS) as loop:
        loop.complete()
        assert loop.reads == [5, 9]
    assert only_once(cache) == keys_but()
    assert failures_of(cache) == {}


def test_the_next_pass_reads_what_was_evicted_and_what_failed_and_counts_it_once(cache: Cache) -> None:
    with filling(cache, UNITS, {5: FAIL}) as loop:
        loop.complete()
        for _ in range(2):
            loop.reads.clear()
            cache.evict(to=cache.size_bytes - 10 * KB)
            gone = keys_but(5) - only_once(cache)
            loop.run(lambda: loop.reads)
            loop.complete()
            assert {f"{unit}/0" for unit in loop.reads} == gone | {"5/0"}
            assert failures_of(cache) == {"sample": 1}
        loop.does.clear()
        cache.evict(to=cache.size_bytes - 10 * KB)
        loop.run(lambda: cache.num_samples == UNITS)
    assert only_once(cache) == keys_but()
    assert failures_of(cache) == {}


# --- space


LIMIT = 1000 * KB  # of the 2 MB of all units


def test_a_full_cache_rests_within_seconds_and_goes_on_at_once_when_an_epoch_has_used_it(
    cache: Cache,
) -> None:
    cache.size_limit = LIMIT
    with filling(cache, UNITS, nbytes=100 * KB) as loop:
        loop.run(lambda: cache.fill_state() == "full", 30.0)
        held = cache.num_samples
        loop.rest(60.0)
        assert cache.status().evicted_samples == 0, "nothing goes that no epoch has used"
        use(cache)
        assert loop.run(lambda: cache.status().evicted_samples > 0, 5.0) < 1.0
        loop.run(lambda: cache.fill_state() == "full", 30.0)
        assert cache.size_bytes <= LIMIT
        assert 0 < held < UNITS


def test_a_full_cache_waits_for_the_epoch_that_holds_it(cache: Cache) -> None:
    cache.size_limit = LIMIT
    with filling(cache, UNITS, nbytes=100 * KB) as loop:
        loop.run(lambda: cache.fill_state() == "full", 30.0)
        _, lease = cache.take_snapshot()
        loop.rest(10.0)
        assert cache.fill_state() == "filling"
        assert cache.status().fill_message == "waiting for the next epoch"
        assert cache.status().evicted_samples == 0
        lease.release()
        assert loop.run(lambda: cache.status().evicted_samples > 0, 5.0) < 1.0


def test_a_cache_whose_limit_is_changed_while_it_is_looked_at_is_not_found_full(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(*_: object) -> str:
        cache.size_limit += 1
        return ""

    cache.size_limit = LIMIT
    with filling(cache, UNITS, nbytes=100 * KB) as loop:
        with monkeypatch.context() as patch:
            patch.setattr("cachestream.worker.fill_record.shortage_of_disk", change)
            with pytest.raises(AssertionError, match="not so within"):
                loop.run(lambda: cache.fill_state() == "full", 30.0)
            assert cache.size_limit > LIMIT + 100, "it was looked at"
        loop.run(lambda: cache.fill_state() == "full", 30.0)


def test_a_cache_is_not_found_full_at_the_first_look_after_its_limit_was_raised(cache: Cache) -> None:
    cache.size_limit = LIMIT
    with filling(cache, UNITS, nbytes=100 * KB) as loop:
        loop.run(lambda: loop.board.states()[0] == STATE_NAMES[NO_SPACE], 30.0)
        cache.size_limit = LIMIT + 1
        with pytest.raises(AssertionError, match="not so within"):
            loop.run(lambda: cache.fill_state() == "full", 2.0)


def test_a_worker_that_is_to_stop_when_the_cache_is_full_does_so(cache: Cache) -> None:
    cache.size_limit = LIMIT
    with filling(cache, UNITS, nbytes=100 * KB, when_full="stop") as loop:
        assert loop.end() == 0
    assert cache.fill_state() == "full"
    assert 0 < cache.num_samples < UNITS
    assert only_once(cache)


def test_a_limit_that_is_raised_is_filled_and_one_that_is_lowered_holds_at_the_next_look(
    cache: Cache,
) -> None:
    cache.size_limit = LIMIT
    with filling(cache, UNITS, nbytes=100 * KB) as loop:
        loop.run(lambda: cache.fill_state() == "full", 30.0)
        cache.size_limit = 50_000 * KB
        loop.complete()
        assert only_once(cache) == keys_but()
        cache.size_limit = LIMIT
        loop.rest(5.0)
        assert cache.size_bytes <= LIMIT


# --- the end


def test_a_worker_ends_at_once_with_the_last_process_that_releases_it(cache: Cache) -> None:
    with filling(cache, UNITS, linger_s=600.0) as loop:
        loop.run(lambda: len(loop.reads) == 5)
        before_s = loop.now_s
        loop.forsake(dies=False)
        assert loop.end() == 0
        assert loop.now_s - before_s < 1.0
    assert cache.fill_state() == "stopped"
    assert only_once(cache)


def test_a_worker_whose_process_has_died_goes_on_for_its_time_and_then_ends(cache: Cache) -> None:
    with filling(cache, UNITS, linger_s=60.0) as loop:
        loop.run(lambda: len(loop.reads) == 5)
        before_s = loop.now_s
        loop.forsake(dies=True)
        loop.complete()
        assert loop.end() == 0
        assert loop.now_s - before_s == pytest.approx(60.0, abs=1.0)
    assert only_once(cache) == keys_but()
    assert not [name for name in os.listdir(cache.directory.worker) if name.endswith(".attached")]


def test_a_process_that_comes_back_in_time_keeps_the_worker(cache: Cache) -> None:
    with filling(cache, UNITS, linger_s=60.0) as loop:
        loop.run(lambda: len(loop.reads) == 5)
        loop.forsake(dies=True)
        loop.rest(50.0)
        loop.attach()
        loop.rest(100.0)
        loop.forsake(dies=False)
        assert loop.end() == 0


def test_a_worker_that_cannot_lock_a_file_as_it_leaves_tries_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filling(cache, UNITS) as loop:
        attachments, tries = loop.supervisor._attachments, list[float]()
        attach_lock_of_it = attachments.attach_lock

        def attach_lock(timeout_s: float) -> HeldFile:
            tries.append(timeout_s)
            if len(tries) == 1:
                raise cs.CacheError("attach.lock: Too many open files")
            return attach_lock_of_it(timeout_s)

        monkeypatch.setattr(attachments, "attach_lock", attach_lock)
        loop.forsake(dies=False)
        assert loop.end() == 0
        assert len(tries) == 2
    assert cache.fill_state() == "stopped"
