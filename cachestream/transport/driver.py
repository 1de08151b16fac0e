"""Drivers of remotes: where the calls of a filesystem of fsspec run, and the deadlines that every call keeps.

| | connect | first byte | stalled body | whole object |
|-|-|-|-|-|
| S3, HTTP | `CONNECT_S` | `FIRST_BYTE_S` | `STALL_S` | `PIECE_S` for each MiB |
| other drivers, which only return whole calls | `CALL_S` a call, and `CALL_MIB_S` for each MiB | | | |
| local files | the kernel's; the sampling process is replaced after `hang_timeout_s` | | | |
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from cachestream.errors import SourceUnavailableError
from cachestream.transport import metering

T = TypeVar("T")

CONNECT_S: Final = 5.0
FIRST_BYTE_S: Final = 15.0
STALL_S: Final = 20.0
CALL_S: Final = CONNECT_S + FIRST_BYTE_S
# A connection that brings less than a MiB, or than the rest of the object, in this time counts as broken.
PIECE_S: Final = 60.0
CALL_MIB_S: Final = 5.0
MOST_LATE: Final = 64  # calls in a process that nobody waits for any more

_Calls = queue.SimpleQueue["tuple[Callable[[], Any], concurrent.futures.Future[Any]] | None"]


async def in_time(answer: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """Return the `answer` of a server. Raises TimeoutError after `timeout_s` (None: without limit)."""
    try:
        if sys.version_info < (3, 11):
            return await asyncio.wait_for(answer, timeout_s)
        # Not in a task of its own: if the server hangs up early, aiohttp would lose the begin of the body.
        async with asyncio.timeout(timeout_s):
            return await answer
    except asyncio.TimeoutError as error:  # in Python 3.10 not the built-in class
        if timeout_s is None or error.args:  # the driver's own error, which says what was late
            raise
        raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None


def result_of(future: concurrent.futures.Future[Any], timeout_s: float, since_s: float | None = None) -> Any:
    """Wait for `future` and return its result; report signs of life meanwhile.

    `timeout_s` after `since_s` (None: now) the future is cancelled, and TimeoutError raised.
    """
    deadline_s = timeout_s + (time.monotonic() if since_s is None else since_s)
    while not future.done():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            future.cancel()
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        try:
            future.exception(min(left_s, metering.TICK_S))
        except concurrent.futures.TimeoutError:
            metering.fetched(0)
    try:
        return future.result()
    finally:
        del future  # whose error refers to this frame


class LateCallsError(SourceUnavailableError):
    """Too many calls of drivers have not returned: no attempt in this process can succeed."""


class Caller:
    """A thread that makes blocking calls, one after the other. It keeps no process alive, and ends with the
    Caller.

    A Caller whose call is late is abandoned. Raises LateCallsError where `MOST_LATE` calls of this process
    are late.
    """

    late: ClassVar[defaultdict[int, set[_Calls]]] = defaultdict(set)  # by process: a fork has no such threads

    def __init__(self) -> None:
        if len(self.late[os.getpid()]) >= MOST_LATE:
            raise LateCallsError(
                f"{MOST_LATE} calls of drivers in process {os.getpid()} have not returned; check the "
                "network, and restart the process"
            )
        self._calls: _Calls = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name="driver", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Have `call` made after those that were submitted before."""
        future = concurrent.futures.Future[T]()
        self._calls.put((call, future))
        return future

    def abandon(self) -> None:
        """Count the call under way as late until it returns."""
        late = self.late[os.getpid()]
        late.add(self._calls)
        self.submit(partial(late.discard, self._calls))


def _serve(calls: _Calls) -> None:
    while (wanted := calls.get()) is not None:
        call, future = wanted
        if not future.cancelled():
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled meanwhile
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001  raised in the waiting thread
                    future.set_exception(error)
        del wanted, call, future
