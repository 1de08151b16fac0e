"""The board and the history of a cache: readable by any version, small, whole and in order."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from cachestream.errors import CacheFullError
from cachestream.storage.telemetry import FETCHING, NO_SPACE, ROW, ROWS_AT_MOST, Board, History, read_history


def test_what_is_written_on_the_board_is_what_another_look_at_it_finds(tmp_path: Path) -> None:
    path = str(tmp_path / "board")
    board = Board(path)
    board.reset(1234, 2, 5.0)
    board.slot(0)["samples"], board.slot(1)["samples"] = 3, 4
    board.slot(0)["state"], board.slot(1)["state"] = FETCHING, NO_SPACE
    board.slot(1)["refusal"] = b"no quota"
    board.slot(1)["silence"] = b"bucket/key: timed out"
    look = Board(path)
    assert (look.pid, look.processes, look.started_s) == (1234, 2, 5.0)
    assert look.states() == ["fetching", "waiting for space"]
    assert look.totals().samples == 7
    assert look.refusal() == "no quota"
    assert look.silence() == "bucket/key: timed out"


def test_slots_of_another_version_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "board"
    Board(str(path)).reset(1234, 2, 5.0)
    other = bytearray(os.urandom(path.stat().st_size))  # slots that lie elsewhere, and mean something else
    head = path.read_bytes()[:40]
    other[:40] = bytes(8) + head[8:]
    path.write_bytes(other)
    look = Board(str(path))
    assert (look.pid, look.started_s) == (1234, 5.0)
    assert look.states() == []
    assert look.totals().samples == 0
    assert look.refusal() == look.silence() == ""


def test_a_board_nobody_has_written_on_says_nothing(tmp_path: Path) -> None:
    board = Board(str(tmp_path / "board"))
    assert (board.pid, board.processes, board.states(), board.refusal()) == (0, 0, [], "")


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


@pytest.mark.e2e
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
