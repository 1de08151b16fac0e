"""Calls into the user's own code: how many at a time, and what its errors mean."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from cachestream.errors import CacheStreamError, SampleError, SourceUnavailableError
from cachestream.remote import pulse
from cachestream.remote.retry import classify, redact_text

__all__ = ["Calls", "decode_by_user", "foreign_errors"]

LIFE_S: Final = 0.5


class Calls:
    """Lets one call at a time through in each process, or all if `thread_safe`. Picklable, fork-safe."""

    def __init__(self, thread_safe: bool) -> None:
        self._thread_safe = thread_safe
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __getstate__(self) -> bool:
        return self._thread_safe

    def __setstate__(self, thread_safe: bool) -> None:
        self.__init__(thread_safe)  # type: ignore[misc]

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Hold the turn; shows life while it waits, as the calls before may take long."""
        if self._thread_safe:
            yield
            return
        if self._pid != os.getpid():  # the parent's lock may have been held at the fork
            self._pid, self._lock = os.getpid(), threading.Lock()
        lock = self._lock
        while not lock.acquire(timeout=LIFE_S):
            pulse.fetched(0)
        try:
            yield
        finally:
            lock.release()
            pulse.fetched(0)


@contextlib.contextmanager
def foreign_errors(what: str) -> Iterator[None]:
    """What the user's code raises, as SampleError; as SourceUnavailableError where a network failed."""
    try:
        yield
    except CacheStreamError:
        raise
    except Exception as error:
        message = f"{what} raised {redact_text(f'{type(error).__name__}: {error}')[:500]}"
        if classify(error) == "unavailable":
            raise SourceUnavailableError(message) from error
        raise SampleError(message) from error


def decode_by_user(what: str, decoder: Callable[[bytes], Any], data: memoryview) -> Any:
    """What the user's `decoder`, called `what` in messages, makes of `data`. Raises as `foreign_errors`."""
    with foreign_errors(what):
        return decoder(bytes(data))
