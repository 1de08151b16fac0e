"""Waiting for what a filesystem does, on its event loop or in a thread: with a deadline, and with signs of life."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from cachestream.remote import pulse

__all__ = ["result_of", "run", "run_blocking"]

T = TypeVar("T")

LIFE_S: Final = 0.5


def run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """What `coroutine` returns on `loop`; shows life meanwhile, raises TimeoutError in time."""
    return result_of(asyncio.run_coroutine_threadsafe(coroutine, loop), timeout_s)


def run_blocking(call: Callable[[], T], timeout_s: float) -> T:
    """What `call` returns, in a thread of its own; shows life meanwhile, raises TimeoutError in time.

    One that never comes back keeps its thread, and no process from ending.
    """
    future = concurrent.futures.Future[T]()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=work, name="listing", daemon=True).start()
    found: T = result_of(future, timeout_s)
    return found


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
