"""Where sources report the bytes that arrive, so that whoever runs them can limit and watch them.

A source calls `fetched` and knows nothing of budgets, counters or watchdogs; a sampling process
installs what is to happen then. Nothing is installed by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["fetched", "install", "wait"]

TICK_S: Final = 0.5


def _ignore(nbytes: int) -> None:
    """What `fetched` does in a process that installed nothing."""


_on_fetched: Callable[[int], None] = _ignore


def install(on_fetched: Callable[[int], None] | None) -> None:
    """Call `on_fetched(nbytes)` for all bytes that arrive in this process; None: stop doing so.

    `on_fetched` is called from any thread, several at once, and may block to hold back the reader.
    What it raises must be a CacheStreamError or no Exception at all: others count as the remote's.
    """
    global _on_fetched
    _on_fetched = _ignore if on_fetched is None else on_fetched


def fetched(nbytes: int) -> None:
    """Report that `nbytes` arrived, after each piece of a fetch; 0 is a sign of life without bytes."""
    _on_fetched(nbytes)


def wait(delay_s: float) -> None:
    """Wait `delay_s` seconds and show life at least once a second meanwhile."""
    deadline_s = time.monotonic() + delay_s
    while True:
        fetched(0)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(left_s, TICK_S))
