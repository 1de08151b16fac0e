"""Locked files: the kernel drops a lock when the process that holds it dies.

No heartbeats, clocks or pids: a process that can take a lock has proof that its holder is gone. A forked
child closes its copies, so that a child that outlives its parent keeps no lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from io import FileIO
from operator import attrgetter
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from cachestream.errors import CacheFullError, CacheLockedError
from cachestream.linux import open_private, remove
from cachestream.storage.os_errors import check_own, disk_error

P = ParamSpec("P")
T = TypeVar("T")


def signal_safe(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """As `contextmanager`, for a generator that must end with its `with` block whatever a signal interrupts.

    An exception that a signal raises (Ctrl-C) within the methods of `contextmanager` leaves the generator
    suspended while anything refers to the traceback: in a notebook, until the next error. Here only the
    `with` block refers to the generator. It is entered in C, and an interrupt on the way to its end closes
    it, as it closes any generator that is dropped. In the generator, `with` blocks of locks, files and
    SQLite's connections are safe, because these also end in C; a `finally` of Python's is not. For `with`
    statements only: an ExitStack would call methods of the class.
    """

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return cast("AbstractContextManager[T]", _SignalSafe(function(*args, **kwargs)))

    return make


class _SignalSafe:
    __slots__ = ("generator",)

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    __enter__ = property(attrgetter("generator.__next__"))

    def _exit(self) -> Callable[..., bool]:
        leave = partial(_leave, cast("Any", weakref.ref(self.generator)))
        leave.generator = self.generator  # type: ignore[attr-defined]
        return leave

    __exit__ = property(_exit)


def _leave(
    generator: Callable[[], Generator[Any, None, None]],
    _: object,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> bool:
    # No variable refers to the generator: the frame of an interrupted call would keep it.
    if error is None:
        next(generator(), None)
        return False
    try:
        generator().throw(error)
    except BaseException as raised:
        # A StopIteration of the block comes back as the cause of a RuntimeError.
        if raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error):
            raise
        error.__traceback__ = traceback
        return False
    return True


_held: set[HeldFile] = set()
_opened_files: list[FileIO] = []  # by `_opened`; those that are closed may be among them
# Held from the open of a file to its entry in _held, and during a fork: a child forked between the two would
# keep the lock unnoticed.
_guard = threading.RLock()
_FORK_TIMEOUT_S = 1.0


class HeldFile:
    """An open file with a flock, until `release`, or until the process ends.

    Dropping the object releases nothing (see Lease for an object that does). A release that was interrupted
    (Ctrl-C) can be repeated, and further ones change nothing.
    """

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._holders: set[int] = set()
        _held.add(self)

    @property
    def held(self) -> bool:
        return self._fd >= 0

    @property
    def is_ours(self) -> bool:
        """True if the lock is held and `path` is still the locked file."""
        with _guard:
            return self.held and _still_there(self.path, self._fd)

    def is_held_by(self, holder: int) -> bool:
        return self.held and holder in self._holders

    def share(self, holder: int) -> None:
        """Keep the lock, if it is held, until `holder` releases it."""
        with _guard:
            if self.held:
                self._holders.add(holder)

    def release(self, unlink: bool = False, holder: int = 0) -> None:
        """Drop the lock, unless other holders share it; with `unlink`, remove the file before that.

        A file that cannot be removed stays, as the file of a dead process does.
        """
        with _guard:
            self._holders.discard(holder)
            if not self._holders:
                self._close(unlink)

    def _close(self, unlink: bool = False) -> None:
        if not self.held:
            return
        try:
            if unlink:
                remove(self.path)
        except OSError:
            pass
        finally:
            # No signal is handled between a store and the call after it: the descriptor is closed, or known.
            fd, self._fd = self._fd, -1
            os.close(fd)
            _held.discard(self)

    def write(self, data: bytes) -> None:
        """Replace the file's content. Raises CacheFullError when the disk refuses it.

        Whoever reads meanwhile finds all of `data`, perhaps with the end of longer content after it, and no
        empty file: another thread may run between two calls of the system.
        """
        try:
            written = os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, written)
        except OSError as error:
            raise disk_error(self.path, error) from error
        if written != len(data):
            raise CacheFullError(f"{self.path}: the disk took {written} of {len(data)} bytes; free some disk")

    def __repr__(self) -> str:
        return f"<HeldFile {self.path} {'held' if self.held else 'released'}>"


def _before_fork() -> None:
    _guard.acquire(timeout=_FORK_TIMEOUT_S)


def _after_fork_in_parent() -> None:
    try:
        _guard.release()
    except RuntimeError:  # not acquired: the timeout had passed
        pass


def _after_fork_in_child() -> None:
    global _guard
    _guard = threading.RLock()
    for file in list(_held):
        file._close()  # whatever its holders: they are the parent's
    for opened in _opened_files:
        opened.close()
    _opened_files.clear()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


def lock_file(
    path: str, *, shared: bool = False, create: bool = True, timeout_s: float = 0.0
) -> HeldFile | None:
    """Open `path` and lock it, or return None if others hold it until the deadline.

    Also None when the file was unlinked between the open and the lock: such a lock would guard a file that no
    one else can see. Raises FileNotFoundError without `create` when the file is missing, and CacheError for a
    file that cannot be opened.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with _guard:
            held = _open_and_lock(path, shared, create)
        if held is not None or time.monotonic() >= deadline:
            return held
        time.sleep(0.01)  # flock has no timeout; bounded by the deadline


@signal_safe
def locked(path: str, timeout_s: float, error: Exception) -> Iterator[None]:
    """Hold the lock on `path` for the `with` block; raises `error` if others hold it until the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        with _opened(path, create=True) as file:
            if _lock_opened(path, file, shared=False):
                yield
                return
        if time.monotonic() >= deadline:
            raise error
        time.sleep(0.01)  # flock has no timeout; bounded by the deadline


def is_held(path: str, *, shared: bool = False) -> bool:
    """Return whether a live process holds a lock on `path`; False if the file is missing.

    `shared`: the mode of the holders' locks. The probe takes the opposite mode: for exclusive locks, two
    concurrent probes do not mistake each other for a holder.
    """
    try:
        with _opened(path, create=False) as probe:
            return not _lock_opened(path, probe, shared=not shared) and os.path.exists(path)
    except FileNotFoundError:
        return False


def remove_unheld(path: str) -> bool:
    """Remove `path` unless a live process holds it; return whether no process does."""
    try:
        with _opened(path, create=False) as file:
            if not _lock_opened(path, file, shared=False):
                return not os.path.exists(path)
            # Unlinked while locked: another process could otherwise lock a file that no one else can open.
            with suppress(OSError):
                remove(path)
    except FileNotFoundError:
        pass
    return True


def file_identity(path: str) -> tuple[int, int] | None:
    """Device and inode of `path`, which differ for a file that replaces it; None if it is missing.

    Raises CacheError where this cannot be determined: a failing disk has lost nothing yet.
    """
    try:
        info = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise disk_error(path, error) from error
    return info.st_dev, info.st_ino


def _open(path: str, create: bool) -> int:
    # flock needs no write permission: a probe works on a read-only mount.
    if create:
        check_own(os.path.dirname(path))
    try:
        return open_private(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            raise
        raise disk_error(path, error) from error


def _opened(path: str, create: bool) -> FileIO:
    """Open `path` for a lock that lasts as long as a `with` block of the file, whatever a signal interrupts.

    Without `create` it raises FileNotFoundError where no regular file is.
    """
    with _guard:
        file = FileIO(_open(path, create))
        # No WeakSet: Ctrl-C in its callbacks would be lost.
        _opened_files[:] = [*(other for other in _opened_files if not other.closed), file]
    return file


def _lock_opened(path: str, file: FileIO, *, shared: bool) -> bool:
    return _try_lock(path, file.fileno(), shared) and _still_there(path, file.fileno())


def _open_and_lock(path: str, shared: bool, create: bool) -> HeldFile | None:
    fd = _open(path, create)
    try:
        if _try_lock(path, fd, shared) and _still_there(path, fd):
            held, fd = HeldFile(path, fd), -1
            return held
    finally:
        if fd >= 0:
            os.close(fd)
    return None


def _try_lock(path: str, fd: int, shared: bool) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise CacheLockedError(
            f"{path}: this filesystem has no locks ({error.strerror}); put the cache on a local disk"
        ) from error
    return True


def _still_there(path: str, fd: int) -> bool:
    mine = os.fstat(fd)
    return file_identity(path) == (mine.st_dev, mine.st_ino)
