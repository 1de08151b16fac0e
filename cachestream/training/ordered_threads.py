"""Threads that work on several items at once, and deliver the results in the order of the items."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class OrderedThreads(Generic[Item, Result]):
    """`num_threads` threads that do `work` on items. Used by one thread.

    The caller of `run` takes the items and delivers the results. With one thread, it works on them, too.
    Otherwise one item more than there are threads is in work, so that no thread waits for the caller.
    """

    def __init__(
        self, num_threads: int, work: Callable[[Item], Result], deliver: Callable[[Result], bool]
    ) -> None:
        self._num_threads = num_threads
        self._work = work
        self._deliver = deliver
        self._running: deque[Future[Result]] = deque()

    def run(self, items: Iterator[Item]) -> bool:
        """Work on all `items`; return False if `deliver` returned False.

        Raises the error of the iterator, of `work` or of `deliver`, once the results of all earlier items are
        delivered.
        """
        if self._num_threads == 1:
            for item in items:
                if not self._deliver(self._work(item)):
                    return False
                del item  # frees its memory for the next one
            return True
        with ThreadPoolExecutor(self._num_threads, "cachestream-gather", use_one_torch_thread) as threads:
            is_more = True
            while True:
                while is_more and len(self._running) <= self._num_threads:
                    is_more = self._start_next(items, threads)
                if not self._running:
                    return True
                # No variable refers to the future: its error would refer to this frame, and the frame to it.
                if not self._deliver(self._running.popleft().result()):
                    return False

    def settle(self) -> None:
        """Wait until all items are worked on; called by the iterator of the items."""
        wait(self._running)

    def _start_next(self, items: Iterator[Item], threads: ThreadPoolExecutor) -> bool:
        """Start work on the next item, if there is one; return whether there may be more."""
        try:
            self._running.append(threads.submit(self._work, next(items)))
        except StopIteration:
            return False
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in its turn
            self._running.append(_failed(error))
            return False
        return True


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def use_one_torch_thread() -> None:
    """Let torch use one thread in this thread from now on, and leave all others as they are.

    `torch.set_num_threads` applies to the calling thread, but also sets the number for new threads: a
    short-lived thread restores that.
    """
    if torch.get_num_threads() == 1:
        return
    default = _in_a_new_thread(torch.get_num_threads)
    torch.set_num_threads(1)
    _in_a_new_thread(lambda: torch.set_num_threads(default))


def _in_a_new_thread(function: Callable[[], Result]) -> Result:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join()
    return results[0]
