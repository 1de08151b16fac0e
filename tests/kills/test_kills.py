"""Random SIGKILLs of everything, while a cache is filled, evicts and is trained on: nothing torn, lost or twice.

A failure prints its seed. Replay with KILLS_SEED=<seed> (and KILLS=<number>); the order of events between
processes is not part of the seed, the victims and the pauses are.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.errors import CacheStreamError
from cachestream.storage.locks import is_held
from cachestream.storage.reservations import room_in
from cachestream.worker.worker import Worker
from tests.kills.scanner import Numbers, scanning
from tests.worker.sources import Named
from tests.worker.support import ROOT, TOKEN, Processes, failures_of, left_files, only_once, wait_until

MB: Final = 1_000_000
SOURCE: Final = Named(units=700, samples=3, nbytes=8_000, pause_s=0.004)  # 17 MB
LIMITS: Final = (5 * MB, 9 * MB)
LAST_LIMIT: Final = 60 * MB
# How often each is to die, and what names it: the process itself, or the command that it is still beginning with.
ROLES: Final = {"sampling process": 5, "fork server": 1, "supervisor": 3, "trainer": 2}
NAMES: Final = {b"cs-sampler": "sampling process", b"cs-forkserver": "fork server"}
COMMANDS: Final = {
    b"cachestream.worker.sampling.sampler": "sampling process",
    b"cachestream.worker.supervisor": "supervisor",
    b"tests.kills.trainer": "trainer",
}
TRAINERS: Final = ("epochs", "slow", "loader")
LONGEST_PAUSE_S: Final = 0.45
PROGRESS_EVERY: Final = 4
CHECK_EVERY: Final = 20


_pause = threading.Event()


@dataclass
class Scene:
    """A cache with a worker and trainers, kept going whatever is killed."""

    cache: Cache
    errors: Path
    processes: Processes
    stop: threading.Event = field(default_factory=threading.Event)
    worker: Worker | None = None
    trainers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    starts: int = 0

    def keep_going(self, kinds: tuple[str, ...]) -> None:
        """Until `stop`: start what is not running."""
        try:
            while not self.stop.is_set():
                self.keep_worker()
                for number, kind in enumerate(kinds):
                    self.keep_trainer(number, kind)
                self.stop.wait(0.02)
        except BaseException:  # an error of no documented class is one that the test shall see
            with open(self.errors, "a", encoding="utf-8") as file:
                file.write(f"start_worker: {traceback.format_exc()}\n")
            raise

    def keep_worker(self) -> None:
        if self.worker is not None and self.worker.is_alive():
            return
        try:
            if self.worker is not None:
                self.worker.close()
            self.worker = cs.start_worker(
                self.cache, SOURCE, num_workers=2, shard_size="300KB", concurrency=8, hang_timeout_s=20.0
            )
            self.starts += 1
        except CacheStreamError:
            self.worker = None  # killed while it started

    def keep_trainer(self, number: int, kind: str) -> None:
        trainer = self.trainers.get(number)
        if trainer is not None and trainer.poll() is None:
            return
        command = [sys.executable, "-m", "tests.kills.trainer", self.cache.path, str(self.errors), kind]
        self.trainers[number] = subprocess.Popen(command, cwd=ROOT)

    def end_trainers(self) -> None:
        for trainer in self.trainers.values():
            trainer.kill()
            trainer.wait(timeout=60.0)

    def living(self, role: str) -> list[int]:
        """The processes of a role, also those that are just starting."""
        return sorted(pid for pid in self.processes.pids() if role_of(pid) == role)


def role_of(pid: int) -> str | None:
    try:
        name, command = (Path(f"/proc/{pid}/{file}").read_bytes() for file in ("comm", "cmdline"))
    except OSError:
        return None
    by_name = (role for start, role in NAMES.items() if name.startswith(start))
    by_command = (role for module, role in COMMANDS.items() if module in command)
    return next(by_name, None) or next(by_command, None)


@contextmanager
def going(scene: Scene, kinds: tuple[str, ...] = TRAINERS) -> Iterator[None]:
    thread = threading.Thread(target=scene.keep_going, args=(kinds,), name="keeper")
    thread.start()
    try:
        yield
    finally:
        scene.stop.set()
        thread.join(180.0)
        scene.end_trainers()
        if scene.worker is not None:
            scene.worker.stop()


def kill_at_random(scene: Scene, scan: Numbers, rng: random.Random, kills: int) -> Counter[str]:
    """Kill until there are `kills` dead and shards were evicted; checks the cache on the way.

    Returns how many of each role were killed.
    """
    dead: Counter[str] = Counter()
    written = 0
    weights = list(ROLES.values())
    while dead.total() < kills or not scene.cache.status().evicted_shards:
        pause_s = rng.uniform(0.0, LONGEST_PAUSE_S)
        role, choice = rng.choices(list(ROLES), weights)[0], rng.random()
        if dead.total() % PROGRESS_EVERY == 0:  # at a fixed pace a busy machine would get nothing done
            wait_until(partial(has_grown, scene.cache, written), "samples come in")
            written = samples_written(scene.cache)
        _pause.wait(pause_s)
        victims = scene.living(role)
        if not victims:
            continue
        try:
            os.kill(victims[int(choice * len(victims))], signal.SIGKILL)
        except ProcessLookupError:
            continue
        dead[role] += 1
        hold_to_the_limit(scene.cache, scan)
        assert scan["over"] == 0, f"{scan['over']} bytes over the limit"
        assert not scene.errors.exists() or not scene.errors.read_text(), scene.errors.read_text()
        if dead.total() % CHECK_EVERY == 0:
            check(scene, scan, rng)
    return dead


def samples_written(cache: Cache) -> int:
    with cache.catalogue.reading() as tables:
        return int(tables.meta("written_samples", 0))


def has_grown(cache: Cache, written: int) -> bool:
    return samples_written(cache) > written


def check(scene: Scene, scan: Numbers, rng: random.Random) -> None:
    """While all runs: the cache is sound; then another limit."""
    report = scene.cache.verify()
    assert report.ok, report
    limit_bytes = rng.randint(*LIMITS)
    scan["limit"] = max(scan["limit"], limit_bytes)
    scene.cache.size_limit = limit_bytes


def hold_to_the_limit(cache: Cache, scan: Numbers) -> None:
    """A limit that was lowered holds from when leases and reservations of before have come down to it."""
    usage = cache.reservations.measure()
    with cache.catalogue.transaction() as tables:
        if room_in(tables, usage).free_bytes >= 0:
            scan["limit"] = cache.size_limit


def check_nothing_is_left(scene: Scene) -> None:
    scene.processes.wait_until_gone()
    cache = scene.cache
    report = cache.verify()
    assert report.ok, report
    cache.recover()  # what trainers that were killed leased is cleared by the next who looks
    assert left_files(cache) == []
    held = [path for path in Path(cache.path).rglob("*") if path.is_file() and is_held(str(path))]
    assert not held


def say(line: str) -> None:
    sys.stdout.write(f"\n{line}\n")


def run(tmp_path: Path, processes: Processes, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    say(f"replay: KILLS_SEED={seed} KILLS={kills} pytest tests/kills/test_kills.py")
    cache = Cache(tmp_path / "cache", size_limit=LIMITS[1], min_free=0)
    scene = Scene(cache, tmp_path / "errors", processes)
    begun_s = time.monotonic()
    with scanning(cache.path, tmp_path / "numbers", LIMITS[1]) as scan:
        with going(scene):
            dead = kill_at_random(scene, scan, rng, kills)
            killed_s = time.monotonic() - begun_s
        check_nothing_is_left(scene)
        status = cache.status()
        assert failures_of(cache) == {}, "a unit was blamed for what it did not do"
        # All of it comes in the end, exactly once.
        scan["limit"] = LAST_LIMIT
        cache.size_limit = LAST_LIMIT
        with cs.start_worker(cache, SOURCE, num_workers=2):
            wait_until(lambda: cache.fill_state() == "complete", "it is complete")
        assert only_once(cache) == SOURCE.keys()
        assert scan["over"] == 0
        looks, most = scan["looks"], scan["most"]
    assert failures_of(cache) == {}
    check_nothing_is_left(scene)
    elapsed_s = time.monotonic() - begun_s
    say(
        f"{dict(dead)} killed at {dead.total() / killed_s:.2f} a second, {scene.starts} workers started, {elapsed_s:.0f} s in all; "
        f"{status.evicted_shards} shards evicted in {status.snapshots} snapshots, pass {status.pass_number}; "
        f"{looks} looks at the directory, at most {most / MB:.2f} MB"
    )
    cache.close()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """The processes of this test, found by what they inherit."""
    found = Processes(secrets.token_hex(8))
    monkeypatch.setenv(TOKEN, found.token)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield found
    found.end()


def seed() -> int:
    return int(os.environ.get("KILLS_SEED", secrets.randbelow(10**9)))


@pytest.mark.e2e
@pytest.mark.timeout(500)
def test_twenty_random_kills_tear_lose_and_double_nothing(tmp_path: Path, processes: Processes) -> None:
    run(tmp_path, processes, int(os.environ.get("KILLS", "20")), seed())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_random_kills_tear_lose_and_double_nothing(tmp_path: Path, processes: Processes) -> None:
    run(tmp_path, processes, int(os.environ.get("KILLS", "2000")), seed())
