"""The history of a cache stays small, whole and in order, however long the run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cachestream.errors import CacheFullError
from cachestream.storage.telemetry import ROW, ROWS_AT_MOST, History, read_history


class Clock:
    """A fake wall clock."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "history")


def test_a_row_comes_back_as_it_was_appended(path: str, clock: Clock) -> None:
    History(path, clock).append(1, 2, 3, 4, 5, 6, 7)
    assert read_history(path).tolist() == [(clock.now_s, 1, 2, 3, 4, 5, 6, 7)]


def test_a_later_worker_continues_the_history(path: str, clock: Clock) -> None:
    for samples in (1, 2):
        clock.now_s += 10
        History(path, clock).append(samples, 0, 0, 0, 0, 0, 0)
    assert read_history(path)["samples"].tolist() == [1, 2]


def test_a_month_of_seconds_fits_and_every_day_of_it_can_be_seen(path: str, clock: Clock) -> None:
    """Thinning alone would leave nothing but the last hour."""
    history, start_s = History(path, clock), clock.now_s
    for hour in range(30 * 24):
        for second in range(0, 3600, 200):
            clock.now_s = start_s + 3600 * hour + second
            history.append(hour, 0, 0, 0, 0, 0, 0)
    rows = read_history(path)
    assert os.path.getsize(path) <= ROWS_AT_MOST * ROW.itemsize
    assert rows["time_s"][0] == start_s
    gaps_s = np.diff([*rows["time_s"], clock.now_s])
    assert gaps_s.min() > 0
    assert gaps_s.max() < 86_400


def test_a_clock_that_was_set_back_does_not_end_the_recording(path: str, clock: Clock) -> None:
    history = History(path, clock)
    for samples, jump_s in enumerate((0.0, 1e6, -5e8, 1.0)):
        clock.now_s += jump_s
        history.append(samples, 0, 0, 0, 0, 0, 0)
    assert read_history(path)["samples"].tolist() == [0, 1, 2, 3]


def test_a_row_torn_by_a_full_disk_does_not_shift_the_rows_after_it(path: str, clock: Clock) -> None:
    History(path, clock).append(7, 0, 0, 0, 0, 0, 0)
    with open(path, "ab") as file:
        file.write(b"torn")
    assert read_history(path)["samples"].tolist() == [7]
    clock.now_s += 1
    History(path, clock).append(8, 0, 0, 0, 0, 0, 0)
    assert read_history(path)["samples"].tolist() == [7, 8]


def test_a_full_disk_is_told_as_such_where_rows_are_to_go_and_they_go_once_it_has_space(
    small_disk: Path, clock: Clock
) -> None:
    path, theirs = str(small_disk / "history"), small_disk / "theirs"
    rows = np.zeros(ROWS_AT_MOST, ROW)
    rows["time_s"] = np.linspace(clock.now_s - 2000.0, clock.now_s - 10.0, len(rows))
    rows.tofile(path)
    history = History(path, clock)
    with open(theirs, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free)
    for attempt in (lambda: history.append(1, 0, 0, 0, 0, 0, 0), lambda: History(path, clock)):
        with pytest.raises(CacheFullError, match="No space left on device; free some disk"):
            attempt()
        assert sorted(os.listdir(small_disk)) == ["history", "theirs"]
    theirs.unlink()
    history.append(1, 0, 0, 0, 0, 0, 0)
    assert read_history(path)["samples"].tolist() == [0] * (ROWS_AT_MOST // 2) + [1]


def test_no_file_is_no_history(tmp_path: Path) -> None:
    assert len(read_history(str(tmp_path / "none"))) == 0
