"""Helpers of the storage tests: shards to publish, children to kill, and invariants to check."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from cachestream.schema import ShardRow, Snapshot, Span
from cachestream.shard_format import ShardContent
from cachestream.storage.cache import Cache
from cachestream.storage.locks import lock_file
from cachestream.storage.publish import Publisher
from cachestream.storage.reservations import Owner
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.worker.sampling.encode import to_record
from cachestream.worker.sampling.packer import Packer

__all__ = [
    "NOBODY",
    "Child",
    "as_nobody",
    "assert_books_cover_disk",
    "assert_sound",
    "content",
    "disk_bytes",
    "fork",
    "insert_rows",
    "keys_in",
    "leftovers",
    "needs_root",
    "new_cache",
    "publish",
    "shard_ids",
    "worker_runs",
]

KB: Final = 1000
DEADLINE_S: Final = 120.0
_write: Final = os.write  # whatever a test puts in its place


def new_cache(path: Path, size_limit: int | str = "4MB", **options: Any) -> Cache:
    """A cache that may fill the disk it lies on."""
    return Cache(path, size_limit, **({"min_free": 0} | options))


def content(
    first: int, count: int = 3, size_bytes: int = 8 * KB, fill: dict[str, Any] | None = None
) -> ShardContent:
    """A shard of samples "k<number>" with their number as content, of about `size_bytes` in total."""
    packer = Packer()
    each = max(1, size_bytes // count // 8)
    for number in range(first, first + count):
        packer.add(to_record({"x": np.full(each, number, np.int64), "n": number}, f"k{number}"), None)
    return packer.content({} if fill is None else fill)


def publish(
    cache: Cache,
    shard: ShardContent,
    *,
    spans: Sequence[Span] = (),
    pass_id: int = 0,
    owner: str | None = None,
    may_evict: bool = True,
) -> int | None:
    """Publish as a sampling process, which lives for this shard only unless it has a name."""
    held = None if owner else Owner(cache.directory, f"test-{secrets.token_hex(4)}")
    name = owner or (held.name if held else "")
    try:
        publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, name)
        return publisher.publish(shard, pass_id, spans, may_evict=may_evict)
    finally:
        if held is not None:
            held.release()


@contextlib.contextmanager
def worker_runs(cache: Cache) -> Iterator[None]:
    """Have the cache look as if a worker ran."""
    lock = lock_file(cache.directory.supervisor_lock)
    assert lock is not None
    try:
        yield
    finally:
        lock.release()


def use_all(cache: Cache) -> None:
    """Have an epoch use all cached shards: unused shards are not evicted."""
    cache.take_snapshot()[1].release()


def insert_rows(cache: Cache, rows: Sequence[ShardRow]) -> None:
    """Insert rows without files, for code that does not open files."""
    with cache.catalogue.transaction() as tables:
        schema = content(0).schema
        tables.set_meta("schema", schema.to_json())
        shapes = json.dumps([field.shape for field in schema.fields])
        tables.executemany(
            "INSERT INTO shards (id, state, owner, size_bytes, num_samples, uses, last_used, shapes) "
            "VALUES (?, 'live', '', ?, ?, ?, ?, ?)",
            [(*astuple(row), shapes) for row in rows],
        )
        tables.set_meta("last_shard_id", max(row.id for row in rows))


def shard_ids(cache: Cache) -> list[int]:
    with cache.catalogue.reading() as tables:
        return sorted(tables.shard_ids())


def keys_in(cache: Cache) -> list[str]:
    """The keys of all samples, each read from its verified shard."""
    found: list[str] = []
    for shard_id in shard_ids(cache):
        shard = MappedShard(shard_path(cache.path, shard_id))
        shard.verify()
        keys = shard.keys()
        numbers = [int(key[1:]) for key in keys]
        assert shard.array("n").tolist() == numbers
        assert all((row == number).all() for row, number in zip(shard.array("x"), numbers, strict=True))
        found += keys
        shard.close()
    return sorted(found)


# --- the directory as others see it


def disk_bytes(root: str) -> int:
    """The disk usage of `root` as `du` counts it: each file once, whatever its names."""
    seen: dict[tuple[int, int], int] = {}

    def look(path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            info = os.lstat(path)
            seen[info.st_dev, info.st_ino] = info.st_blocks * 512

    look(root)
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            look(os.path.join(folder, name))
    return sum(seen.values())


def leftovers(cache: Cache) -> list[str]:
    """Temporary files, and lock files of processes and epochs."""
    names = [*os.listdir(cache.directory.shards), *os.listdir(cache.directory.leases)]
    return [name for name in names if re.search(r"\.(tmp|lease|owner)$", name)]


def assert_books_cover_disk(cache: Cache) -> None:
    """Check that all disk usage is accounted for, which holds even before a recovery."""
    with cache.catalogue.reading() as tables:
        booked = {row.id: row.size_bytes for row in tables.shards()}
        booked |= dict(tables.execute("SELECT id, size_bytes FROM shards WHERE state != 'live'").fetchall())
        on_disk: dict[int, int] = {}
        for entry in os.scandir(cache.directory.shards):
            shard_id = int(entry.name.partition(".")[0])
            on_disk[shard_id] = on_disk.get(shard_id, 0) + entry.stat().st_blocks * 512
    over = {i: (size, booked.get(i)) for i, size in on_disk.items() if size > booked.get(i, 0)}
    assert not over, f"on disk, but not in the books (shard: disk, booked): {over}"


def assert_sound(cache: Cache) -> None:
    """Check the invariants after a recovery.

    No shard is torn, the catalogue equals a fresh scan, nothing is left over, and the limit holds.
    """
    cache.recover()
    report = cache.verify()
    assert report.ok, report
    with cache.catalogue.reading() as tables:
        rows = list(tables.shards())
        assert tables.unfinished() == []
        assert tables.totals() == (
            len(rows),
            sum(row.num_samples for row in rows),
            sum(row.size_bytes for row in rows),
        )
    blocks = {entry.name: os.stat(entry.path).st_blocks * 512 for entry in os.scandir(cache.directory.shards)}
    assert blocks == {f"{row.id:012d}.safetensors": row.size_bytes for row in rows}
    assert leftovers(cache) == []
    assert cache.size_bytes == disk_bytes(cache.path)
    assert disk_bytes(cache.path) <= cache.size_limit


def assert_readable(snapshot: Snapshot) -> None:
    """Check that every shard of a snapshot exists and is whole."""
    for shard_id, count in zip(snapshot.shard_ids.tolist(), snapshot.counts.tolist(), strict=True):
        shard = MappedShard(shard_path(snapshot.root, shard_id))
        shard.verify()
        assert shard.num_samples == count
        shard.close()


# --- children


@dataclass(slots=True)
class Child:
    """A forked child that runs until it is told to end, or killed. It sends lines."""

    pid: int
    said_fd: int
    ask_fd: int
    _text: str = ""
    status: int | None = None

    def hear(self) -> str:
        """The next line of the child; "" once it has ended."""
        while "\n" not in self._text:
            piece = os.read(self.said_fd, 65_536).decode()
            if not piece:
                return ""
            self._text += piece
        line, _, self._text = self._text.partition("\n")
        return line

    def tell(self) -> None:
        """Let the child continue after `wait_for_word`."""
        os.write(self.ask_fd, b".")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """The exit code, or minus the signal."""
        if self.status is None:
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
            os.close(self.said_fd)
            os.close(self.ask_fd)
        return self.status


@dataclass(frozen=True, slots=True)
class Line:
    """The child's end of the line: it sends lines, and waits for a word."""

    say_fd: int
    word_fd: int

    def say(self, text: str) -> None:
        _write(self.say_fd, text.encode() + b"\n")

    def wait_for_word(self) -> None:
        if not os.read(self.word_fd, 1):
            os._exit(0)  # the test is gone


def fork(action: Callable[[Line], object]) -> Child:
    """Run `action` in a forked child, which ends without clean-up: exit code 0, or 1 after an exception."""
    said, say = os.pipe()
    word, ask = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(said)
            os.close(ask)
            action(Line(say, word))
            code = 0
        except BaseException:  # noqa: BLE001  a process's main
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(say)
    os.close(word)
    return Child(pid, said, ask)


NOBODY = 65_534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")


def as_nobody(path: Path, action: Callable[[], None]) -> int:
    """The exit code of `action`, run by another user who has access to `path`."""
    for parent in path.parents:
        if parent.stat().st_uid == os.geteuid() and str(parent).startswith(("/tmp/", "/dev/shm/")):
            parent.chmod(parent.stat().st_mode | 0o011)

    def run(line: Line) -> None:
        del line
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        action()

    return fork(run).wait()
