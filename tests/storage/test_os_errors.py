"""Any system error, at any step, raises a documented error, leaves nothing behind, and is recoverable."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cachestream.errors import CacheError, CacheFullError, CorruptShardError, NotEnoughSamplesError
from cachestream.linux import FileMap
from cachestream.shard_format import encode_header
from cachestream.storage.cache import Cache
from cachestream.storage.layout import Directory
from cachestream.storage.publish import Progress, Publisher, write_shard
from cachestream.storage.reservations import Owner, Reservations
from tests.storage.steps import Action, Steps, copy_of, steps_of
from tests.storage.support import (
    Line,
    assert_sound,
    content,
    fork,
    keys_in,
    leftovers,
    new_cache,
    publish,
    use_all,
)

SHARD_BYTES = 100_000
FIRST = 6
NEXT = {"k100", "k101", "k102"}


@pytest.fixture
def template(fast_path: Path) -> Path:
    """A full cache of six shards: publishing evicts one."""
    path = fast_path / "template"
    with new_cache(path, "3MB") as cache:
        for number in range(FIRST):
            publish(cache, content(10 * number, size_bytes=SHARD_BYTES))
        use_all(cache)
        cache.size_limit = cache.reservations.room().used_bytes + 20_000
    return path


# --- the Nth step fails, once and for ever


def refused(number: int) -> Callable[[str], None]:
    def fail(name: str) -> None:
        if name.split(maxsplit=1)[0].isupper():  # a statement
            text = "database or disk is full" if number == errno.ENOSPC else "disk I/O error"
            raise sqlite3.OperationalError(text)
        raise OSError(number, os.strerror(number))

    return fail


def publishes(cache: Cache, line: Line) -> None:
    del line
    publish(cache, content(100, size_bytes=SHARD_BYTES))


def evicts(cache: Cache, line: Line) -> None:
    del line
    cache.evict(to=0)


def leases(cache: Cache, line: Line) -> None:
    del line
    cache.take_snapshot()[1].release()


def quarantines(cache: Cache, line: Line) -> None:
    del line
    cache.quarantine(2, "x: broken")


def sets_the_limit(cache: Cache, line: Line) -> None:
    del line
    cache.size_limit = "4MB"


def clears(cache: Cache, line: Line) -> None:
    del line
    cache.clear()


def rebuilds(cache: Cache, line: Line) -> None:
    del line
    Cache(cache.path).close()


def repairs(cache: Cache, line: Line) -> None:
    del line
    cache.verify(repair=True)


def lose_the_catalogue(cache: Cache) -> None:
    Path(cache.catalogue.path).write_bytes(b"garbage" * 1000)


def damage_some(cache: Cache) -> None:
    shards = Path(cache.directory.shards)
    (shards / "stray.txt").touch()
    with open(shards / "000000000003.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")


def nothing(_: Cache) -> None:
    """Do nothing; the cache is sound."""


ACTIONS: dict[str, tuple[Action, Callable[[Cache], None]]] = {
    "publish": (publishes, nothing),
    "evict": (evicts, nothing),
    "lease": (leases, nothing),
    "quarantine": (quarantines, nothing),
    "limit": (sets_the_limit, nothing),
    "clear": (clears, nothing),
    "rebuild": (rebuilds, lose_the_catalogue),
    "repair": (repairs, damage_some),
}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("number", "for_ever"),
    [
        pytest.param(errno.EIO, False, id="EIO once"),
        pytest.param(errno.ENOSPC, True, id="ENOSPC for ever"),
        pytest.param(errno.EIO, True, id="EIO for ever", marks=pytest.mark.slow),
        pytest.param(errno.ENOSPC, False, id="ENOSPC once", marks=pytest.mark.slow),
        pytest.param(errno.EACCES, False, id="EACCES once", marks=pytest.mark.slow),
        pytest.param(errno.EACCES, True, id="EACCES for ever", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("what", ACTIONS)
def test_any_step_may_fail(template: Path, fast_path: Path, what: str, number: int, for_ever: bool) -> None:
    """The error is a documented one, the process continues with the same cache, and nothing is left over."""
    action, prepare = ACTIONS[what]
    with Cache(template) as cache:
        prepare(cache)
    names = steps_of(template, fast_path, action, opening=what != "rebuild")

    def try_all(line: Line) -> None:
        for last in range(len(names)):
            path = copy_of(template, fast_path)
            cache = Cache.__new__(Cache)
            steps = Steps(last, refused(number), for_ever=for_ever)
            if what == "rebuild":
                cache.directory = Directory(str(path))
            else:
                cache = Cache(path)
                cache.close()
            undo = steps.install()
            try:
                action(cache, line)
                error = ""
            except CacheError as caught:
                error = f"{type(caught).__name__}: {caught}"
            steps.last = None
            undo()
            line.say(f"{names[last]} → {error or 'no error'}")
            with Cache(path) if what == "rebuild" else cache as same:
                if what == "repair":
                    same.verify(repair=True)
                go_on(same)

    child = fork(try_all)
    heard = []
    while text := child.hear():
        heard.append(text)
    assert child.wait() == 0, f"after: {heard[-1:]}, failing step {names[len(heard) : len(heard) + 1]}"
    assert len(heard) == len(names)
    if number == errno.ENOSPC and what == "publish":
        assert any("CacheFullError" in text for text in heard)


def go_on(cache: Cache) -> None:
    """Check that the same cache is sound after the fault, and publish the next shard."""
    cache.recover()
    cache.enforce_limit()
    assert_sound(cache)
    assert set(keys_in(cache)) <= {f"k{10 * number + i}" for number in range(FIRST) for i in range(3)} | NEXT
    if cache.num_shards:
        use_all(cache)  # a rebuilt catalogue knows of no epoch, and nothing unused is evicted
    assert publish(cache, content(200, size_bytes=SHARD_BYTES)) is not None
    assert_sound(cache)
    assert cache.status().leases == 0


@pytest.mark.e2e
def test_a_writer_that_lives_on_leaves_nothing_of_what_it_could_not_finish(
    template: Path, fast_path: Path
) -> None:
    """However often a step of publishing fails for lack of space, the cache does not shrink."""
    steps = Steps(None, refused(errno.ENOSPC), for_ever=True)

    def publish_as(cache: Cache, line: Line) -> None:
        owner = Owner(cache.directory, "writer")
        cache.close()  # its next connection is a counted one
        undo = steps.install()
        for _ in range(3):
            try:
                publish(cache, content(100, size_bytes=SHARD_BYTES), owner=owner.name)
            except CacheFullError:
                continue
            break
        steps.last = None
        undo()
        line.say(f"{cache.num_shards} shards")
        assert publish(cache, content(200, size_bytes=SHARD_BYTES), owner=owner.name) is not None
        with cache.catalogue.reading() as tables:
            line.say(f"{len(tables.unfinished())} reservations")

    for number in range(len(steps_of(template, fast_path, publishes))):
        path = copy_of(template, fast_path)
        steps.last = number
        child = fork(lambda line, path=path: publish_as(Cache(path), line))  # type: ignore[misc]
        shards, reservations = child.hear(), child.hear()
        assert child.wait() == 0
        assert shards in (f"{FIRST - 1} shards", f"{FIRST} shards"), "one was evicted for the new one at most"
        assert reservations == "0 reservations"
        with Cache(path) as cache:
            assert_sound(cache)


def test_a_writer_of_several_shards_gives_back_what_was_reserved_for_each(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses to enter them, and then to release both."""
    owner = Owner(cache.directory, "writer")
    publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, owner.name)

    def full(*_: object) -> None:
        raise CacheFullError("the disk is full")

    shards = [content(0), content(10)]
    headers = [encode_header(shard) for shard in shards]
    reserved = publisher.reserve(
        [len(header) + shard.data_bytes for header, shard in zip(headers, shards, strict=True)]
    )
    assert reserved is not None
    written = [write_shard(cache.directory, *one) for one in zip(reserved, headers, shards, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "_enter", full)
        patch.setattr(Reservations, "_unlink", full)
        with pytest.raises(CacheFullError):
            publisher.commit(written, 0, (), Progress())
    assert publish(cache, content(20), owner=owner.name) is not None
    with cache.catalogue.reading() as tables:
        assert tables.unfinished() == []
    owner.release()
    assert_sound(cache)


# --- the real thing


@pytest.fixture
def on_disk(small_disk: Path) -> Cache:
    cache = new_cache(small_disk / "cache", "20MB")
    for number in range(8):
        publish(cache, content(10 * number, size_bytes=300_000))
    use_all(cache)
    return cache


def fill_disk(folder: Path, leave_bytes: int = 0) -> Path:
    """Write another program's file that leaves only `leave_bytes` of the disk."""
    path = folder / "theirs"
    free = shutil.disk_usage(folder).free - leave_bytes
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free // 4096 * 4096)
    return path


def test_a_disk_that_fills_up_between_reserving_and_writing(
    on_disk: Cache, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Reservations.reserve

    def reserve(self: Reservations, size_bytes: int, owner: str, **named: bool) -> int | None:
        shard_id = real(self, size_bytes, owner, **named)
        fill_disk(small_disk, leave_bytes=100_000)
        return shard_id

    with on_disk as cache:
        keys = keys_in(cache)
        with monkeypatch.context() as patch:
            patch.setattr(Reservations, "reserve", reserve)
            with pytest.raises(
                CacheFullError, match=r"No space left on device while writing 5\d\d kB; free some disk"
            ):
                publish(cache, content(900, size_bytes=500_000))
        assert leftovers(cache) == []
        assert keys_in(cache) == keys, "what was there can still be trained on"
        (small_disk / "theirs").unlink()
        assert publish(cache, content(900, size_bytes=500_000)) is not None
        assert_sound(cache)


def test_a_disk_without_a_free_byte(on_disk: Cache, small_disk: Path) -> None:
    """Reading continues, and what was used makes room for new shards, or for other programs."""
    theirs = fill_disk(small_disk)
    with on_disk as cache:
        keys = keys_in(cache)
        assert cache.num_samples == len(keys)
        assert cache.status().num_shards == 8
        size_bytes = cache.size_bytes
        assert publish(cache, content(900)) is not None
        assert cache.size_bytes <= size_bytes
        cache.size_limit = "2MB"
        assert cache.num_shards < 7
        theirs.unlink()
        assert_sound(cache)
        cache.take_snapshot()[1].release()
        assert publish(cache, content(1000)) is not None


def test_a_mount_for_reading_only(on_disk: Cache, small_disk: Path) -> None:
    """Reading and checking continue; training and filling raise an error that says what to mount."""
    keys = keys_in(on_disk)
    on_disk.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        with Cache(on_disk.path) as cache:
            assert cache.num_samples == len(keys)
            assert cache.status().num_shards == 8
            assert cache.verify().ok
            for attempt in (cache.snapshot, lambda: cache.evict(to=0), lambda: publish(cache, content(900))):
                with pytest.raises(CacheError, match=r"(?i)read-only .*; mount it for writing"):
                    attempt()
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    with on_disk as cache:
        assert keys_in(cache) == keys


@pytest.mark.e2e
def test_a_disk_without_a_free_inode(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=40", str(small_disk)], check=True)
    with new_cache(small_disk / "cache", "20MB") as cache:
        published: list[int | None] = []

        def publish_for_ever() -> None:
            while True:
                published.append(publish(cache, content(10 * len(published))))

        with pytest.raises(CacheFullError, match="No space left on device"):
            publish_for_ever()
        assert 10 < len(published) < 40
        assert_sound(cache)
        os.unlink(cache.directory.settings)
        cache.evict(to=0)
        assert publish(cache, content(0)) is not None


@pytest.mark.parametrize("most", [100, 5000, 70_000])
def test_a_limit_on_the_size_of_files(cache: Cache, most: int) -> None:
    """EFBIG counts as a full disk, also for the catalogue, where SQLite reports a broken disk.

    Nothing is torn, and SIGXFSZ does not kill the process.
    """

    def attempt(line: Line) -> None:
        del line
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(
            CacheFullError, match=r"File too large while (writing|in a transaction).*'ulimit -f'"
        ):
            publish_limited()
        assert os.listdir(cache.directory.shards) == []

    def publish_limited() -> None:
        owner = Owner(cache.directory, "limited")
        real = Reservations.reserve

        def reserve(self: Reservations, *args: object, **named: object) -> int | None:
            shard_id = real(self, *args, **named)  # type: ignore[arg-type]
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            return shard_id

        Reservations.reserve = reserve  # type: ignore[method-assign]
        try:
            publish(cache, content(0, size_bytes=SHARD_BYTES), owner="limited")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            owner.release()

    assert fork(attempt).wait() == 0
    assert_sound(cache)
    assert cache.num_samples == 0


STRACE = shutil.which("strace")
PUBLISH_TWICE = """\
import sys
from cachestream.errors import CacheError
from tests.storage.support import content, new_cache, publish
cache = new_cache(sys.argv[1])
for first in (0, 3):
    try:
        print("published", publish(cache, content(first)), flush=True)
    except CacheError as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.e2e
@pytest.mark.skipif(STRACE is None, reason="no strace")
@pytest.mark.parametrize(
    ("call", "path", "lost"),
    [
        ("?rename,renameat,renameat2", "shards/000000000001.tmp", [1]),
        ("fallocate", "shards/000000000001.tmp", [1]),
    ],
)
def test_the_kernel_refuses(fast_path: Path, call: str, path: str, lost: list[int] | None) -> None:
    """EIO from a real call: the shard is discarded with an error, and the next one is published."""
    cache_path = fast_path / "cache"
    new_cache(cache_path).close()
    place = fast_path / "cache" / path
    result = subprocess.run(
        [str(STRACE), "-f", "--seccomp-bpf", "-e", f"trace={call}", "-qq", "-o", "/dev/null", "-P", str(place), "-e", f"inject={call}:error=EIO:when=1",
         sys.executable, "-c", PUBLISH_TWICE, str(cache_path)],
        capture_output=True, text=True, timeout=180, check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if "Operation not permitted" in result.stderr:
        pytest.skip("no ptrace here")
    lines = result.stdout.splitlines()
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("DiskFailedError"), lines
    assert "check the disk" in lines[0]
    assert lines[1].startswith("published")
    if lost is not None:
        assert re.search("Input/output error while (writing|publishing)", lines[0])
    with Cache(cache_path) as cache:
        assert keys_in(cache) == ["k3", "k4", "k5"]
        assert_sound(cache)


def test_a_shard_that_cannot_be_read_is_corrupt(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(cache, content(0))
    publish(cache, content(3))

    def fail(self: FileMap, start: int, stop: int) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(FileMap, "bring_in", fail)
        assert len(cache.verify().corrupt) == 2
    real = os.pread

    def fail_at_the_header(fd: int, count: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("1.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, count, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail_at_the_header)
        report = cache.verify(repair=True)
    assert report.ok
    assert "cannot be read (Input/output error)" in report.corrupt[0]
    assert keys_in(cache) == ["k3", "k4", "k5"]


def test_too_many_open_files_in_any_use_is_a_clear_error_and_leaks_nothing(cache: Cache) -> None:
    publish(cache, content(0))

    def use_up(line: Line) -> None:
        del line
        cache.num_shards  # noqa: B018  has its connection open
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for attempt in (
            cache.take_snapshot,
            lambda: publish(cache, content(3)),
            lambda: Cache(cache.path),
            cache.verify,
        ):
            with pytest.raises(CacheError) as caught:
                attempt()
            assert not isinstance(caught.value, CorruptShardError | NotEnoughSamplesError), caught.value
        for fd in taken:
            os.close(fd)
        before = len(os.listdir("/proc/self/fd"))
        assert publish(cache, content(3)) is not None
        assert cache.verify().ok
        assert len(os.listdir("/proc/self/fd")) <= before + 1

    assert fork(use_up).wait() == 0
    assert keys_in(cache) == [f"k{i}" for i in range(6)]
    assert_sound(cache)
