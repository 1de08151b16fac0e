"""Reports of loaders: whole, of live processes only, and no reason for a training to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cachestream import Cache
from cachestream.errors import CacheFullError
from cachestream.storage.locks import HeldFile
from cachestream.storage.telemetry import LoaderFile, LoaderReport, read_loaders

ROOT = Path(__file__).parents[2]
REPORT = LoaderReport(
    *(3, 64, 4, 500, 50, 0, 1.0, 0.5, 0.5, 0.0, 8.0, 1.0, 0.1),
    pid=9,
    rank=1,
    ranks=2,
    reported_s=5.0,
    epochs=((2, 60, 1.5), (3, 64, 2.5)),
)
KILLED = """
import sys
from cachestream import Cache
from tests.storage.test_loader_files import REPORT, LoaderFile
file = LoaderFile(Cache(sys.argv[1]).directory)
file.write(REPORT)
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", size_limit="10MB", min_free=0) as made:
        yield made


def files(cache: Cache) -> list[str]:
    return [name for name in os.listdir(cache.directory.worker) if name.startswith("loader-")]


def test_a_report_is_read_as_it_was_written_until_its_loader_is_closed(cache: Cache) -> None:
    file = LoaderFile(cache.directory)
    assert read_loaders(cache.directory) == []
    file.write(REPORT)
    assert read_loaders(cache.directory) == [REPORT]
    assert cache.status().loaders == (REPORT,)
    file.close()
    file.write(REPORT)
    assert (read_loaders(cache.directory), files(cache)) == ([], [])


def test_a_report_is_there_while_the_next_one_is_written(cache: Cache) -> None:
    """Longer and shorter ones in turns, by another thread, which may be interrupted between any two calls."""
    file, short, ended = LoaderFile(cache.directory), replace(REPORT, epochs=()), threading.Event()
    file.write(REPORT)

    def write() -> None:
        while not ended.is_set():
            file.write(short)
            file.write(REPORT)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [read_loaders(cache.directory) for _ in range(500)]
    finally:
        ended.set()
        writer.join()
    assert all(one in ([REPORT], [short]) for one in found)


def test_a_loader_that_is_dropped_takes_its_report_along(cache: Cache) -> None:
    file = LoaderFile(cache.directory)
    file.write(REPORT)
    del file
    assert files(cache) == []


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["another loader", "recovery"])
def test_the_report_of_a_killed_process_is_not_shown_and_goes(cache: Cache, how: str) -> None:
    command = [sys.executable, "-c", KILLED, cache.path]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        assert read_loaders(cache.directory) == [REPORT]
        process.send_signal(signal.SIGKILL)
    assert read_loaders(cache.directory) == []
    assert len(files(cache)) == 1
    if how == "recovery":
        cache.recover()
    else:
        other = LoaderFile(cache.directory)
        other.write(REPORT)
        other.close()
    assert files(cache) == []


@pytest.mark.parametrize(
    "torn", [b"", b'{"pid": 9, "ra', b"[1]", b'{"epochs": []}', b'{"epochs": [[1]]}', b"\xff"]
)
def test_a_report_that_is_being_written_is_left_out(cache: Cache, torn: bytes) -> None:
    file = LoaderFile(cache.directory)
    file.write(REPORT)
    (name,) = files(cache)
    Path(cache.directory.worker_file(name)).write_bytes(torn)
    assert read_loaders(cache.directory) == []
    file.close()


def test_a_disk_that_refuses_a_report_ends_the_reports_and_nothing_else(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: HeldFile, data: bytes) -> None:
        raise CacheFullError("no space")

    monkeypatch.setattr(HeldFile, "write", refuse)
    file = LoaderFile(cache.directory)
    file.write(REPORT)
    monkeypatch.undo()
    file.write(REPORT)
    assert files(cache) == []
