"""Attachments to a worker: the processes that started it or attached to it, and requests to stop.

Each of these processes holds a locked file for as long as it lives. The attach lock makes "is a worker
there?" and "I need it" one step: no process attaches to a worker that is about to leave because no process
needs it.

A process that lets the worker go removes its file. A process that dies leaves the file; its name says for how
long the worker is then to go on, so that a job that is started again finds it at work. All files are empty.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from cachestream.errors import CacheLockedError
from cachestream.linux import open_private
from cachestream.storage.layout import Directory, remove_if_there
from cachestream.storage.locks import HeldFile, is_held, lock_file

_SUFFIX: Final = ".attached"
_LINGER: Final = "linger-"
ATTACH_TIMEOUT_S: Final = 60.0
LINGER_AT_MOST_S: Final = 86_400.0


class Attachments:
    """The processes that need the worker of the cache in `directory`."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def attach_lock(self, timeout_s: float = ATTACH_TIMEOUT_S) -> HeldFile:
        """Return the lock to hold while deciding whether a worker is there.

        Raises CacheLockedError at the deadline.
        """
        path = self._directory.worker_file("attach.lock")
        lock = lock_file(path, timeout_s=timeout_s)
        if lock is None:
            raise CacheLockedError(f"{path} was held for {timeout_s:.0f} s; look for a stopped process")
        return lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the attach lock during the block; raises CacheLockedError as `attach_lock`."""
        lock = self.attach_lock()
        try:
            yield
        finally:
            lock.release()

    def attach(self, linger_s: float = 0.0) -> HeldFile:
        """Register a need for the worker until the file is released or `linger_s` after the process dies."""
        name = f"{os.getpid()}-{secrets.token_hex(6)}-{1000 * linger_s:.0f}{_SUFFIX}"
        held = lock_file(self._directory.worker_file(name), timeout_s=ATTACH_TIMEOUT_S)
        if held is None:
            raise CacheLockedError(f"{self._directory.worker_file(name)} was taken away; try again")
        self._clear_linger()  # the job that the worker waited for is here
        return held

    def is_needed(self) -> bool:
        """True if the worker is detached, or a process that needs it lives or lingers.

        Removes the files of dead processes.
        """
        return self.is_used() or self._lingers()

    def is_used(self) -> bool:
        """True if the worker is detached or a process that needs it lives.

        Removes the files of dead processes.
        """
        return self._has_attached() or self._is_detached()

    def _has_attached(self) -> bool:
        found = False
        for name in os.listdir(self._directory.worker):
            if not name.endswith(_SUFFIX):
                continue
            path = self._directory.worker_file(name)
            if is_held(path):
                found = True
            else:
                self._linger(_milliseconds(name) / 1000)
                remove_if_there(path)
        return found

    def _linger(self, linger_s: float) -> None:
        """Have the worker go on for `linger_s` from now."""
        if linger_s > 0:
            with suppress(OSError):  # the disk is full: the worker does not linger
                self._request(f"{_LINGER}{1000 * (time.monotonic() + min(linger_s, LINGER_AT_MOST_S)):.0f}")

    def _lingers(self) -> bool:
        names = [name for name in os.listdir(self._directory.worker) if name.startswith(_LINGER)]
        left_s = [_milliseconds(name) / 1000 - time.monotonic() for name in names]
        # A time further ahead was set before the machine was restarted.
        return any(0 < left <= LINGER_AT_MOST_S for left in left_s)

    def request_stop(self) -> None:
        """Ask the worker to stop."""
        self._request("stop")

    def stop_requested(self) -> bool:
        return os.path.exists(self._directory.worker_file("stop"))

    def detach(self) -> None:
        """Ask the worker to go on when no process needs it any more."""
        self._request("detached")

    def _is_detached(self) -> bool:
        return os.path.exists(self._directory.worker_file("detached"))

    def clear_requests(self) -> None:
        """Remove earlier requests to the worker."""
        self._clear_linger()
        for name in ("stop", "detached"):
            remove_if_there(self._directory.worker_file(name))

    def _clear_linger(self) -> None:
        for name in os.listdir(self._directory.worker):
            if name.startswith(_LINGER):
                remove_if_there(self._directory.worker_file(name))

    def _request(self, name: str) -> None:
        path = self._directory.worker_file(name)
        os.close(open_private(path, os.O_WRONLY | os.O_CREAT))


def _milliseconds(name: str) -> int:
    """The number at the end of a file name; 0 if there is none."""
    digits = name.removesuffix(_SUFFIX).rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
