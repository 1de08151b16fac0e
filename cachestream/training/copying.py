"""Copies of a batch's fields, by as many of torch's threads as are quickest now."""

from __future__ import annotations

import time
from collections.abc import Callable

from cachestream.training.gather import Copy
from cachestream.training.sharing import COPIES_A_TURN, Sharing
from cachestream.training.threads import use_threads

__all__ = ["Copier"]


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
