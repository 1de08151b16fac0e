"""A permutation in segments: what was listed first comes first, each segment shuffled by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from cachestream.model import IntArray
from cachestream.permutation import Permutation, mix_key

__all__ = ["PASS_KEY", "Segments"]

PASS_KEY: Final = 1


class Segments:
    """A permutation of `ends[-1]` numbers that keeps every number within its segment, `ends[i - 1]` to `ends[i]`.

    Another end at the end changes nothing of what lies before it: so a pass can grow.
    """

    def __init__(self, ends: Sequence[int], seed: int, ordinal: int) -> None:
        self._bounds = np.array([0, *ends], np.int64)
        self._parts = [
            Permutation(stop - start, mix_key(PASS_KEY, seed, ordinal, number)) if stop > start else None
            for number, (start, stop) in enumerate(pairwise(self._bounds.tolist()))
        ]

    def at(self, indices: IntArray) -> IntArray:
        """The numbers at `indices`."""
        return self._by_segment(indices, inverse=False)

    def inverse(self, numbers: IntArray) -> IntArray:
        """Where `numbers` lie; -1 for those past the last segment."""
        return self._by_segment(numbers, inverse=True)

    def _by_segment(self, values: IntArray, *, inverse: bool) -> IntArray:
        found = np.full(len(values), -1, np.int64)
        segments = np.searchsorted(self._bounds, values, side="right") - 1
        for number in np.unique(segments).tolist():
            part = self._parts[number] if number < len(self._parts) else None
            if part is not None:
                chosen, start = segments == number, int(self._bounds[number])
                inside = values[chosen] - start
                found[chosen] = start + (part.inverse(inside) if inverse else part.at(inside))
        return found
