"""Threads that work on batches at once and deliver them in order, each with one torch thread.

A copy is not shared by torch's threads: where other processes or the trainer's kernels use the cores, each
call waits until its second thread is scheduled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


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


class OrderedThreads(Generic[Item, Result]):
    """A run of `num_threads` threads, of which the caller of `run` is one.

    One thread at a time takes the next item; all threads work at once; results are delivered in the order of
    the items.
    """

    def __init__(
        self, num_threads: int, work: Callable[[Item], Result], deliver: Callable[[Result], bool]
    ) -> None:
        self._num_threads = num_threads
        self._work = work
        self._deliver = deliver
        self._items_lock = threading.Lock()
        self._changed = threading.Condition()
        self._next_number = 0
        self._working = 0
        self._delivered = 0
        self._over = False
        self._stopped = False
        self._error: BaseException | None = None

    def run(self, items: Iterator[Item]) -> bool:
        """Work on all `items`; return False if `deliver` returned False.

        Raises the error of the iterator, of `work` or of `deliver`, once the results of all earlier items are
        delivered.
        """
        helpers = [
            threading.Thread(
                target=self._help, args=(items,), name=f"cachestream-gather-{i + 2}", daemon=True
            )
            for i in range(self._num_threads - 1)
        ]
        for helper in helpers:
            helper.start()
        self._work_on(items)
        for helper in helpers:
            helper.join()
        error, self._error = self._error, None
        if error is None:
            return not self._stopped
        try:
            raise error
        finally:  # breaks a reference cycle with this frame, which would keep items and their maps
            del error

    def settle(self) -> None:
        """Wait until no item is being worked on; called by the iterator of the items."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)

    def _help(self, items: Iterator[Item]) -> None:
        use_one_torch_thread()
        self._work_on(items)

    def _work_on(self, items: Iterator[Item]) -> None:
        while not self._stopped:
            with self._items_lock:
                if self._over:
                    return
                number = self._next_number
                try:
                    item = next(items)
                except StopIteration:
                    self._over = True
                    return
                except BaseException as error:  # noqa: BLE001 - raised by `run`, in its turn
                    self._over = True
                    self._deliver_in_turn(number, None, error)
                    return
                self._next_number += 1
                with self._changed:
                    self._working += 1
            self._do(number, item)
            del item  # frees its maps

    def _do(self, number: int, item: Item) -> None:
        result, failure = None, None
        try:
            result = self._work(item)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in its turn
            failure = error
        with self._changed:
            self._working -= 1
            self._changed.notify_all()
        self._deliver_in_turn(number, result, failure)
        del result, failure  # as in `run`

    def _deliver_in_turn(self, number: int, result: Result | None, failure: BaseException | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._delivered == number)
            if self._stopped:
                return
        # Only the thread whose turn it is gets here. It holds no lock, because delivering may wait.
        wanted = False
        if failure is None:
            try:
                wanted = self._deliver(result)  # type: ignore[arg-type]
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                failure = error
        with self._changed:
            self._delivered += 1
            if not wanted:
                self._over = self._stopped = True
                self._error = failure
            self._changed.notify_all()
        del result, failure  # as in `run`
