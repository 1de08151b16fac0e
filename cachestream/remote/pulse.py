"""Where sources tell what they ask for and what arrives, so that whoever runs them can limit and watch them.

A source calls `asking` and `fetched` and knows nothing of budgets, counters or watchdogs; a sampling
process installs what is to happen then. Nothing is installed by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["asking", "at_most", "fetched", "install", "slow_down", "wait"]

TICK_S: Final = 0.5
NO_LIMIT_BYTES: Final = 1 << 62


def _ignore(nbytes: int) -> None:
    """What happens in a process that installed nothing."""


def _ignore_all() -> None:
    """What happens in a process that installed nothing."""


_on_fetched: Callable[[int], None] = _ignore
_on_asking: Callable[[int], None] = _ignore
_on_slow_down: Callable[[], None] = _ignore_all
_request_bytes = NO_LIMIT_BYTES


def install(
    on_fetched: Callable[[int], None] | None,
    on_asking: Callable[[int], None] | None = None,
    on_slow_down: Callable[[], None] | None = None,
    request_bytes: int = NO_LIMIT_BYTES,
) -> None:
    """Call `on_fetched(nbytes)` for all bytes that arrive in this process; None: stop doing so.

    `on_asking(nbytes)` is called before they are asked for, where it is known how many, and
    `on_slow_down()` when a remote answers that there are too many requests. All are called from any
    thread, several at once; the first two may block to hold back the reader. No more than
    `request_bytes` are to be asked for at once.
    What they raise must be a CacheStreamError or no Exception at all: others count as the remote's.
    """
    global _on_fetched, _on_asking, _on_slow_down, _request_bytes
    _on_fetched = _ignore if on_fetched is None else on_fetched
    _on_asking = _ignore if on_asking is None else on_asking
    _on_slow_down = _ignore_all if on_slow_down is None else on_slow_down
    _request_bytes = request_bytes


def asking(nbytes: int) -> None:
    """Say that `nbytes` are about to be asked for, in the thread that will report them as `fetched`."""
    _on_asking(nbytes)


def at_most(nbytes: int = NO_LIMIT_BYTES) -> int:
    """How many of `nbytes` to ask for in one request, where more can be asked for later."""
    return min(nbytes, _request_bytes)


def slow_down() -> None:
    """Report that the remote asked for fewer requests."""
    _on_slow_down()


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
