"""What stays in the processor's caches until the trainer reads it, and what had better go around them.

A batch written through the caches is read from there, if all that is written until the trainer lets it go fits in; else
each of its lines is fetched before it is written, and pushed out before it is read.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["LastLevel", "fits_caches", "last_level", "usable_bytes"]

_ROOT: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_USABLE: Final = 0.8  # the trainer's own data and the shards that are read pass through them too


class LastLevel(NamedTuple):
    """The last cache before the memory: `num_bytes`, for `processors` together."""

    num_bytes: int
    processors: int


_USUAL: Final = LastLevel(16 << 20, 8)


@functools.cache
def last_level(root: Path = _ROOT) -> LastLevel:
    """As the kernel tells it; a usual one where it does not."""
    levels = []
    try:
        for index in root.glob("index*"):
            size, mask = (index / "size").read_text(), (index / "shared_cpu_map").read_text()
            processors = int(mask.replace(",", ""), 16).bit_count()
            levels.append(
                (int((index / "level").read_text()), int(size.strip().removesuffix("K")), processors)
            )
    except (OSError, ValueError):
        return _USUAL
    _, kilobytes, processors = max(levels, default=(0, 0, 0))
    return LastLevel(kilobytes << 10, processors) if kilobytes and processors else _USUAL


def usable_bytes(cache: LastLevel, processors: int, ranks: int) -> float:
    """How much each of `ranks` processes, on `processors` together, can write and find in a `cache` like this one."""
    in_all = cache.num_bytes * max(1, processors // cache.processors)
    return _USABLE * min(cache.num_bytes, in_all / ranks)


def fits_caches(num_bytes: int, ranks: int) -> bool:
    """Whether `num_bytes` of each of `ranks` processes stay in the caches between being written and read."""
    return num_bytes <= usable_bytes(last_level(), len(os.sched_getaffinity(0)), ranks)
