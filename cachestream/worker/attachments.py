"""Attachments to a worker: the processes that started it or attached to it, and requests to stop.

Each holds a locked file for as long as it lives. The attach lock makes "is a worker there?" and "I need
it" one step, so that nobody attaches to a worker that is just leaving because nobody needs it.

A process that lets the worker go removes its file. One that dies leaves it, and in its name how long the worker
shall then go on: a job that is started again finds it at work. All files are empty, and take no space.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
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
        """Held while deciding whether a worker is there; raises CacheLockedError past the deadline."""
        path = self._directory.worker_file("attach.lock")
        lock = lock_file(path, timeout_s=timeout_s)
        if lock is None:
            raise CacheLockedError(f"{path} was held for {timeout_s:.0f} s; look for a stopped process")
        return lock

    def attach(self, linger_s: float = 0.0) -> HeldFile:
        """Need the worker until the file is released, or `linger_s` longer than this process lives."""
        name = f"{os.getpid()}-{secrets.token_hex(6)}-{1000 * linger_s:.0f}{_SUFFIX}"
        held = lock_file(self._directory.worker_file(name), timeout_s=ATTACH_TIMEOUT_S)
        if held is None:
            raise CacheLockedError(f"{self._directory.worker_file(name)} was taken away; try again")
        self._linger_no_more()  # whom the worker waited for has come
        return held

    def is_needed(self) -> bool:
        """Whether the worker is detached, or somebody who needs it lives, or died a moment ago.

        Clears away the files of the dead.
        """
        return self.is_used() or self._lingers()

    def is_used(self) -> bool:
        """Whether the worker is detached, or somebody who needs it lives; clears away the files of the dead."""
        return not self._nobody_left() or self._is_detached()

    def _nobody_left(self) -> bool:
        anybody = False
        for name in os.listdir(self._directory.worker):
            if not name.endswith(_SUFFIX):
                continue
            path = self._directory.worker_file(name)
            if is_held(path):
                anybody = True
            else:
                self._linger(_milliseconds(name) / 1000)
                remove_if_there(path)
        return not anybody

    def _linger(self, linger_s: float) -> None:
        """Have the worker go on until `linger_s` from now."""
        if linger_s > 0:
            with suppress(OSError):  # a full disk: then it does not
                self._ask(f"{_LINGER}{1000 * (time.monotonic() + min(linger_s, LINGER_AT_MOST_S)):.0f}")

    def _lingers(self) -> bool:
        names = [name for name in os.listdir(self._directory.worker) if name.startswith(_LINGER)]
        left_s = [_milliseconds(name) / 1000 - time.monotonic() for name in names]
        # One that lies further ahead is from before the machine was started again.
        return any(0 < left <= LINGER_AT_MOST_S for left in left_s)

    def request_stop(self) -> None:
        """Ask the worker to stop."""
        self._ask("stop")

    def stop_requested(self) -> bool:
        return os.path.exists(self._directory.worker_file("stop"))

    def detach(self) -> None:
        """Ask the worker to go on when nobody needs it any more."""
        self._ask("detached")

    def _is_detached(self) -> bool:
        return os.path.exists(self._directory.worker_file("detached"))

    def clear_requests(self) -> None:
        """Forget what was asked of the worker before."""
        self._linger_no_more()
        for name in ("stop", "detached"):
            remove_if_there(self._directory.worker_file(name))

    def _linger_no_more(self) -> None:
        for name in os.listdir(self._directory.worker):
            if name.startswith(_LINGER):
                remove_if_there(self._directory.worker_file(name))

    def _ask(self, name: str) -> None:
        path = self._directory.worker_file(name)
        os.close(open_private(path, os.O_WRONLY | os.O_CREAT))


def _milliseconds(name: str) -> int:
    """The number at the end of a file's name; 0 where there is none."""
    digits = name.removesuffix(_SUFFIX).rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
