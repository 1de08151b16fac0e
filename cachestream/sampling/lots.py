"""Samples on their way from the thread that reads them to the one that packs them: a few small ones together.

Threads wake each other up, and count, more slowly than small samples come.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cachestream.sampling.table import Table

__all__ = ["Item", "Lot", "approximate_bytes", "gather", "runs"]

MOST_SAMPLES: Final = 64
MOST_BYTES: Final = 256 * 1024
LONGEST_S: Final = 0.001


@dataclass(frozen=True, slots=True, eq=False)
class Lot:
    """Samples of one unit, in its order: `samples[i]` is at `offsets[i]` in it, with the key `keys[i]`.

    Or those of a table, which has keys of its own. They take about `nbytes` of memory.
    """

    offsets: Sequence[int]
    keys: Sequence[str]
    samples: Sequence[Any] | Table
    nbytes: int


Item = tuple[int, str, Any, int]  # offset, key, sample, bytes


def gather(items: Iterator[Item | Lot]) -> Iterator[Lot]:
    """`items` in lots, as soon as they come where they are large or slow; those before an error come too."""
    waiting: list[Item] = []
    waiting_bytes, since_s = 0, time.monotonic()
    try:
        for item in items:
            if isinstance(item, Lot):
                if waiting:
                    yield _lot(waiting, waiting_bytes)
                    waiting, waiting_bytes = [], 0
                yield item
                continue
            waiting.append(item)
            waiting_bytes += item[3]
            now_s = time.monotonic()
            if waiting_bytes >= MOST_BYTES or now_s - since_s >= LONGEST_S or len(waiting) >= MOST_SAMPLES:
                yield _lot(waiting, waiting_bytes)
                waiting, waiting_bytes, since_s = [], 0, now_s
    except GeneratorExit:
        raise
    except BaseException:
        if waiting:
            yield _lot(waiting, waiting_bytes)
        raise
    if waiting:
        yield _lot(waiting, waiting_bytes)


def _lot(items: list[Item], nbytes: int) -> Lot:
    offsets, keys, samples, _ = zip(*items, strict=True)
    return Lot(offsets, keys, samples, nbytes)


def runs(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending `offsets` as ranges [start, stop)."""
    if offsets and offsets[-1] - offsets[0] == len(offsets) - 1:
        return [(offsets[0], offsets[-1] + 1)]
    found: list[tuple[int, int]] = []
    for offset in offsets:
        if found and found[-1][1] == offset:
            found[-1] = found[-1][0], offset + 1
        else:
            found.append((offset, offset + 1))
    return found


def approximate_bytes(value: Any) -> int:
    """About how much memory a sample takes."""
    try:
        nbytes = getattr(value, "nbytes", None)
    except RuntimeError:  # a sparse tensor has none
        nbytes = None
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, Mapping):
        return sum(map(approximate_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(approximate_bytes, value))
    return len(value) if isinstance(value, bytes | str) else sys.getsizeof(value)
