"""A second request where the first is slower than nearly all were: whichever answers first is taken.

(Jeffrey Dean and Luiz André Barroso, "The Tail at Scale", Communications of the ACM 56(2), 2013: hedged
requests.) The second ones are at most one in twenty, so that a remote that is slow as a whole gets no more
to do because of that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from cachestream.errors import ConfigError

T = TypeVar("T")

USUAL_QUANTILE: Final = 0.95
EXTRA_SHARE: Final = 0.05  # of all requests
MOST_SAVED: Final = 3.0  # second requests at once, after a long time without any
REMEMBERED: Final = 128  # answers of about one size
CLEARLY_SLOW: Final = 2.0  # times the median
FEWEST: Final = 20  # before that many came, nobody knows what is slow


class Hedge:
    """How long answers take of late, and whether one more request may be made. Pure; for one thread.

    `quantile`: answers slower than this share of those of about the same size are asked for again.
    """

    def __init__(self, quantile: float = USUAL_QUANTILE) -> None:
        self.quantile = quantile
        self.seconds = 0  # requests made a second time
        self._saved = 0.0
        self._took_s: dict[int, deque[float]] = {}

    @classmethod
    def of(cls, option: Any) -> Hedge | None:
        """What the option `hedge` asks for: True, a quantile below 1, or nothing (None, False)."""
        if option is None or option is False:
            return None
        if option is True:
            return cls()
        if not isinstance(option, float) or not 0.5 <= option < 1:
            raise ConfigError(f"hedge={option!r}: give True, or a quantile from 0.5 to 1, such as 0.99")
        return cls(option)

    def patience_s(self, nbytes: int) -> float | None:
        """How long to wait for an answer of `nbytes` before it is asked for again; None: for ever."""
        self._saved = min(MOST_SAVED, self._saved + EXTRA_SHARE)
        took_s = self._took_s.get(_class_of(nbytes), ())
        if len(took_s) < FEWEST:
            return None
        ranked = sorted(took_s)
        # Where all take about as long, the slowest of them are no reason yet: what is saved is for those that hang.
        return max(ranked[int(self.quantile * len(ranked))], CLEARLY_SLOW * ranked[len(ranked) // 2])

    def take(self) -> bool:
        """Whether a second request may be made now; counts it."""
        if self._saved < 1:
            return False
        self._saved -= 1
        self.seconds += 1
        return True

    def came(self, nbytes: int, took_s: float) -> None:
        """An answer of `nbytes` came `took_s` after it was first asked for."""
        self._took_s.setdefault(_class_of(nbytes), deque(maxlen=REMEMBERED)).append(took_s)


def _class_of(nbytes: int) -> int:
    """Sizes whose answers are compared with one another: up to four times each."""
    return max(nbytes, 1 << 14).bit_length() // 2


async def first_answer(
    hedge: Hedge | None,
    nbytes: int,
    ask: Callable[[], Coroutine[Any, Any, T]],
    drop: Callable[[T], None] | None = None,
) -> T:
    """What `ask` returns, of about `nbytes`; asked twice where `hedge` says so, and the slower one is cancelled.

    `drop` lets go of an answer that came too late. Raises what the first request fails with, once none is left.
    """
    if hedge is None:
        return await ask()
    clock = asyncio.get_running_loop().time
    begun_s, tasks = clock(), [asyncio.ensure_future(ask())]
    winner: asyncio.Future[T] | None = None
    try:
        done, _ = await asyncio.wait(tasks, timeout=hedge.patience_s(nbytes))
        if not done and hedge.take():
            tasks.append(asyncio.ensure_future(ask()))
        winner = await _first_good(tasks)
        answer = winner.result()
        hedge.came(nbytes, clock() - begun_s)
        return answer
    finally:
        for task in tasks:
            if task is not winner:
                task.add_done_callback(lambda late: _let_go(late, drop))
                task.cancel()


async def _first_good(tasks: Sequence[asyncio.Future[T]]) -> asyncio.Future[T]:
    """The first of `tasks` that is done without an error; the first of all where none is."""
    left = set(tasks)
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return task
    return tasks[0]


def _let_go(late: asyncio.Future[T], drop: Callable[[T], None] | None) -> None:
    if not late.cancelled() and late.exception() is None and drop is not None:
        drop(late.result())
