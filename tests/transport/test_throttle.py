"""The bandwidth limit that processes share."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from cachestream.errors import ConfigError
from cachestream.transport import metering
from cachestream.transport.metering import BURST_S, Throttle


def spend_for(path: Path, rate: float, seconds: float, barrier: Barrier, results: Any) -> None:
    """Spend from three threads at once; put (bytes, start, end)."""
    throttle = Throttle(str(path), rate)
    barrier.wait(180)
    start = time.monotonic()
    spent = [0, 0, 0]

    def run(index: int) -> None:
        while time.monotonic() < start + seconds:
            throttle.spend(50_000)
            spent[index] += 50_000

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((sum(spent), start, time.monotonic()))


def spend_together(context: Any, path: Path, rate: float) -> tuple[float, float]:
    """Return the spending of three processes in 3 s as a share of `rate`, and the least share by the most."""
    barrier, results = context.Barrier(3), context.Queue()
    workers = [context.Process(target=spend_for, args=(path, rate, 3.0, barrier, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    reports = [results.get(timeout=180) for _ in workers]
    for worker in workers:
        worker.join(60)
    elapsed = max(end for *_, end in reports) - min(start for _, start, _ in reports)
    spent = sum(spent for spent, *_ in reports)
    results.close()
    results.join_thread()
    each = [spent for spent, *_ in reports]
    return spent / elapsed / rate, min(each) / max(each)


@pytest.mark.e2e
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "fork"])
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_processes_together_hold_the_rate_within_5_percent(tmp_path: Path, method: str) -> None:
    """They never spend more, on an idle machine hardly less, and no process starves."""
    context: Any = multiprocessing.get_context(method)
    give_up = time.monotonic() + 300
    share, evenness = 0.0, 0.0
    while share < 0.95 or evenness < 0.5:
        assert time.monotonic() < give_up, f"{share:.3f} of the rate, the least {evenness:.2f} of the most"
        share, evenness = spend_together(context, tmp_path / "budget", 20e6)
        assert share < 1.05


def test_only_a_tenth_of_a_second_passes_at_once_after_an_idle_time(tmp_path: Path) -> None:
    throttle = Throttle(str(tmp_path / "budget"), 1e6)
    begun_s = time.monotonic()
    assert throttle.reserve(int(1e6 * BURST_S)) < 1e-6
    wait_s = throttle.reserve(1_000_000)
    passed_s = time.monotonic() - begun_s
    assert 1 - min(passed_s, BURST_S) - 1e-6 < wait_s < 1 + 1e-6
    throttle.close()


def test_the_budget_belongs_to_the_file_not_to_the_object(tmp_path: Path) -> None:
    first = Throttle(str(tmp_path / "budget"), 1e6)
    first.reserve(1_000_000_000)
    second = Throttle(str(tmp_path / "budget"), 1e6)
    assert second.reserve(1) > 500
    assert oct(os.stat(tmp_path / "budget").st_mode & 0o777) == "0o600"
    first.close()
    second.close()


def test_a_state_of_another_boot_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "budget"
    throttle = Throttle(str(path), 1.0)
    throttle.reserve(1_000_000)
    throttle.close()
    content = bytearray(path.read_bytes())
    content[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    throttle = Throttle(str(path), 1e6)
    assert throttle.reserve(1) == 0
    throttle.close()


@pytest.mark.e2e
def test_a_full_disk_is_an_error_and_no_signal(small_disk: Path) -> None:
    with open(small_disk / "theirs", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    code = (
        f"from cachestream.transport.metering import Throttle; Throttle({str(small_disk / 'budget')!r}, 1e6)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "No space left on device" in ended.stderr


def hold_lock(path: Path, ready: Any) -> None:
    throttle = Throttle(str(path), 1e6)
    with throttle._locked():
        ready.set()
        signal.pause()


@pytest.mark.e2e
def test_a_stopped_process_that_holds_the_lock_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    throttle = Throttle(str(tmp_path / "budget"), 1e9)
    holder = context.Process(target=hold_lock, args=(tmp_path / "budget", ready))
    holder.start()
    assert ready.wait(180)
    start = time.monotonic()
    throttle.spend(1000)
    assert 1 < time.monotonic() - start < 100
    holder.kill()
    holder.join(60)
    monkeypatch.setattr(metering, "LOCK_TIMEOUT_S", 200.0)
    start = time.monotonic()
    throttle.spend(1000)
    assert time.monotonic() - start < 100
    throttle.close()


@pytest.mark.e2e
def test_a_long_wait_shows_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert metering.TICK_S <= 1
    monkeypatch.setattr(metering, "TICK_S", 0.05)
    throttle = Throttle(str(tmp_path / "budget"), 1e6)
    ticks: list[float] = []
    metering.install(lambda _: ticks.append(time.monotonic()))
    try:
        throttle.spend(1_700_000)
    finally:
        metering.install(None)
        throttle.close()
    assert len(ticks) >= 3, "of 32, where the machine has time"


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_lets_nothing_through_is_refused(tmp_path: Path, rate: float) -> None:
    with pytest.raises(ConfigError, match="bandwidth"):
        Throttle(str(tmp_path / "budget"), rate)


def test_bytes_are_reported_to_whoever_is_installed_and_to_nobody_by_default() -> None:
    seen: list[int] = []
    metering.fetched(5)
    metering.install(seen.append)
    try:
        metering.fetched(7)
        metering.wait(0.01)
    finally:
        metering.install(None)
    metering.fetched(9)
    assert seen[0] == 7
    assert set(seen[1:]) == {0}
