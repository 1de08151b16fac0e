"""Waiting for a remote: the deadlines that all backends keep, on an event loop or in a thread, with signs of life.

| | connect | first byte | stalled body | whole object |
|-|-|-|-|-|
| S3, HTTP | `CONNECT_S` | `FIRST_BYTE_S` | `STALL_S` | `PIECE_S` for each MiB |
| other drivers of fsspec, of which only whole calls are seen | `CALL_S` for all of a call, which asks for less after a late one | | | |
| local files | those of the kernel; the sampling process is replaced after `hang_timeout_s` | | | |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from cachestream.remote import pulse

__all__ = [
    "CALL_S",
    "CONNECT_S",
    "FIRST_BYTE_S",
    "STALL_S",
    "CallPieces",
    "Caller",
    "for_bytes_s",
    "in_time",
    "result_of",
    "run",
]

T = TypeVar("T")

CONNECT_S: Final = 5.0
FIRST_BYTE_S: Final = 15.0
STALL_S: Final = 20.0
CALL_S: Final = CONNECT_S + FIRST_BYTE_S
PIECE_S: Final = 60.0  # slower than a MiB in this time, or what is left of the object, counts as broken
LIFE_S: Final = 0.5
MOST_LATE: Final = 64  # calls that are waited for by nobody, in a process
_PIECE_BYTES: Final = 1 << 20
_QUICK_SHARE: Final = 0.25  # of `CALL_S`: after such a call the next one asks for more
_LEAST_CALL_BYTES: Final = 64 << 10

_late_lock = threading.Lock()
_late = 0


def for_bytes_s(nbytes: int) -> float:
    """The deadline for a request of `nbytes` and its answer."""
    return CALL_S + PIECE_S * -(-nbytes // _PIECE_BYTES)


def run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """What `coroutine` returns on `loop`; shows life meanwhile, raises TimeoutError in time."""
    return result_of(asyncio.run_coroutine_threadsafe(coroutine, loop), timeout_s)


async def in_time(answer: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """The `answer` of a server, of which the first byte comes within `timeout_s` (None: ever); raises TimeoutError."""
    try:
        if sys.version_info < (3, 11):
            return await asyncio.wait_for(answer, timeout_s)
        # In this task: aiohttp loses what came of a body if the server hangs up before the body is read.
        async with asyncio.timeout(timeout_s):
            return await answer
    except asyncio.TimeoutError as error:  # in Python 3.10 another class than the built-in one
        if timeout_s is None or error.args:  # the driver's own, which says what was late
            raise
        raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None


def result_of(future: concurrent.futures.Future[Any], timeout_s: float) -> Any:
    """The result of `future`; shows life meanwhile, cancels it and raises TimeoutError in time."""
    deadline_s = time.monotonic() + timeout_s
    while not future.done():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            future.cancel()
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        try:
            future.exception(min(left_s, LIFE_S))
        except concurrent.futures.TimeoutError:
            pulse.fetched(0)
    return future.result()


class CallPieces:
    """How many bytes to ask for in one call of a driver that shows none before all have come.

    Starts at `most_bytes`; a quarter after each call that was late, twice as many after a quick one. Any thread may use it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = self._nbytes = most_bytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def took(self, nbytes: int, took_s: float) -> None:
        """Learn from a call that brought `nbytes`."""
        if nbytes >= self._nbytes and took_s < _QUICK_SHARE * CALL_S:
            self._nbytes = min(2 * self._nbytes, self._most_bytes)

    def was_late(self) -> None:
        """Learn from a call that did not come in time."""
        self._nbytes = max(self._nbytes // 4, min(_LEAST_CALL_BYTES, self._most_bytes))


class Caller:
    """A thread that makes the blocking calls of another one, which waits for them with a deadline.

    One whose call is late is left behind: it ends when that call does, and keeps no process from ending.
    """

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]
        self._todo = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._todo,), name="driver", daemon=True).start()

    def __del__(self) -> None:
        self._todo.put(None)

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """What `call` returns; shows life meanwhile. Raises TimeoutError in time: this Caller is not used again then."""
        global _late
        if _late >= MOST_LATE:
            return call()  # they never come back: the process hangs, is ended, and begins with none of them
        future = concurrent.futures.Future[T]()
        self._todo.put((call, future))
        try:
            found: T = result_of(future, timeout_s)
        except TimeoutError:
            if future.cancelled():
                with _late_lock:
                    _late += 1
                self._todo.put((_came_back, concurrent.futures.Future()))
            raise
        return found


def _came_back() -> None:
    global _late
    with _late_lock:
        _late -= 1


def _serve(todo: queue.SimpleQueue[tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None]) -> None:
    while (wanted := todo.get()) is not None:
        call, future = wanted
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
                future.set_exception(error)
        del wanted, call, future
