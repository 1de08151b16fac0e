"""Units that do not answer while their remote does: the others come, and these in the end, or they are left out."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import aiohttp
import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.storage.telemetry import private_slot
from cachestream.transport import metering
from cachestream.worker.sampling.encode import SampleChunk
from cachestream.worker.sampling.unit import Stall, Unit, UnitRead
from cachestream.worker.sampling.unit_reader import (
    LONGEST_PAUSE_S,
    FetchMeter,
    UnitReader,
)
from tests.support.unruly import run_unruly_server
from tests.worker.sources import Mute, Numbers
from tests.worker.support import DEADLINE_S, failures_of, fill, only_once, sampling_pids, wait_until


def muted(tmp_path: Path, which: str, units: int = 60) -> Mute:
    switch = tmp_path / "switch"
    switch.write_text(which, encoding="utf-8")
    return Mute(units, 4, switch=str(switch))


def keys_but(source: Mute, units: set[int]) -> set[str]:
    """All keys, but those that the `units` would give after falling silent."""
    lost = {f"{unit}/{sample}" for unit in units for sample in range(source.samples // 2, source.samples)}
    return source.keys() - lost


@pytest.mark.e2e
@pytest.mark.parametrize("concurrency", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_units_that_never_answer_hold_up_no_others_and_are_left_out_in_the_end(
    tmp_path: Path, cache: Cache, concurrency: int
) -> None:
    source = muted(tmp_path, "7 33")
    with cs.start_worker(cache, source, num_workers=1, concurrency=concurrency, hang_timeout_s=1.5) as worker:
        wait_until(lambda: "bucket/" in cache.status().remote_message, "what does not answer is named")
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == keys_but(source, {7, 33})
    assert failures_of(cache) == {"sample": 2}
    (row,) = cache.status().failures
    assert row.reason.startswith("503 Slow Down; left out after a while")
    assert cache.status().remote_message == ""
    tmp_path.joinpath("switch").write_text("", encoding="utf-8")
    fill(cache, source)
    assert only_once(cache) == source.keys(), "the next worker reads them again"
    assert failures_of(cache) == {}


@pytest.mark.e2e
def test_the_others_come_long_before_it_is_left_out(tmp_path: Path, cache: Cache) -> None:
    source = muted(tmp_path, " ".join(map(str, range(0, 60, 20))))
    with cs.start_worker(cache, source, num_workers=1, concurrency=4, hang_timeout_s=1.5) as worker:
        cache.wait(60 * 4 - 3 * 2, DEADLINE_S)
        assert worker.is_alive()
        assert not cache.status().failures
        assert "bucket/" in cache.status().remote_message
        tmp_path.joinpath("switch").write_text("", encoding="utf-8")
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


@pytest.mark.e2e
def test_an_outage_of_any_length_leaves_nothing_out(tmp_path: Path, cache: Cache) -> None:
    source = muted(tmp_path, "")
    with cs.start_worker(
        cache, source, num_workers=2, concurrency=4, hang_timeout_s=1.0, bandwidth_limit=100_000
    ) as worker:
        cache.wait(8, DEADLINE_S)
        tmp_path.joinpath("switch").write_text("all", encoding="utf-8")
        begun_s = time.monotonic()
        wait_until(lambda: time.monotonic() - begun_s > 5.0, "longer than a unit would be given")
        tmp_path.joinpath("switch").write_text("", encoding="utf-8")
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


@pytest.mark.e2e
def test_what_was_put_aside_is_read_by_the_next_process_if_that_is_killed_and_by_the_next_worker(
    tmp_path: Path, cache: Cache
) -> None:
    source = muted(tmp_path, "3 11 40 41 59")
    with cs.start_worker(cache, source, num_workers=1, concurrency=6, hang_timeout_s=2.0):
        cache.wait(60 * 4 - 5 * 2, DEADLINE_S)
        for pid in sampling_pids(cache):
            os.kill(pid, signal.SIGKILL)
        tmp_path.joinpath("switch").write_text("40 41", encoding="utf-8")
        cache.wait(60 * 4 - 2 * 2, DEADLINE_S)
        assert only_once(cache) == keys_but(source, {40, 41})
    tmp_path.joinpath("switch").write_text("", encoding="utf-8")
    fill(cache, source)
    assert only_once(cache) == source.keys()
    assert failures_of(cache) == {}


@pytest.mark.e2e
def test_one_source_of_a_mix_that_is_away_is_waited_for_although_the_other_answers(
    tmp_path: Path, cache: Cache
) -> None:
    away, well = muted(tmp_path, "all", units=4), Mute(40, 4, name="well", switch=os.devnull)
    with cs.start_worker(cache, cs.mix({away: 1, well: 10}), num_workers=1, hang_timeout_s=1.0) as worker:
        begun_s = time.monotonic()
        wait_until(lambda: time.monotonic() - begun_s > 5.0, "longer than a unit would be given")
        assert not cache.status().failures
        tmp_path.joinpath("switch").write_text("", encoding="utf-8")
        assert worker.wait(DEADLINE_S)
    assert failures_of(cache) == {}
    assert cache.num_samples == 4 * (4 + 40)


@pytest.mark.e2e
def test_web_servers_that_accept_and_never_answer_hold_up_no_others(cache: Cache) -> None:
    with run_unruly_server() as server:
        urls = [f"{server.url}/good/{number}.bin" for number in range(100)]
        silent = [f"{server.url}/silent/{number}.bin" for number in range(4)]
        # A web server's own deadline is 15 s; the user's wins.
        options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_read=2.0)}}
        source = cs.open_source([*urls, *silent], storage_options=options)
        with cs.start_worker(cache, source, num_workers=1, hang_timeout_s=6.0) as worker:
            wait_until(lambda: cache.num_samples == 100, "the others are cached", 150.0)
            assert worker.is_alive()
            assert not cache.status().failures, "those that are silent are not given up yet"
            wait_until(lambda: "silent/" in cache.status().remote_message, "what does not answer is named")
        assert len(only_once(cache)) == 100


@pytest.mark.parametrize(("now_s", "is_too_long"), [(1000, False), (1119, False), (1120, True)])
def test_a_unit_is_left_out_after_four_times_what_a_process_may_hang(now_s: float, is_too_long: bool) -> None:
    assert Stall(1000.0, "503").is_too_long(now_s, 30.0) == is_too_long


def test_pauses_grow_with_each_failed_attempt_to_a_few_seconds_and_end_when_something_comes() -> None:
    """A unit that waits for the end of an outage notices it soon, however long that lasted."""
    reader = UnitReader(Numbers(1), FetchMeter(private_slot()), threading.Event(), hang_timeout_s=30.0)
    metering.install(None)
    unit_read = UnitRead(Unit(0, 0, 0))
    pauses_s = [reader._pause_s(unit_read, "503", time.monotonic()) for _ in range(2000)]
    assert pauses_s[0] <= 0.5
    assert 4.0 < max(pauses_s) <= LONGEST_PAUSE_S
    unit_read.received(SampleChunk([0], ["0"], [0], 1))
    assert unit_read.stall is None
    assert reader._pause_s(unit_read, "503", time.monotonic()) <= 0.5
