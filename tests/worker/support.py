"""Helpers of the worker's tests: waiting, inspecting caches, and finding left-over files and processes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachestream import Cache, CorruptShardError, NotEnoughSamplesError, Worker, start_worker
from cachestream.listing.names import file_names, read_mark
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.storage.telemetry import Board
from cachestream.worker.listings import Listings
from cachestream.worker.order import PassPlan
from tests.storage.support import shard_ids
from tests.worker.sources import content

ROOT = Path(__file__).parents[2]
TOKEN = "TEST_OF_THE_WORKER"  # an environment variable that all processes of a test inherit
DEADLINE_S = 180.0
GONE_S = 30.0  # within 5 s, where the machine is not busy
_pause = threading.Event()


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = DEADLINE_S) -> float:
    """Wait until `condition()` is true; returns the seconds that took."""
    begun_s = time.monotonic()
    while not condition():
        if time.monotonic() - begun_s > timeout_s:
            raise AssertionError(f"after {timeout_s:.0f} s still not so: {what}")
        _pause.wait(0.02)
    return time.monotonic() - begun_s


def fill(cache: Cache, source: Any, *, num_workers: int = 1, **options: Any) -> None:
    """Run a worker until its pass is complete."""
    with start_worker(cache, source, num_workers=num_workers, **options) as worker:
        assert worker.wait(DEADLINE_S)


@contextmanager
def in_use(cache: Cache) -> Iterator[None]:
    """Somebody takes one epoch after the other of all that is cached: a full cache turns over."""
    stop = threading.Event()

    def use() -> None:
        while not stop.wait(0.05):
            with suppress(NotEnoughSamplesError):
                cache.take_snapshot()[1].release()

    thread = threading.Thread(target=use)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def keys_of(cache: Cache) -> Counter[str]:
    """The keys of all samples in published shards; checks every sample that holds `content` on the way."""
    found: Counter[str] = Counter()
    for shard_id in shard_ids(cache):
        try:
            shard = MappedShard(shard_path(cache.path, shard_id))
        except CorruptShardError:
            if shard_id in shard_ids(cache):
                raise
            continue  # evicted meanwhile
        shard.verify()
        keys = shard.keys()
        if "x" in shard.columns:
            rows = shard.array("x")
            for key, row in zip(keys, rows, strict=True):
                assert row.tobytes() == content(key, len(row)).tobytes(), f"{key} holds something else"
            del rows
        found.update(keys)
        shard.close()
    return found


def keys_in_order(cache: Cache) -> list[str]:
    """The cached keys in the order in which they were published."""
    shards = [MappedShard(shard_path(cache.path, shard_id)) for shard_id in shard_ids(cache)]
    return [key for shard in shards for key in shard.keys()]  # noqa: SIM118  a method


def only_once(cache: Cache) -> set[str]:
    """The cached keys; fails if one lies in two places."""
    keys = keys_of(cache)
    twice = sorted(key for key, count in keys.items() if count > 1)
    assert not twice, f"cached twice: {twice[:10]}"
    return set(keys)


def failures_of(cache: Cache) -> dict[str, int]:
    """Skipped samples by kind."""
    found: Counter[str] = Counter()
    for row in cache.status().failures:
        found[row.kind] += row.count
    return dict(found)


def left_files(cache: Cache) -> list[str]:
    """Files of processes that are gone: temporary ones, leases, owners, requests."""
    lasting = {"attach.lock", "supervisor.lock", "board", "history", "log.txt", "log.txt.1", "budget"}
    found = [
        *[name for name in os.listdir(cache.directory.shards) if name.endswith(".tmp")],
        *os.listdir(cache.directory.leases),
    ]
    found += [name for name in os.listdir(cache.directory.worker) if name not in lasting]
    with cache.catalogue.reading() as tables:
        found += [f"reservation {row.id}" for row in tables.unfinished()]
    stored = {"listing.json", *listing_files(cache)}
    for names in Listings(cache.directory).earlier():  # kept while something is cached by them
        mark = read_mark(names.path)
        assert mark is not None
        stored |= {os.path.basename(names.path), *file_names(mark.stem)}
    return [name for name in found if not name.startswith("order-0") and name not in stored]


def listing_files(cache: Cache) -> tuple[str, ...]:
    """The files of the stored listing that is in force, if there is one."""
    mark = read_mark(cache.directory.worker_file("listing.json"))
    return () if mark is None else file_names(mark.stem)


def sampling_pids(cache: Cache) -> list[int]:
    """The sampling processes, as the board names them once all of them have begun: until then it says 0."""
    board = Board(cache.directory.worker_file("board"))
    slots = [board.slot(index) for index in range(board.processes)]
    wait_until(lambda: all(slot["pid"] for slot in slots), "all sampling processes have begun")
    return [int(slot["pid"]) for slot in slots]


def supervisor_pid(cache: Cache) -> int:
    return Board(cache.directory.worker_file("board")).pid


def kill_supervisor(cache: Cache, processes: Processes, worker: Worker) -> None:
    """Kill the worker, and let it go: nobody puts another in its place."""
    os.kill(supervisor_pid(cache), signal.SIGKILL)
    worker.close()
    processes.wait_until_gone(DEADLINE_S)


def is_running(pid: int) -> bool:
    """True if the process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (OSError, IndexError):
        return False


def stop_under_lock(cache: Cache, pid: int) -> None:
    """Stop the process while the catalogue is locked, as if it held the lock, until it was ended."""
    with closing(sqlite3.connect(cache.catalogue.path, timeout=DEADLINE_S, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not is_running(pid), "the stopped process was ended")


@dataclass
class Processes:
    """All processes of one test, found by what they inherited."""

    token: str

    def pids(self) -> list[int]:
        """The running ones, but this."""
        needle = f"{TOKEN}={self.token}".encode()
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                environment = Path(f"/proc/{name}/environ").read_bytes()
            except OSError:
                continue
            if needle in environment.split(b"\0") and is_running(int(name)):
                found.append(int(name))
        return found

    def called(self, name: str) -> list[int]:
        """Those whose names begin with `name`."""
        found = []
        for pid in self.pids():
            with suppress(OSError):  # gone meanwhile
                if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").startswith(name):
                    found.append(pid)
        return found

    def wait_until_gone(self, timeout_s: float = GONE_S) -> float:
        return wait_until(lambda: not self.pids(), f"no process is left of {self.pids()}", timeout_s)

    def end(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.wait_until_gone()


@dataclass
class Script:
    """A script in a Python of its own, talking over its pipes."""

    process: subprocess.Popen[str]

    def line(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self, timeout_s: float = DEADLINE_S) -> str:
        """Wait for it; returns what else it printed. Fails if it failed."""
        rest, errors = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, errors
        return rest

    def tell(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()


def run_python(code: str, *arguments: str, **environment: str) -> str:
    """The output of `code`, run in a Python of its own; fails if it failed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A script that has a worker, and tells whether it has started it, until it gets a line.
ATTACHING = """
import sys
import cachestream as cs
from tests.worker.sources import Numbers
worker = cs.start_worker(sys.argv[1], Numbers(None, pause_s=0.05), num_workers=1, detach="detach" in sys.argv)
print("attached" if worker.attached else "started", flush=True)
sys.stdin.readline()
worker.close()
"""


@contextmanager
def script(path: Path, code: str, *arguments: str, options: tuple[str, ...] = ()) -> Iterator[Script]:
    """Run `code` as a script at `path`."""
    path.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *options, str(path), *arguments],
        cwd=path.parent,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Script(process)
    finally:
        process.kill()
        process.wait(timeout=DEADLINE_S)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def plan_of(cache: Cache) -> PassPlan:
    """The plan of the latest pass."""
    with cache.catalogue.reading() as tables:
        return PassPlan.from_json(tables.passes()[-1].plan)


def listed(cache: Cache) -> int:
    """The number of names of the listing that are stored so far."""
    mark = read_mark(cache.directory.worker_file("listing.json"))
    return 0 if mark is None else mark.count


def log_of(cache: Cache) -> str:
    """The log of the cache's worker so far."""
    return Path(cache.directory.worker_file("log.txt")).read_text(encoding="utf-8")
