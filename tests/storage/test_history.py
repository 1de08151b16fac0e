"""The history of a cache stays small, whole and in order, however long the run."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from cachestream.storage.history import CAPACITY, FIRST_INTERVAL_S, History, Moment, read_history


def moment(time_s: float, samples: int = 0) -> Moment:
    return Moment(time_s, samples * 100, 10**9, samples, samples, 1, 2)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "history")


def test_a_moment_comes_back_as_it_was_recorded(path: str) -> None:
    history = History(path)
    history.record(Moment(1234.5, 1, 2, 3, 4, 5, 6))
    history.close()
    (row,) = read_history(path)
    assert row.tolist()[:7] == (1234.5, 1, 2, 3, 4, 5, 6)


def test_moments_within_the_interval_are_left_out(path: str) -> None:
    history = History(path)
    for tick in range(100):
        history.record(moment(1000 + tick * FIRST_INTERVAL_S / 10))
    history.close()
    assert np.diff(read_history(path)["time_s"]).min() >= FIRST_INTERVAL_S * 0.999
    assert len(read_history(path)) == 10


def test_a_long_run_fits_from_its_first_moment_to_its_last(path: str) -> None:
    history = History(path)
    size_bytes = os.stat(path).st_blocks * 512
    for tick in range(20 * CAPACITY):
        history.record(moment(1000 + tick, tick))
    history.close()
    rows = read_history(path)
    assert CAPACITY / 2 <= len(rows) <= CAPACITY
    assert rows["time_s"][0] == 1000
    assert rows["time_s"][-1] >= 1000 + 19.9 * CAPACITY - 32
    assert (np.diff(rows["num_samples"]) > 0).all()
    assert os.stat(path).st_blocks * 512 == size_bytes


def test_a_later_worker_continues_the_history(path: str) -> None:
    for start in (1000.0, 2000.0):
        history = History(path)
        history.record(moment(start))
        history.close()
    assert read_history(path)["time_s"].tolist() == [1000.0, 2000.0]


def test_a_clock_that_was_set_back_does_not_end_the_recording(path: str) -> None:
    history = History(path)
    history.record(moment(10_000.0))
    history.record(moment(500.0))
    history.close()
    assert read_history(path)["time_s"].tolist() == [10_000.0, 500.0]


def test_a_reader_never_sees_moments_out_of_order_while_they_are_thinned_out(path: str) -> None:
    history, stop = History(path), threading.Event()

    def write() -> None:
        tick = 0
        while not stop.wait(0.0001):
            tick += 1
            history.record(moment(tick * 1e6, tick))

    history.record(moment(0.0))
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            rows = read_history(path)
            assert (np.diff(rows["num_samples"]) > 0).all()
            assert (rows["size_bytes"] == rows["num_samples"] * 100).all()
    finally:
        stop.set()
        writer.join(10)
    history.close()


@pytest.mark.parametrize("content", [b"", b"short", os.urandom(100_000)])
def test_a_file_that_is_no_history_reads_as_empty_and_is_made_anew(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    assert len(read_history(path)) == 0
    history = History(path)
    history.record(moment(1.0))
    history.close()
    assert read_history(path)["time_s"].tolist() == [1.0]


def test_a_writer_killed_within_an_edit_neither_hides_nor_blocks_what_was_recorded(path: str) -> None:
    history = History(path)
    history.record(moment(1.0, 7))
    history._head["edits"] += 1
    history.close()
    assert read_history(path)["num_samples"].tolist() == [7]
    history = History(path)
    history.record(moment(2.0, 8))
    history.close()
    assert read_history(path)["num_samples"].tolist() == [7, 8]


def test_no_file_is_no_history(tmp_path: Path) -> None:
    assert len(read_history(str(tmp_path / "none"))) == 0
