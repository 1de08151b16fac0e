"""Threads in the background, and what they tell one another by.

The threads that gather let torch use one thread each: where other processes or the trainer's kernels use the
cores, an operation that torch divides would wait until its second thread is scheduled.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

import torch

from cachestream.config import NO_THREADS
from cachestream.errors import EpochError

_Work: TypeAlias = Callable[[], None]
WATCH_S: Final = 0.5  # between two looks of whoever waits


class Flag:
    """A flag that is set once, for one thread that waits. The cancel token of a preparation is one.

    A signal may end any step of the trainer's thread: `threading.Event` would then keep its lock.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self.is_set = True
        with suppress(RuntimeError):  # set before
            self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether the flag is set."""
        if not self.is_set:
            self._lock.acquire(timeout=timeout_s)
        return self.is_set


def watched(wait: Callable[[float], object], left_s: float) -> float:
    """Wait for a moment of the `left_s`; return the seconds that passed, without time in which the whole
    process was stopped (SIGSTOP).
    """
    began_s = time.monotonic()
    wait(min(left_s, WATCH_S))
    return min(time.monotonic() - began_s, WATCH_S)


def check_process(pid: int) -> None:
    """Raise EpochError in a child that was forked from process `pid`."""
    if pid != os.getpid():
        raise EpochError(
            f"this EpochLoader belongs to process {pid}: threads do not survive a fork; make one in each "
            "process"
        )


def make_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon, not started yet: one that hangs does not keep the process from its end."""
    return threading.Thread(target=target, name=f"cachestream-{name}", daemon=True)


def start_once(thread: threading.Thread) -> None:
    """Start `thread`, unless that was done, also by a call that was interrupted. Raises EpochError."""
    if thread.ident is None:
        try:
            thread.start()
        except RuntimeError as error:
            raise EpochError(f"{error}: {NO_THREADS}") from error


class Threads:
    """Up to `most` threads called `name` that do the work given to `submit`, in its order; they are started
    when needed.
    """

    def __init__(self, name: str) -> None:
        self.most = 1
        self._name = name
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, work: _Work) -> None:
        """Have a thread do `work`, which raises nothing. Raises EpochError if no thread can be started."""
        if len(self._threads) < self.most:
            serve = functools.partial(_serve, self._queue)
            self._threads.append(make_thread(serve, f"{self._name}_{len(self._threads)}"))
        start_once(self._threads[-1])
        self._queue.put(work)

    def stop(self) -> None:
        """End the threads after the work that they have been given."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the end of each thread; return whether all have ended."""
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads


def _serve(queue: SimpleQueue[_Work | None]) -> None:
    use_one_torch_thread()
    while (work := queue.get()) is not None:
        work()
        del work  # and with it the memory of its batches
    queue.put(None)  # for the next thread


@functools.cache
def _openmp() -> Any:
    """The library that divides torch's operations among threads; None if torch has another one."""
    program = ctypes.CDLL(None)
    return program if hasattr(program, "omp_set_num_threads") else None


def use_one_torch_thread() -> None:
    """Let torch divide no operation of this thread from now on, and leave all other threads as they are.

    `torch.set_num_threads` would also set the number for new threads of the program.
    """
    torch.get_num_threads()  # the first call in a thread sets its number
    if (openmp := _openmp()) is not None:
        openmp.omp_set_num_threads(1)
