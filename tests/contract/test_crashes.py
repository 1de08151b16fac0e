"""The Nth change of a cache's files fails, or kills its process, for every N: nothing torn, lost, double or over the limit.

The faults come from outside, by a library that is preloaded (`faulty_files.c`): they know files and no names of ours.
`make test` takes a few N of each scenario, another seed every day; `make soak` all.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import torch

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, bytes_on_disk
from tests.contract.crash_scenarios import SCENARIOS, fill

SOURCE: Final = Path(__file__).with_name("faulty_files.c")
ROOT: Final = Path(__file__).parents[2]
KILL: Final = 0
WAYS: Final = {
    "killed": (KILL, False),
    "EIO": (errno.EIO, False),
    "ENOSPC": (errno.ENOSPC, False),
    "broken": (errno.EIO, True),
}
SEED: Final = os.environ.get("CRASH_SEED", time.strftime("%Y%m%d"))
# Fewer than the changes that each scenario makes: counting them takes another run of it.
CHANGES: Final = {"fill": 800, "train": 30, "lower": 60, "evict": 45, "repair": 60}

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or shutil.which("gcc") is None, reason="needs gcc"
    ),
    pytest.mark.timeout(600),
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scenario under a fault: the changes of files that were begun, the error that it told, and how it ended."""

    changes: int
    told: str
    code: int
    stderr: str


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`faulty_files.c`, compiled."""
    built = tmp_path_factory.mktemp("faulty") / "faulty_files.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", built, SOURCE, "-ldl"], check=True)
    return built


def run(
    scenario: str,
    path: Path,
    library: Path,
    at: int,
    way: tuple[int, bool] = (KILL, False),
    *,
    call: str = "",
    folder: Path | None = None,
) -> Outcome:
    """Run a scenario on the cache at `path`; its change number `at` (0: none), by `call` and in `folder`, fails.

    The file `changes` beside the cache lists them.
    """
    steps = path.with_name("steps")
    steps.write_bytes(bytes(8))
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "FAULTY_FOLDER": str(folder or path),
        "FAULTY_STEPS": str(steps),
        "FAULTY_AT": str(at),
        "FAULTY_CALL": call,
        "FAULTY_ERROR": str(way[0]),
        "FAULTY_ON": str(int(way[1])),
        "FAULTY_LOG": str(path.with_name("changes")),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.contract.crash_scenarios", scenario, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    changes = int.from_bytes(steps.read_bytes(), sys.byteorder)
    return Outcome(changes, done.stdout.strip(), done.returncode, done.stderr[-3000:])


def prepare(scenario: str, path: Path) -> None:
    """Give a copy of the filled cache what the scenario is about."""
    if scenario == "fill":
        with cs.Cache(path) as cache:
            cache.clear()
    if scenario == "repair":
        first, second, *_ = sorted((path / "shards").rglob("*.safetensors"))
        first.write_bytes(first.read_bytes()[:-100])
        second.unlink()


def check(scenario: str, path: Path, outcome: Outcome, limit_bytes: int) -> None:
    """The cache after the fault, without it: sound, within its limit, and whole where nothing was to be evicted."""
    assert bytes_on_disk(path) <= limit_bytes
    assert outcome.code in {0, -9, 137}, f"no error of cachestream's: {outcome.stderr}"
    with cs.Cache(path) as cache:
        cache.verify(repair=True)
        assert cache.verify().problems == 0
    if scenario == "lower" and not outcome.told and outcome.code == 0:
        assert bytes_on_disk(path) <= 1_000_000
    before = numbers_in(path)
    assert len(before) == len(set(before)), "a sample is there twice"
    if scenario == "train":
        assert before == list(range(NUM_SAMPLES)), "a sample that was cached is gone"
    if scenario == "fill":
        fill(path, timeout_s=120)
        assert numbers_in(path) == list(range(NUM_SAMPLES)), "not every sample exactly once"
    with cs.Cache(path) as cache:
        status = cache.status()
        assert (status.leases, status.reserved_bytes) == (0, 0)
        assert bytes_on_disk(path) <= max(cache.size_limit, 1_000_000)


def numbers_in(path: Path) -> list[int]:
    """The numbers of the samples that are cached, sorted; every sample is whole."""
    with cs.Cache(path) as cache:
        if not cache.num_samples:
            return []
        with cache.snapshot() as dataset:
            whole = dataset[:]
    assert torch.equal(whole["x"], whole["number"][:, None].expand(-1, 1024).float())
    return sorted(whole["number"].tolist())


def crash(scenario: str, new_path: Callable[[], Path], library: Path, way: str, at: int) -> Outcome:
    path = new_path()
    prepare(scenario, path)
    with cs.Cache(path) as cache:
        limit_bytes = cache.size_limit
    outcome = run(scenario, path, library, at, WAYS[way])
    try:
        check(scenario, path, outcome, limit_bytes)
    except (AssertionError, cs.CacheStreamError) as error:
        raise AssertionError(f"{scenario}, {way} at change {at} (seed {SEED}), {outcome}: {error}") from error
    shutil.rmtree(path)
    return outcome


@pytest.fixture(scope="session")
def num_changes(
    filled: Path, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], int]:
    """The changes of files that a scenario makes without a fault."""
    known: dict[str, int] = {}

    def count(scenario: str) -> int:
        if scenario not in known:
            path = tmp_path_factory.mktemp("counted") / "cache"
            shutil.copytree(filled, path)
            prepare(scenario, path)
            outcome = run(scenario, path, library, 0)
            assert (outcome.code, outcome.told) == (0, ""), outcome
            known[scenario] = outcome.changes
        return known[scenario]

    return count


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, marks=[pytest.mark.e2e] if one in {"evict", "repair"} else []) for one in SCENARIOS],
)
def test_a_change_that_fails_or_kills_tears_loses_and_doubles_nothing(
    scenario: str, new_path: Callable[[], Path], library: Path
) -> None:
    draw = random.Random(f"{SEED} {scenario}")
    way, at = draw.choice(sorted(WAYS)), draw.randint(1, CHANGES[scenario])
    assert crash(scenario, new_path, library, way, at).changes >= at


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_change_that_fails_or_kills_tears_loses_and_doubles_nothing(
    scenario: str, way: str, new_path: Callable[[], Path], library: Path, num_changes: Callable[[str], int]
) -> None:
    for at in range(1, num_changes(scenario) + 1):
        crash(scenario, new_path, library, way, at)


@pytest.mark.e2e
def test_a_process_that_is_killed_as_a_shard_gets_its_name_costs_no_sample(
    new_path: Callable[[], Path], library: Path
) -> None:
    path, at = new_path(), 9
    prepare("fill", path)
    outcome = run("fill", path, library, at, call="rename", folder=path / "shards")
    assert outcome.changes >= at
    check("fill", path, outcome, 4_000_000)


@pytest.mark.e2e
def test_a_disk_that_fails_as_an_old_request_is_removed_is_an_error_of_the_package(
    new_path: Callable[[], Path], library: Path
) -> None:
    path = new_path()
    prepare("fill", path)
    outcome = run("fill", path, library, 1, WAYS["EIO"], call="unlink", folder=path / "worker")
    assert outcome.code == 0, outcome.stderr
    assert outcome.told.startswith(f"DiskFailedError: {path / 'worker' / 'stop'}: Input/output error")
    check("fill", path, outcome, 4_000_000)


@pytest.mark.e2e
def test_settings_are_on_the_disk_before_they_take_the_place_of_the_old_ones(
    new_path: Callable[[], Path], library: Path
) -> None:
    path = new_path()
    assert not run("lower", path, library, 0).told
    changes = [line.split(" ", 2) for line in path.with_name("changes").read_text().splitlines()]
    replaced = [
        i for i, (_, call, file) in enumerate(changes) if "rename" in call and file.endswith("/cache.json")
    ]
    assert replaced
    for i in replaced:
        last = next(call for process, call, _ in reversed(changes[:i]) if process == changes[i][0])
        assert last in {"fsync", "fdatasync"}, changes[:i]
