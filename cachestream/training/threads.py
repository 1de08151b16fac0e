"""Threads for copies and transforms: as many of torch's as are quickest now, and some that deliver in order.

torch's threads share a gather without the GIL: two copy 1.7 times as much as one. But where a call is too small
to be shared, or its rows too large (see memory.Pieces), threads cost more than they bring.

Two threads copy 1.7 times as much as one where a core is free. Where others use the cores, each call waits until its
second thread is given one, which made it 6 to 18 times slower here. Nobody tells which it is, so the faster of the
two is used, and the other one tried now and then. A trainer that finds its batches waiting needs no second thread, which
would take its core: they spin between calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

import torch

from cachestream.training.batches.gather import Copy

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


COPIES_A_TURN: Final = 4
_FIRST_PATIENCE: Final = 8
_MOST_PATIENCE: Final = 256
_SMOOTHING: Final = 0.3
_FALLEN: Final = 0.6  # of the rate at which it was chosen: something has changed


@dataclass(frozen=True, slots=True)
class Sharing:
    """`threads` are used now, one or `most`: on trial while `chosen` is 0, else chosen at that rate.

    `rate` is the smoothed rate of those that are chosen: one slow turn says nothing, since epochs are prepared in
    between. After `turns` more the other number is tried, after a trial that was lost as late as `patience` says,
    which doubles.
    """

    most: int
    threads: int
    chosen: float = 0.0
    rate: float = 0.0
    turns: int = 1
    patience: int = _FIRST_PATIENCE

    @classmethod
    def begin(cls, most: int) -> Sharing:
        """Up to `most` threads may be used."""
        return cls(most, most)

    def next(self, rate: float, hurried: bool = True) -> Sharing:
        """What to do after a turn that copied at `rate` (in any unit), `hurried` if the trainer waited for it."""
        if self.most == 1:
            return self
        if not hurried:
            return Sharing(self.most, 1, rate, rate)
        if not self.chosen and rate < self.rate:  # the trial is lost
            patience = min(_MOST_PATIENCE, 2 * self.patience)
            return replace(self._other(), chosen=self.rate, turns=self.patience, patience=patience)
        if not self.chosen:
            turns = _FIRST_PATIENCE if self.rate else 1  # the very first have had no trial
            return replace(self, chosen=rate, rate=rate, turns=turns, patience=_FIRST_PATIENCE)
        smooth = self.rate + _SMOOTHING * (rate - self.rate)
        if self.turns > 1 and smooth >= _FALLEN * self.chosen:
            return replace(self, rate=smooth, turns=self.turns - 1)
        return replace(self._other(), chosen=0.0, rate=smooth)

    def _other(self) -> Sharing:
        return replace(self, threads=self.most if self.threads == 1 else 1)


class Copier:
    """Runs copies in the thread that calls it; `was_hurried` tells whether the trainer has waited since it was asked last."""

    def __init__(self, was_hurried: Callable[[], bool]) -> None:
        self._was_hurried = was_hurried
        self._sharing = Sharing.begin(1)
        self._copied: list[tuple[int, float, bool]] = []

    def use(self, most: int) -> None:
        """Up to `most` threads may share a copy from now on; to be called in the thread that copies."""
        if self._sharing.most != most:
            self._sharing = Sharing.begin(most)
        use_threads(self._sharing.threads)

    def run(self, copy: Copy) -> None:
        """Run `copy`, and see now and then whether another number of threads is quicker."""
        if self._sharing.most == 1:
            copy.run()
            return
        hurried, began_s = self._was_hurried(), time.perf_counter()
        copy.run()
        self._copied.append((copy.out.nbytes, time.perf_counter() - began_s, hurried))
        if len(self._copied) == COPIES_A_TURN:
            copied_bytes, took_s, hurries = map(sum, zip(*self._copied, strict=True))
            self._copied.clear()
            self._sharing = self._sharing.next(copied_bytes / took_s, hurries > 1)
            use_threads(self._sharing.threads)


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
