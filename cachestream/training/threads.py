"""Threads that share work and deliver it in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


def use_threads(count: int) -> None:
    """Let torch use `count` threads in this thread from now on, and leave all others as they are.

    `torch.set_num_threads` is about the thread that calls it, but also sets what new threads start with: a
    short-lived thread puts that back.
    """
    if torch.get_num_threads() == count:
        return
    default = _in_a_new_thread(torch.get_num_threads)
    torch.set_num_threads(count)
    _in_a_new_thread(lambda: torch.set_num_threads(default))


def _in_a_new_thread(function: Callable[[], Result]) -> Result:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join()
    return results[0]


Ticket = TypeVar("Ticket")


class OrderedThreads(Generic[Ticket, Result]):
    """`hands` threads, the caller of `run` being one of them; for one run.

    Tickets are drawn by one thread at a time, worked on by all at once, and delivered one after the other.
    """

    def __init__(
        self, hands: int, work: Callable[[Ticket], Result], deliver: Callable[[Result], bool]
    ) -> None:
        self._hands = hands
        self._work = work
        self._deliver = deliver
        self._drawing = threading.Lock()
        self._changed = threading.Condition()
        self._drawn = 0
        self._working = 0
        self._delivered = 0
        self._over = False
        self._stopped = False
        self._error: BaseException | None = None

    def run(self, tickets: Iterator[Ticket]) -> bool:
        """Work on all `tickets`; False when `deliver` wanted no more.

        Raises what drawing, working or delivering raised, once all that came before is delivered.
        """
        helpers = [
            threading.Thread(
                target=self._help, args=(tickets,), name=f"cachestream-gather-{i + 2}", daemon=True
            )
            for i in range(self._hands - 1)
        ]
        for helper in helpers:
            helper.start()
        self._take_part(tickets)
        for helper in helpers:
            helper.join()
        error, self._error = self._error, None
        if error is None:
            return not self._stopped
        try:
            raise error
        finally:  # its traceback has this frame, and would keep tickets and their maps until garbage is collected
            del error

    def settle(self) -> None:
        """Wait until nobody works on a ticket; for whoever draws the next one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)

    def _help(self, tickets: Iterator[Ticket]) -> None:
        use_threads(1)
        self._take_part(tickets)

    def _take_part(self, tickets: Iterator[Ticket]) -> None:
        while not self._stopped:
            with self._drawing:
                if self._over:
                    return
                number = self._drawn
                try:
                    ticket = next(tickets)
                except StopIteration:
                    self._over = True
                    return
                except BaseException as error:  # noqa: BLE001 - raised by `run`, in its turn
                    self._over = True
                    self._hand_over(number, None, error)
                    return
                self._drawn += 1
                with self._changed:
                    self._working += 1
            self._do(number, ticket)
            del ticket  # and with it the maps

    def _do(self, number: int, ticket: Ticket) -> None:
        result, failure = None, None
        try:
            result = self._work(ticket)
        except BaseException as error:  # noqa: BLE001 - raised by `run`, in its turn
            failure = error
        with self._changed:
            self._working -= 1
            self._changed.notify_all()
        self._hand_over(number, result, failure)
        del result, failure  # as in `run`

    def _hand_over(self, number: int, result: Result | None, failure: BaseException | None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._delivered == number)
            if self._stopped:
                return
        # Only the thread whose turn it is gets here, and without the lock: delivering may wait.
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
