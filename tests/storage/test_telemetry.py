"""The board is readable, even if a worker of another version writes it."""

from __future__ import annotations

import os
from pathlib import Path

from cachestream.storage.telemetry import FETCHING, NO_SPACE, Board


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
