"""A trace: one valid file with the work of all processes on one clock, whatever ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from cachestream import ConfigError, tracing
from cachestream.training.batches import memory
from tests.cli.support import cli, done
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, sampling_pids, wait_until

Event = dict[str, Any]


def events_of(path: Path) -> tuple[list[Event], dict[tuple[str, int, int], str]]:
    """The spans of a trace, and its names by (kind, process, thread)."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    return [e for e in events if e["ph"] == "X"], names


def nested(spans: list[Event]) -> bool:
    """Whether of the spans of one thread any two are apart, or one within the other."""
    open_until: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while open_until and open_until[-1] <= span["ts"] + 0.2:  # a tenth of a microsecond is the last digit
            open_until.pop()
        if open_until and span["ts"] + span["dur"] > open_until[-1] + 0.2:
            return False
        open_until.append(span["ts"] + span["dur"])
    return True


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (160, 160, 3), np.uint8)
    for number in range(120):
        Image.fromarray(np.roll(pixels, number, 0)).save(folder / f"{number:03}.jpg")
    return folder


def halved(batch: Any) -> Any:
    time.sleep(0.001)
    return batch


@pytest.mark.e2e
def test_a_trace_shows_every_stage_of_all_processes_on_one_clock(tmp_path: Path, photos: Path) -> None:
    def later(sample: dict[str, Any]) -> dict[str, Any]:  # sent by value: processes need not load this module
        time.sleep(0.001)
        return sample

    path, began_s = tmp_path / "run.json", time.monotonic()
    with cs.trace(path) as trace:
        assert repr(trace) == f"<Trace {path}>"
        options: dict[str, Any] = {"size_limit": "50MB", "batch_size": 8, "transform": later}
        with cs.stream(photos, cache=tmp_path / "cache", num_workers=2, **options) as loader:
            while sum(len(batch["image"]) for batch in loader) < 112:
                time.sleep(0.05)
            cache = loader.cache
            assert cache.status().fill_state in ("filling", "complete")
            with cs.EpochLoader(cache, 8, batch_transform=halved) as other:
                assert sum(len(batch["image"]) for batch in other) >= 112
    spans, names = events_of(path)
    processes = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
    assert sorted(processes.values()) == ["main process", "sampler 0", "sampler 1"]
    main = os.getpid()
    here, there = ({e["name"] for e in spans if (e["pid"] == main) is mine} for mine in (True, False))
    assert {"list", "snapshot", "prepare", "wait", "transform"} <= here
    assert {"read", "decode", "transform", "pack", "publish"} <= there
    assert Counter(e["name"] for e in spans)["decode"] == 120
    assert {("thread_name", e["pid"], e["tid"]) for e in spans} <= names.keys()
    assert all(1e6 * began_s <= e["ts"] <= e["ts"] + e["dur"] <= 1e6 * time.monotonic() for e in spans)
    assert all(e["dur"] >= 99.0 for e in spans)
    for thread in {(e["pid"], e["tid"]) for e in spans}:
        assert nested([e for e in spans if (e["pid"], e["tid"]) == thread])
    first = {name: min(e["ts"] for e in spans if e["name"] == name) for name in ("list", "read", "publish")}
    assert first["list"] < first["read"] < first["publish"]
    assert not tracing.is_on()
    assert sorted(os.listdir(tmp_path)) == ["cache", "photos", "run.json"]


@pytest.mark.e2e
def test_batches_that_threads_in_c_gather_are_shown_in_those_threads(tmp_path: Path) -> None:
    if memory.in_c is None:
        pytest.skip("needs the part in C")
    path, rows = tmp_path / "run.json", {"x": np.zeros(250_000, np.float32)}
    with cs.Cache(tmp_path / "cache", size_limit="200MB", min_free=0) as cache:
        source = cs.CallableSource(lambda _: rows, num_units=64)
        with cs.start_worker(cache, source, num_workers=1) as worker:
            assert worker.wait(DEADLINE_S)
        with cs.EpochLoader(cache, 8) as loader:
            list(loader)
            with cs.trace(path):
                list(loader)
                list(loader)
    spans, names = events_of(path)
    gathered = [e for e in spans if names["thread_name", e["pid"], e["tid"]] == "gathering in C"]
    assert {e["name"] for e in gathered} == {"gather"}
    assert 1 <= sum(e["args"]["batches"] for e in gathered) <= 16


@pytest.mark.e2e
def test_the_trace_of_a_worker_whose_process_is_killed_is_valid(tmp_path: Path) -> None:
    path, source = tmp_path / "run.json", Numbers(600, pause_s=0.05)
    cache = cs.Cache(tmp_path / "cache", size_limit="50MB", min_free=0)
    with cs.trace(path), cache, cs.start_worker(cache, source, num_workers=2) as worker:
        cache.wait(1, DEADLINE_S)
        killed = sampling_pids(cache)
        part = Path(tracing.folder(), f"{killed[0]}.jsonl")
        wait_until(lambda: part.exists() and '"X"' in part.read_text(), "it has written events")
        os.kill(killed[0], signal.SIGKILL)
        wait_until(lambda: set(sampling_pids(cache)) - set(killed), "another takes its place")
        assert worker.wait(DEADLINE_S)
    spans, _ = events_of(path)
    assert killed[0] in {e["pid"] for e in spans}
    assert len({e["pid"] for e in spans}) >= 3


def test_a_trace_that_cannot_be_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "run.json"):
        with pytest.raises(ConfigError, match=path.name):
            cs.trace(path)
    with cs.trace(tmp_path / "run.json") as trace, pytest.raises(ConfigError, match="traced already"):
        cs.trace(tmp_path / "other.json")
    written = (tmp_path / "run.json").read_text()
    trace.close()
    assert (tmp_path / "run.json").read_text() == written
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.e2e
def test_a_trace_that_nobody_closes_is_written_at_the_end_of_the_process(tmp_path: Path) -> None:
    script = "import sys, time, cachestream as cs\ntrace = cs.trace(sys.argv[1])\nfrom cachestream import tracing\nwith tracing.span('nap'): time.sleep(0.01)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run.json")], check=True, timeout=DEADLINE_S)
    spans, names = events_of(tmp_path / "run.json")
    assert [e["name"] for e in spans] == ["nap"]
    assert set(names.values()) == {"main process", "MainThread"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns where threads run
def test_a_forked_child_adds_nothing_and_ends_nothing(tmp_path: Path) -> None:
    with cs.trace(tmp_path / "run.json") as trace:
        child = os.fork()
        if child == 0:
            try:
                tracing.add("child", 0.0, 1.0)
                trace.close()
                os._exit(tracing.is_on())
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        tracing.add("parent", 0.0, 1.0)
    assert [e["name"] for e in events_of(tmp_path / "run.json")[0]] == ["parent"]


def test_threads_that_record_at_once_lose_nothing_and_a_trace_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(name: str) -> None:
        for number in range(1_000):
            tracing.add(name, number, number + 0.5, number=number)

    def trace_of(path: Path) -> Counter[str]:
        with cs.trace(path):
            threads = [threading.Thread(target=record, args=(f"thread {n}",)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return Counter(e["name"] for e in events_of(path)[0])

    assert trace_of(tmp_path / "run.json") == {f"thread {n}": 1_000 for n in range(4)}
    monkeypatch.setattr(tracing, "_MOST_EVENTS", 100)
    assert trace_of(tmp_path / "less.json").total() == 100
    assert "leaves out 3900 events" in caplog.text


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_a_command_is_traced_and_one_that_goes_on_alone_is_not(tmp_path: Path, photos: Path) -> None:
    path, cache = tmp_path / "fill.json", tmp_path / "cache"
    options = ("--size-limit", "50MB", "--workers", "1", "--trace", path)
    refused = cli("worker", photos, cache, *options, "--detach")
    assert refused.returncode == 2
    assert "leave --detach out" in refused.stderr
    done(cli("worker", photos, cache, *options))
    assert {"list", "read", "decode", "pack", "publish"} <= {e["name"] for e in events_of(path)[0]}
    done(cli("bench", cache, "--seconds", "0.1", "--trace", tmp_path / "bench.json"))
    assert "prepare" in {e["name"] for e in events_of(tmp_path / "bench.json")[0]}
