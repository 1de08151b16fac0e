"""The commands `worker` and `stop`: each option makes the difference that its help names, from flags or the environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import xxhash
from PIL import Image

import cachestream as cs
from tests.contract.commands import DEADLINE_S, call, done, program, refused, told

MINE: Final = """
import numpy
items = [{"x": i} for i in range(24)]
ragged = [{"x": numpy.zeros(n, numpy.float32)} for n in range(4)]
def even(sample):
    return sample if sample["x"] % 2 == 0 else None
def odd_only(sample):
    if sample["x"] % 2:
        return sample
    raise ValueError("even!")
def nothing(sample):
    return None
def backwards(progress):
    return range(1, 25)
def endless(rng):
    return {"x": rng.random(2000)}
"""
SMALL: Final = ("--workers", 1, "--size-limit", "4MB", "--min-free", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the commands: a module of the user's, and a few pictures in two classes."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    for number in range(12):
        path = folder / "images" / ("cats", "dogs")[number % 2] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 32, 3), number, np.uint8)).save(path)
    (folder / "images" / "notes.txt").write_text("not a picture")
    return folder


def samples(path: Path, name: str = "x", **options: Any) -> list[Any]:
    """The values of a field, in the order of the shards."""
    with cs.Cache(path) as cache, cache.snapshot(**options) as dataset:
        return [dataset[i][name] for i in range(len(dataset))]


def test_a_worker_fills_the_cache_as_its_options_say_and_says_so_on_stderr(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cache"
    options = ("--eviction", "fifo", "--shard-size", "8KB", "--order", "sequential", "--holdout", 0.25)
    images = ("--format", "files", "--resize", "12x24", "--crop", 8, "--source-option", "extensions=.png")
    first = call("worker", folder / "images", path, *SMALL, *options, *images)
    assert (first.returncode, first.stdout) == (0, "")
    assert first.stderr.startswith("12 samples in ")
    assert ", complete, pass 1 100%" in first.stderr
    status = told("status", path)
    assert (status["size_limit"], status["min_free"], status["eviction"]) == (4_000_000, 0, "fifo")
    assert (status["num_samples"], status["skipped"], status["worker"]) == (12, 0, None)
    assert status["schema"] == "{image: uint8[3, 8, 8], label: int64[]}"
    assert status["holdout"] == 0.25
    with cs.Cache(path) as cache:
        with cs.EpochLoader(cache, 12, with_keys=True, split="train", drop_last=False) as loader:
            trained = {key for batch in loader for key in batch["__key__"]}
        keys = [f"{('cats', 'dogs')[n % 2]}/{n:02}.png" for n in range(12)]
        assert trained == {key for key in keys if xxhash.xxh3_64_intdigest(key.encode()) >= 0.25 * 2**64}
        source = cs.open_source(
            folder / "images", format="files", resize=(12, 24), crop=8, extensions=[".png"]
        )
        with cs.start_worker(cache, source, num_workers=1) as worker:  # another source would be refused
            assert worker.wait(DEADLINE_S)
        assert cache.num_samples == 12


@pytest.mark.e2e
def test_a_transform_a_curriculum_and_a_partition_are_those_of_the_users_module(
    folder: Path, tmp_path: Path
) -> None:
    fill = ("worker", "mine:items", tmp_path / "even", *SMALL, "--transform", "mine:even")
    done(*fill, "--order", "mine:backwards", cwd=folder)
    assert sorted(map(int, samples(tmp_path / "even"))) == list(range(0, 24, 2))
    parts = []
    for node in range(2):
        path = tmp_path / f"{node}"
        done(
            "worker",
            "mine:items",
            path,
            *SMALL,
            "--partition",
            f"{node}/2",
            "--order",
            "sequential",
            cwd=folder,
        )
        parts.append(list(map(int, samples(path))))
    assert [len(part) for part in parts] == [12, 12]
    assert sorted(parts[0] + parts[1]) == list(range(24))


def test_a_cache_that_is_full_stops_the_worker_if_it_is_told_to(folder: Path, tmp_path: Path) -> None:
    endless = ("worker", "mine:endless", tmp_path / "c", "--workers", 1, "--min-free", 0)
    result = call(*endless, "--size-limit", "1MB", "--when-full", "stop", "--shard-size", "64KB", cwd=folder)
    assert result.returncode == 0
    assert "full" in result.stderr
    status = told("status", tmp_path / "c")
    assert (status["fill_state"], status["evicted_shards"]) == ("full", 0)
    assert 500_000 < status["size_bytes"] <= 1_000_000


def test_what_was_skipped_is_told_with_its_reason_and_a_worker_that_kept_nothing_is_a_problem(
    folder: Path, tmp_path: Path
) -> None:
    fill, trace = ("worker", "mine:items", tmp_path / "odd", *SMALL), tmp_path / "fill.json"
    result = call(*fill, "--transform", "mine:odd_only", "--trace", trace, cwd=folder)
    assert result.returncode == 0
    assert "12 skipped, most often: transform: ValueError: even! (first: " in result.stderr
    assert json.loads(trace.read_text())["traceEvents"]
    assert "12 × transform: ValueError: even!" in done("status", tmp_path / "odd", COLUMNS="200")
    words = refused(
        1, "worker", "mine:items", tmp_path / "none", *SMALL, "--transform", "mine:nothing", cwd=folder
    )
    assert "transform returned None for 24 samples, which leaves them out" in words


@pytest.mark.e2e
def test_the_environment_gives_options_and_arguments_win(folder: Path, tmp_path: Path) -> None:
    environment = {
        "CACHESTREAM_WORKER_SIZE_LIMIT": "3MB",
        "CACHESTREAM_WORKER_WORKERS": "1",
        "CACHESTREAM_WORKER_MIN_FREE": "5MB",
        "CACHESTREAM_WORKER_SEED": "3",
        "CACHESTREAM_WORKER_TRANSFORM": "mine:even",
    }
    first, second, third = (tmp_path / name for name in "123")
    done("worker", "mine:items", cwd=folder, CACHESTREAM_CACHE=str(first), **environment)
    status = told("status", first)
    assert (status["size_limit"], status["min_free"], status["num_samples"]) == (3_000_000, 5_000_000, 12)
    done("worker", "mine:items", second, "--size-limit", "2MB", "--seed", 4, cwd=folder, **environment)
    assert told("status", second)["size_limit"] == 2_000_000
    done("worker", "mine:items", third, *SMALL, "--transform", "mine:even", "--seed", 3, cwd=folder)
    orders = [list(map(int, samples(path))) for path in (first, second, third)]
    assert orders[0] == orders[2] != orders[1]
    assert list(range(0, 24, 2)) == sorted(orders[0]) == sorted(orders[1]) not in orders


@pytest.mark.e2e
def test_a_detached_worker_goes_on_alone_is_seen_and_is_stopped(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    fill = ("worker", "mine:endless", path, "--size-limit", "100MB", "--min-free", 0, "--detach")
    started = subprocess.run(
        [
            sys.executable,
            "-m",
            "cachestream",
            *map(str, fill),
            "--workers",
            "2",
            "--bandwidth-limit",
            "40MB/s",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    try:
        assert started.stdout == ""
        assert f"filling {path} in the background; see: cachestream status {path}" in started.stderr
        with cs.Cache(path) as cache:
            assert cache.wait(50, timeout_s=DEADLINE_S) >= 50
        worker = told("status", path)["worker"]
        assert len(worker["states"]) == 2
        assert worker["bandwidth_bytes_per_s"] == 40_000_000
        assert worker["pid"] != os.getpid()
        assert "a worker is filling" in refused(1, "clear", path)
    finally:
        stopped = call("stop", path, "--timeout", 60)
    assert (stopped.returncode, stopped.stdout) == (0, "")
    assert stopped.stderr.startswith("stopped: ")
    status = told("status", path)
    assert (status["fill_state"], status["worker"]) == ("stopped", None)
    assert stopped.stderr.startswith(f"stopped: {status['num_samples']} samples in ")
    assert call("stop", path).stderr == f"no worker is running for {path}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.e2e)])
def test_an_interrupted_worker_keeps_what_it_has_and_goes_on_with_the_rest(
    number: signal.Signals, tmp_path: Path
) -> None:
    files, path = tmp_path / "files", tmp_path / "cache"
    files.mkdir()
    for i in range(40):
        np.save(files / f"{i:02}.npy", np.full(250, i, np.int64))
    fill = (
        "worker",
        files,
        path,
        "--size-limit",
        "4MB",
        "--min-free",
        0,
        "--workers",
        1,
        "--shard-size",
        "4KB",
    )
    with program(*fill, "--bandwidth-limit", "2kB/s") as process:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (path / "cache.json").exists() or not told("status", path)["num_samples"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(number)
        _, words = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number
    assert "Traceback" not in words
    status = told("status", path)
    assert 0 < status["num_samples"] < 40
    assert (status["fill_state"], status["worker"]) == ("stopped", None)
    done(*fill)
    assert sorted(int(array[0]) for array in samples(path, "array")) == list(range(40))
    assert told("verify", path)["ok"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere://bucket"], "nowhere"),
        (["no_such_module:thing"], "SOURCE='no_such_module:thing' cannot be loaded"),
        (["mine:items", "--size-limit", "much"], "size_limit='much'"),
        (["mine:items", "--size-limit", "10"], "too small"),
        (["mine:items", "--min-free", "much"], "min_free='much'"),
        (["mine:items", "--eviction", "oldest"], "eviction='oldest'"),
        (["mine:items", "--workers", "0"], "--workers"),
        (["mine:items", "--transform", "mine:missing"], "--transform='mine:missing' cannot be loaded"),
        (["mine:items", "--shard-size", "much"], "shard_size='much'"),
        (["mine:items", "--order", "backwards"], "order='backwards'"),
        (["mine:items", "--seed", "x"], "--seed"),
        (["mine:items", "--bandwidth-limit", "0"], "bandwidth_limit"),
        (["mine:items", "--when-full", "explode"], "when_full='explode'"),
        (["mine:items", "--partition", "2/2"], "node i of n, counted from 0"),
        (["mine:items", "--engine", "steam"], "engine='steam'"),
        (["mine:items", "--ray-option", "num_cpus=2"], "engine='ray'"),
        (["mine:items", "--share", "a", "--replicas", "2"], "--replicas"),
        (["mine:items", "--share", "a", "--exchange", "0.5"], "--exchange"),
        (["mine:items", "--share-required"], "share="),
        (["mine:items", "--trace", "t.json", "--detach"], "leave --detach out"),
        (["images", "--resize", "large"], "--resize 'large': give pixels"),
        (["images", "--crop", "0"], "crop=0: give a number of pixels above 0"),
        (["images", "--format", "zip"], "format='zip': give one of"),
        (["images", "--source-option", "colour=red"], "no argument 'colour'"),
        (["images", "--source-option", "colour"], "--source-option: give KEY=VALUE"),
        (["images", "--storage-option", "a=1", "--storage-option", "a.b=2"], "'a' has a value already"),
        (["images", "--frob"], "--frob"),
        ([], "SOURCE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_clear_message_and_makes_no_cache(
    arguments: list[str], words: str, folder: Path, tmp_path: Path
) -> None:
    environment = {"CACHESTREAM_CACHE": str(tmp_path / "c"), "COLUMNS": "500"}
    assert words in refused(2, "worker", *arguments, cwd=folder, **environment)
    assert not (tmp_path / "c").exists()


def test_a_source_that_is_not_there_is_a_problem_and_a_mistyped_cache_is_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such"
    assert f"{missing}: no such file or folder" in refused(1, "worker", missing, tmp_path / "c")
    assert "holds no cache" in refused(2, "stop", tmp_path / "c")
    assert "--timeout" in refused(2, "stop", tmp_path / "c", "--timeout", "nan")
    assert not (tmp_path / "c").exists()


def test_a_value_for_a_driver_is_in_no_message(tmp_path: Path) -> None:
    for wrong in ("=canary", "canary", "secret=canary"):
        result = call("worker", "s3://bucket:bad/x", tmp_path / "c", "--storage-option", wrong)
        assert result.returncode in (1, 2)
        assert "canary" not in result.stderr + result.stdout


def test_every_command_explains_itself_in_eighty_columns() -> None:
    listed = done("--help")
    for command in (
        *("worker", "stop", "status", "limit", "evict", "clear", "verify", "refetch", "plot", "bench"),
        *("diagnose", "plan", "dashboard", "demo"),
    ):
        assert f"\n  {command} " in listed
        words = done(command, "--help", COLUMNS="80")
        assert words.splitlines()[0].partition("cachestream ")[2].startswith(f"{command} [OPTIONS]")
        assert max(map(len, words.splitlines())) <= 80
    assert "CACHESTREAM_WORKER_SIZE_LIMIT" in done("worker", "--help")
    assert "frobnicate" in refused(2, "frobnicate")
    assert torch.__version__ in done("--version")
