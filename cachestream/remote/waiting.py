"""Waiting for coroutines on a filesystem's event loop: with a deadline, and with signs of life."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Coroutine
from typing import Any, Final

from cachestream.remote import pulse

__all__ = ["result_of", "run"]

LIFE_S: Final = 0.5


def run(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    """What `coroutine` returns on `loop`; shows life meanwhile, raises TimeoutError in time."""
    return result_of(asyncio.run_coroutine_threadsafe(coroutine, loop), timeout_s)


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
