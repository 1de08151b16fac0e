"""How many threads torch copies with: one, where we gather.

A gather runs at memory speed on one thread. With two, torch forks and joins an OpenMP team for every row, beside
the trainer's own team; where others use the cores too, that made it 6 to 18 times slower here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["one_thread", "use_one_thread"]


def use_one_thread() -> None:
    """Let torch use one thread in this thread from now on, and leave all others as they are.

    `torch.set_num_threads` is about the thread that calls it, but also sets what new threads start with: a
    short-lived thread puts that back.
    """
    before = torch.get_num_threads()
    if before == 1:
        return
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(before,), daemon=True)
    restore.start()
    restore.join()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in this thread for a moment."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
