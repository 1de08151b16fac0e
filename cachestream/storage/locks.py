"""Files that a process holds: locks that the kernel drops when the process dies.

No heartbeats, no clocks, no pids: who can take the lock has proof that the holder is gone.
A forked child closes its copies, so that a child that outlives its parent keeps nothing alive.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref

from cachestream.errors import CacheLockedError

__all__ = ["HeldFile", "is_held", "lock_file"]

_held: weakref.WeakSet[HeldFile] = weakref.WeakSet()


class HeldFile:
    """An open file with a flock on it; released once, by `release` or by the process's end."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        _held.add(self)

    @property
    def held(self) -> bool:
        return self._fd >= 0

    @property
    def is_ours(self) -> bool:
        """Whether the lock is held, and still on the file that others see at the path."""
        return self.held and _still_there(self.path, self._fd)

    def release(self, unlink: bool = False) -> None:
        """Drop the lock; with `unlink`, remove the file first, while nobody else can take it."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if unlink:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass
        os.close(fd)

    def write(self, data: bytes) -> None:
        """Replace the file's content."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def __repr__(self) -> str:
        return f"<HeldFile {self.path} {'held' if self.held else 'released'}>"


def _forget_in_child() -> None:
    for file in list(_held):
        file.release()


os.register_at_fork(after_in_child=_forget_in_child)


def lock_file(
    path: str, *, shared: bool = False, create: bool = True, timeout_s: float = 0.0
) -> HeldFile | None:
    """Open `path` and lock it, or return None when it is held by others until the deadline.

    Also None when the file was unlinked between the open and the lock: that lock would guard a file
    nobody else can see. Raises FileNotFoundError without `create` when there is no file.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    deadline = time.monotonic() + timeout_s
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            if _try_lock(fd, shared) and _still_there(path, fd):
                held, fd = HeldFile(path, fd), -1
                return held
        finally:
            if fd >= 0:
                os.close(fd)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)  # flock has no timeout; bounded by the deadline


def is_held(path: str, *, shared: bool = False) -> bool:
    """Whether a live process holds a lock on `path`; False when there is no such file.

    `shared`: whether holders share the lock. Where they do not, neither do two who ask at the same time
    take one another for a holder.
    """
    try:
        probe = lock_file(path, shared=not shared, create=False)
    except FileNotFoundError:
        return False
    if probe is None:
        return os.path.exists(path)
    probe.release()
    return False


def _try_lock(fd: int, shared: bool) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise CacheLockedError(
            f"this filesystem has no locks ({error}); put the cache on a local disk"
        ) from error
    return True


def _still_there(path: str, fd: int) -> bool:
    try:
        seen = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (seen.st_dev, seen.st_ino) == (mine.st_dev, mine.st_ino)
