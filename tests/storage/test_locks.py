"""A held file proves that its holder lives: to other processes, through forks, and after any end."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cachestream import linux
from cachestream.errors import CacheError
from cachestream.storage import locks
from cachestream.storage.locks import is_held, lock_file, remove_unheld
from tests.storage.support import Line, fork


@pytest.fixture
def path(fast_path: Path) -> str:
    return str(fast_path / "lock")


def hold(path: str, *, shared: bool = False) -> Callable[[Line], None]:
    """Hold `path` until killed, in a child."""

    def run(line: Line) -> None:
        lock = lock_file(path, shared=shared)
        line.say("held" if lock else "refused")
        line.wait_for_word()

    return run


@pytest.mark.parametrize("shared", [False, True])
def test_a_lock_of_another_process_is_seen_until_that_process_is_killed(path: str, shared: bool) -> None:
    child = fork(hold(path, shared=shared))
    assert child.hear() == "held"
    assert is_held(path, shared=shared)
    assert lock_file(path) is None
    assert not remove_unheld(path)
    child.kill()
    assert not is_held(path, shared=shared), "the kernel frees it"
    assert remove_unheld(path)
    assert not os.path.exists(path)


def test_two_that_share_hold_it_until_both_are_gone(path: str) -> None:
    mine = lock_file(path, shared=True)
    assert mine is not None
    child = fork(hold(path, shared=True))
    assert child.hear() == "held"
    mine.release()
    assert is_held(path, shared=True)
    child.kill()
    assert not is_held(path, shared=True)


def test_a_forked_child_keeps_nothing_of_its_parent_alive(path: str) -> None:
    mine = lock_file(path)
    assert mine is not None

    def say(line: Line) -> None:
        line.say(f"{mine.held}")
        line.wait_for_word()

    child = fork(say)
    assert child.hear() == "False"
    mine.release()
    assert not is_held(path)
    child.tell()
    assert child.wait() == 0


def test_a_lock_that_nobody_refers_to_is_held_and_still_not_passed_to_a_forked_child(path: str) -> None:
    """A script that starts a worker and keeps no name for it drops the handle and goes on."""

    def run_on(line: Line) -> None:
        line.say("running")
        line.wait_for_word()

    def drop(line: Line) -> None:
        lock_file(path)
        line.say("dropped")
        line.wait_for_word()
        grandchild = fork(run_on)
        assert grandchild.hear() == "running"
        line.say(str(grandchild.pid))
        line.wait_for_word()

    child = fork(drop)
    assert child.hear() == "dropped"
    assert is_held(path)
    child.tell()
    grandchild = int(child.hear())
    child.kill()
    assert not is_held(path), f"{grandchild} keeps it"


def test_a_started_program_does_not_inherit_a_lock(path: str) -> None:
    mine = lock_file(path)
    assert mine is not None
    with subprocess.Popen(["sleep", "30"]) as program:
        mine.release()
        assert not is_held(path)
        program.kill()


@pytest.mark.e2e
@pytest.mark.parametrize("times", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_a_fork_beside_threads_that_lock_and_release_inherits_nothing(path: str, times: int) -> None:
    """A fork must wait between the open of a file and its entry in the list of held ones."""
    stop = threading.Event()

    def churn(number: int) -> None:
        while not stop.is_set():
            lock = lock_file(
                f"{path}-{number}", timeout_s=60
            )  # a child that just begins holds it for a moment
            assert lock is not None
            lock.release()

    def target(fd: str) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            return ""  # that of the listing itself

    def list_locks(line: Line) -> None:
        line.say(" ".join(name for name in map(target, os.listdir("/proc/self/fd")) if name.startswith(path)))

    threads = [threading.Thread(target=churn, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(times):
            child = fork(list_locks)
            assert child.hear() == ""
            assert child.wait() == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_two_that_look_at_once_do_not_take_each_other_for_the_holder(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(path).touch()
    looking, answers = threading.Barrier(2), []
    original = locks._still_there

    def meet(path: str, fd: int) -> bool:
        looking.wait(60)  # both have the lock now, or one has failed to get it
        return original(path, fd)

    monkeypatch.setattr(locks, "_still_there", meet)
    monkeypatch.setattr(locks, "_guard", Unguarded())
    threads = [threading.Thread(target=lambda: answers.append(is_held(path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [False, False]


class Unguarded:
    """Stands for the guard of another process, which guards nothing here."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def acquire(self, timeout: float = -1) -> bool:
        return True

    def release(self) -> None:
        pass


def test_a_lock_on_a_file_that_was_unlinked_meanwhile_is_not_believed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is removed between the open and the lock: the lock would guard a file that no one else sees."""
    original = locks._try_lock
    seen: list[int] = []

    def unlink_first(path: str, fd: int, shared: bool) -> bool:
        if not seen:
            os.unlink(path)
        seen.append(fd)
        return original(path, fd, shared)

    monkeypatch.setattr(locks, "_try_lock", unlink_first)
    lock = lock_file(path, timeout_s=60)
    assert lock is not None
    assert lock.is_ours
    assert len(seen) == 2
    lock.release()


def test_a_file_is_removed_while_its_lock_is_held_so_that_nobody_can_take_it_between(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(path).touch()
    original, took = linux.remove, []

    def take_first(name: str) -> None:
        took.append(lock_file(path))
        original(name)

    monkeypatch.setattr(locks, "remove", take_first)
    assert remove_unheld(path)
    assert took == [None]


@pytest.mark.e2e
def test_waiting_for_a_lock_ends_at_the_deadline_or_when_it_is_free(path: str) -> None:
    child = fork(hold(path))
    assert child.hear() == "held"
    assert lock_file(path, timeout_s=0.05) is None
    killer = threading.Timer(0.1, child.kill)
    killer.start()
    mine = lock_file(path, timeout_s=60)
    killer.join()
    assert mine is not None
    mine.release()
    mine.release()
    assert "released" in repr(mine)


def test_a_lock_whose_file_was_replaced_is_not_ours(path: str) -> None:
    mine = lock_file(path)
    assert mine is not None
    before = mine.is_ours
    os.unlink(path)
    assert (before, mine.is_ours) == (True, False)
    mine.release()


def test_what_cannot_be_locked_is_told_apart(path: str, fast_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock_file(path, create=False)
    assert not is_held(path)
    assert remove_unheld(path)
    with pytest.raises(CacheError, match="somebody removed it"):
        lock_file(str(fast_path / "none" / "lock"))
    os.symlink("/etc/passwd", path)
    with pytest.raises(CacheError, match="is a symbolic link"):
        lock_file(path)


def test_a_lock_file_that_the_disk_refuses_says_so(path: str) -> None:
    def fill(_: object) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        lock = lock_file(path)
        assert lock is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        for size, words in ((101, "took 100 of 101|File too large"), (10_000, "took|File too large")):
            with pytest.raises(CacheError, match=words):
                lock.write(b"x" * size)
        lock.write(b"x" * 100)

    assert fork(fill).wait() == 0
    assert os.path.getsize(path) == 100


def test_a_filesystem_without_locks_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(CacheError, match=r"has no locks .*; put the cache on a local disk"):
        lock_file(path)
