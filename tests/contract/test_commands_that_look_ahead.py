"""The commands that need no trainer: diagnose, plan, dashboard and demo."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from tests.contract.commands import DEADLINE_S, call, done, program, refused, told
from tests.contract.conftest import NUM_SAMPLES

MINE: Final = """
import time
import cachestream as cs
items = [{"x": i} for i in range(4000)]
def napping(sample):
    time.sleep(0.05)
    return sample
def far(rng):
    time.sleep(0.1)
    return {"x": 1.0}
def failing(sample):
    if sample["x"] % 2:
        raise ValueError("odd")
    return sample
def dropping(sample):
    return None
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the commands: a module of the user's, and 300 files of 20 kB."""
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "mine.py").write_text(MINE)
    (folder / "data").mkdir()
    (folder / "work").mkdir()
    for number in range(300):
        (folder / "data" / f"{number}.bin").write_bytes(bytes(20_000))
    return folder


# --- diagnose


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("source", "options", "binds"),
    [
        ("mine:items", ("--transform", "mine:napping"), "transform"),
        ("mine:far", (), "remote"),
    ],
)
def test_the_verdict_names_the_stage_that_holds_the_filling_up(
    source: str, options: tuple[str, ...], binds: str, folder: Path
) -> None:
    result = call("diagnose", source, *options, "--seconds", 0.6, "--workers", 2, "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["verdict"]["binds"] == binds
    assert report["verdict"]["what_next"]
    assert report["verdict"]["samples_per_s"] == min(filter(None, report["samples_per_s"].values()))
    stages = {"read", "decode", "transform", "pack", "write", "transfer"}
    assert report["samples_per_s"].keys() == stages
    assert report["stages"]["workers"] == 2
    assert "listing" in result.stderr
    assert "writing into a temporary folder" in result.stderr


def test_diagnose_measures_files_leaves_nothing_and_shows_it_in_eighty_columns(folder: Path) -> None:
    options = ("--seconds", 0.1, "--folder", folder / "work", "--source-option", "extensions=.bin")
    lines = done("diagnose", folder / "data", *options).splitlines()
    assert lines[0] == f"{folder / 'data'}: 300 units"
    assert "20 kB fetched for each" in " ".join(lines[1:3])
    assert [line.split()[0] for line in lines if re.match(r"\w+ +[\d.,]+ ", line)][:6] == [
        *("list", "read", "decode", "pack", "write", "transfer")  # there is no transform
    ]
    assert any(line.startswith("Verdict: ") for line in lines)
    assert max(map(len, lines[1:])) <= 80
    assert not list((folder / "work").iterdir())


def test_diagnose_counts_what_fails_and_refuses_where_nothing_is_left(folder: Path) -> None:
    report = told("diagnose", "mine:items", "--transform", "mine:failing", "--seconds", 0.1, cwd=folder)
    assert report["skipped"] > 0
    assert "ValueError: odd" in report["failure"]
    words = call("diagnose", "mine:items", "--transform", "mine:dropping", "--seconds", 0.1, cwd=folder)
    assert (words.returncode, words.stdout) == (1, "")
    assert "no usable sample; transform returned None for all" in words.stderr


def test_without_a_source_the_machine_is_checked(folder: Path) -> None:
    result = call("diagnose", "--json", "--folder", folder / "work", AWS_ACCESS_KEY_ID="canary-of-a-key")
    report = json.loads(result.stdout)
    names = ["versions", "compiled", "device", "filesystem", "space", "disk"]
    assert [check["name"] for check in report["checks"]] == names
    assert report["folder"] == str(folder / "work")
    assert result.returncode == (0 if report["ok"] else 1)
    assert report["ok"] == (not any(check["advice"] for check in report["checks"]))
    assert "canary" not in result.stdout + result.stderr
    assert not list((folder / "work").iterdir())
    shown = call("diagnose", cwd=folder / "work")
    assert sum(line.startswith(("OK ", "warning ")) for line in shown.stdout.splitlines()) == len(names)
    assert f"cachestream {cs.__version__}" in shown.stdout


# --- plan

RUN: Final = ("--size-limit", "20MB", "--batch-size", 32, "--step-time", 0.01, "--seconds", 0.4)


@pytest.mark.e2e
def test_a_run_is_forecast_with_its_egress_its_price_and_a_picture(folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    options = ("--days", 0.01, "--bandwidth", "4MB", "--price-per-gb", 0.1, "--turnover", 0.5)
    plan = told("plan", folder / "data", *RUN, *options, "--min-samples", 64, "-o", picture)
    forecast, setup = plan["forecast"], plan["forecast"]["setup"]
    assert (setup["num_samples"], setup["size_limit"], setup["batch_size"]) == (300, 20_000_000, 32)
    assert (setup["duration_s"], setup["turnover"], setup["min_samples"]) == (864.0, 0.5, 64)
    assert setup["fill_per_s"] == pytest.approx(200)  # 4 MB/s of files of 20 kB
    assert (forecast["seen_share"], forecast["full_s"]) == (1.0, None)
    assert forecast["fetched_bytes"] == pytest.approx(300 * 20_000)
    assert plan["price"] == pytest.approx(300 * 20_000 / 1e9 * 0.1)
    assert forecast["epochs"][0]["samples"] >= 64
    assert forecast["epochs"][-1]["samples"] == 300
    assert "<svg" in picture.read_text()


def test_a_cache_that_is_too_small_is_told_the_limit_that_would_hold_all(folder: Path) -> None:
    run = (*RUN[2:], "--size-limit", "3MB", "--days", 0.001)
    shown = done("plan", folder / "data", *run, "--samples", 3000)
    assert "remote       3,000 samples, 60 MB" in shown
    assert re.search(r"size_limit=6\d\.?\d* MB would hold all, and fetch each sample once", shown)
    assert "to pay" not in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diagnose", "DATA", "--workers", "0"], "--workers"),
        (["diagnose", "DATA", "--seconds", "inf"], "--seconds"),
        (["diagnose", "DATA", "--format", "zip"], "format='zip'"),
        (["diagnose", "DATA", "--transform", "json:missing"], "--transform='json:missing'"),
        (["diagnose", "--folder", "DATA/nothing"], "no such folder"),
        (["plan", "DATA"], "--size-limit"),
        (["plan", "DATA", *map(str, RUN), "--days", "inf"], "--days"),
        (["plan", "DATA", *map(str, RUN), "--step-time", "nan"], "--step-time"),
        (["plan", "DATA", *map(str, RUN), "--turnover", "2"], "--turnover"),
        (["plan", "DATA", *map(str, RUN), "--bandwidth", "much"], "--bandwidth='much'"),
        (["plan", "DATA", *map(str, RUN), "--size-limit", "300kB"], "a batch takes"),
        (["dashboard"], "CACHE"),
        (["dashboard", "DATA"], "holds no cache"),
        (["dashboard", "CACHE", "--port", "70000"], "--port"),
        (
            ["dashboard", "CACHE", "--host", "256.1.1.1", "--port", "0"],
            "--host 256.1.1.1: no server can listen",
        ),
        (["demo", "-o", "DATA/1.bin/x"], "give another --output"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_clear_message(arguments: list[str], words: str, folder: Path, filled: Path) -> None:
    places = {"DATA": str(folder / "data"), "CACHE": str(filled)}
    command = [re.sub("^(DATA|CACHE)", lambda found: places[found[0]], word) for word in arguments]
    assert words in refused(2, *command)


def test_what_draws_or_serves_names_the_extra_that_is_missing_before_any_work(
    folder: Path, filled: Path, tmp_path: Path
) -> None:
    script = (
        "import runpy, sys\n"
        "for name in ('matplotlib', 'matplotlib.figure', 'bokeh'): sys.modules[name] = None\n"
        "for command in map(str.split, sys.argv[1:]):\n"
        "    sys.argv = ['cachestream', *command]\n"
        "    try: runpy.run_module('cachestream', run_name='__main__')\n"
        "    except SystemExit as end: print(end.code)\n"
    )
    commands = [f"plot {filled}", f"plan {folder} --size-limit 1GB --batch-size 8 --step-time 1 -o p.png"]
    commands += [f"demo --output {tmp_path / 'demo'}", f"dashboard {filled}"]
    ended = subprocess.run(
        [sys.executable, "-c", script, *commands],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert ended.stdout.split() == ["2"] * 4
    lines = ended.stderr.splitlines()
    assert ["pip install 'cachestream[plot]'" in line for line in lines] == [True, True, True, False]
    assert "pip install 'cachestream[dashboard]'" in lines[-1]
    assert not (tmp_path / "demo").exists()


# --- dashboard


def get(url: str, **headers: str) -> tuple[int, str]:
    """The status and the text of the answer."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=DEADLINE_S
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def dashboard(filled: Path) -> Iterator[str]:
    """The URL of a page and of metrics; the program ends in order when it is told to."""
    with program("dashboard", filled, filled, "--port", 0, "--token", "a secret+&") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0


def test_nobody_reads_a_dashboard_without_its_token(dashboard: str) -> None:
    base, _, query = dashboard.partition("?")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", base)
    assert query == "token=a%20secret%2B%26"
    for address in (base, f"{base}?token=wrong", f"{base}metrics", f"{base}metrics?token=wrong"):
        code, text = get(address)
        assert (code, "needs its token" in text) == (403, True), address
    assert get(f"{base}metrics", Authorization="Bearer wrong")[0] == 403
    assert get(dashboard)[0] == get(f"{base}metrics?{query}")[0] == 200
    assert get(f"{base}metrics", Authorization="Bearer a secret+&")[0] == 200


@pytest.mark.e2e
def test_the_metrics_are_those_of_the_guide_with_the_values_of_the_status(
    dashboard: str, filled: Path
) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    text = get(dashboard.replace("/?", "/metrics?"))[1]
    found: dict[str, Any] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels == {"cache": str(filled)}
            assert sample.name not in found, "a cache that is named twice is shown once"
            found[sample.name] = sample.value
    with cs.Cache(filled) as cache:
        status = cache.status()
    assert found == {
        "cachestream_cache_up": 1,
        "cachestream_cache_bytes": status.size_bytes,
        "cachestream_cache_limit_bytes": 4_000_000,
        "cachestream_cache_samples": NUM_SAMPLES,
        "cachestream_cache_shards": status.num_shards,
        "cachestream_cache_leased_bytes": 0,
        "cachestream_cache_held_out_samples": 0,
        "cachestream_cache_evicted_samples_total": 0,
        "cachestream_cache_evicted_unused_samples_total": 0,
        "cachestream_cache_failed_samples_total": 0,
        "cachestream_cache_quarantined_shards_total": 0,
        "cachestream_cache_snapshots_total": status.snapshots,
        "cachestream_cache_epoch_waits_total": 0,
        "cachestream_fill_pass": 1,
        "cachestream_fill_pass_done_ratio": 1,
        "cachestream_worker_up": 0,
    }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a socket that Tornado leaves
def test_a_port_that_is_taken_is_named_and_a_cache_of_another_version_too(
    dashboard: str, filled: Path, new_path: Callable[[], Path]
) -> None:
    port = dashboard.partition("/?")[0].rpartition(":")[2]
    assert f"--port {port} of 127.0.0.1 is in use" in refused(2, "dashboard", filled, "--port", port)
    gc.collect()
    newer = new_path()
    with contextlib.closing(sqlite3.connect(newer / "catalogue.sqlite")) as catalogue:
        catalogue.execute("PRAGMA user_version = 9999")
        catalogue.execute("CREATE TABLE of_that_version (x)")  # the number alone might be a flipped bit
    assert "upgrade cachestream or use another directory" in refused(1, "dashboard", newer, "--port", 0)
    assert "upgrade cachestream or use another directory" in refused(1, "status", newer)


# --- demo


@pytest.mark.e2e
def test_the_demo_trains_draws_and_leaves_only_its_picture_and_log(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    with program("demo", "--output", tmp_path / "out", "--keep", TMPDIR=str(work)) as process:
        shown, words = process.communicate(timeout=280)
    assert process.returncode == 0, words
    lines = shown.splitlines()
    epochs = [line.split() for line in lines if re.match(r" +\d+ +[\d,]+ +[\d,]+ ", line)]
    assert [epoch[0] for epoch in epochs] == [str(number) for number in range(1, 11)]
    assert epochs[-1][3] == "100%"
    with Image.open(tmp_path / "out" / "demo.png") as picture:
        assert min(picture.size) > 600
    (kept,) = work.glob("cachestream-demo-*")
    status = told("status", kept / "cache")
    assert status["size_bytes"] <= status["size_limit"]
    assert status["evicted_samples"] > 0
    assert status["worker"] is None
    assert np.isfinite(float(epochs[-1][-1].rstrip("%")))
    assert tempfile.gettempdir() != str(work)
