"""Who keeps a worker running: the processes that started it or attached to it, and requests to stop.

Each holds a locked file for as long as it lives. The attach lock makes "is a worker there?" and "I need
it" one step, so that nobody attaches to a worker that is just leaving because nobody needs it.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import Final

from cachestream.errors import CacheLockedError
from cachestream.storage.directory import Directory
from cachestream.storage.locks import HeldFile, is_held, lock_file

__all__ = ["Wardens"]

_SUFFIX: Final = ".attached"
ATTACH_TIMEOUT_S: Final = 60.0


class Wardens:
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

    def attach(self) -> HeldFile:
        """Need the worker until the file is released or this process ends."""
        name = f"{os.getpid()}-{secrets.token_hex(6)}{_SUFFIX}"
        held = lock_file(self._directory.worker_file(name), timeout_s=ATTACH_TIMEOUT_S)
        if held is None:
            raise CacheLockedError(f"{self._directory.worker_file(name)} was taken away; try again")
        return held

    def is_needed(self) -> bool:
        """Whether the worker is detached, or somebody who needs it lives; clears away the files of the dead."""
        return self._is_detached() or not self._nobody_left()

    def _nobody_left(self) -> bool:
        anybody = False
        for name in os.listdir(self._directory.worker):
            if not name.endswith(_SUFFIX):
                continue
            path = self._directory.worker_file(name)
            if is_held(path):
                anybody = True
            else:
                with suppress(FileNotFoundError):
                    os.unlink(path)
        return not anybody

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
        for name in ("stop", "detached"):
            with suppress(FileNotFoundError):
                os.unlink(self._directory.worker_file(name))

    def _ask(self, name: str) -> None:
        path = self._directory.worker_file(name)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
