"""Calls of user code: limits, errors, and pickling for processes that do not import the user's script."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from typing import Any

import cloudpickle

from cachestream.errors import CacheStreamError, SampleError, SourceUnavailableError
from cachestream.transport import metering
from cachestream.transport.remote_errors import classify, redact_text


class Calls:
    """A limit of one call at a time in each process, unless `thread_safe`. Picklable, fork-safe."""

    def __init__(self, thread_safe: bool) -> None:
        self._thread_safe = thread_safe
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __getstate__(self) -> bool:
        return self._thread_safe

    def __setstate__(self, thread_safe: bool) -> None:
        self.__init__(thread_safe)  # type: ignore[misc]

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Hold the lock for one call. Report progress while waiting, as other calls may take long."""
        if self._thread_safe:
            yield
            return
        if self._pid != os.getpid():  # the parent's lock may have been held at the fork
            self._pid, self._lock = os.getpid(), threading.Lock()
        lock = self._lock
        while not lock.acquire(timeout=metering.TICK_S):
            metering.fetched(0)
        try:
            yield
        finally:
            lock.release()
            metering.fetched(0)


@contextlib.contextmanager
def foreign_errors(what: str) -> Iterator[None]:
    """Turn exceptions of user code into SampleError, or SourceUnavailableError if a network failed."""
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
    """Decode `data` by the user's `decoder`, called `what` in messages. Raises as `foreign_errors` does."""
    with foreign_errors(what):
        return decoder(bytes(data))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that calls `see` with every object that is not of a builtin type."""

    def __init__(
        self,
        file: io.BytesIO,
        buffer_callback: Callable[[PickleBuffer], Any] | None,
        see: Callable[[Any], None],
    ) -> None:
        super().__init__(file, buffer_callback=buffer_callback)
        self._see = see

    def reducer_override(self, obj: Any) -> Any:
        self._see(obj)
        return super().reducer_override(obj)


def by_value(
    value: Any,
    buffer_callback: Callable[[PickleBuffer], Any] | None = None,
    see: Callable[[Any], None] = lambda _: None,
) -> bytes:
    """Pickle `value` with cloudpickle, including lambdas, closures, and definitions of the main script.

    In a process spawned by `multiprocessing` the script's module is called `__mp_main__`, which cloudpickle
    would take for an importable one; so it is registered for pickling by value. Raises whatever the objects
    raise when they are pickled. `buffer_callback` is that of `pickle.dumps`. `see` is called with every
    pickled object that is not of a builtin type.
    """
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
        return _dumps(value, buffer_callback, see)
    cloudpickle.register_pickle_by_value(main)
    try:
        return _dumps(value, buffer_callback, see)
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def _dumps(
    value: Any, buffer_callback: Callable[[PickleBuffer], Any] | None, see: Callable[[Any], None]
) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, buffer_callback, see).dump(value)
        return file.getvalue()
