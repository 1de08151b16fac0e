"""How many threads torch copies with, in one thread of ours and in no other.

torch's threads share a gather without the GIL: two copy 1.7 times as much as one. But where a call is too small
to be shared, or its rows too large (see memory.Pieces), threads cost more than they bring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["use_threads"]

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
