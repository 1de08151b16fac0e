"""How fast the loader alone is over a cache as it is, beside memcpy in the same run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cachestream.config import format_size
from cachestream.errors import NotEnoughSamplesError
from cachestream.storage.cache import Cache
from cachestream.training.loader import EpochLoader

__all__ = ["BenchReport", "bench"]

_COPY_BYTES: Final = 64 * 2**20
_COPIES: Final = 10


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What the loader delivered: `num_bytes` of tensors in `seconds`, after one epoch to warm up."""

    num_samples: int
    num_batches: int
    num_bytes: int
    seconds: float
    memcpy_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.seconds

    def to_dict(self) -> dict[str, float]:
        """Plain values, for JSON."""
        return {
            "samples_per_s": self.samples_per_s,
            "bytes_per_s": self.bytes_per_s,
            "memcpy_bytes_per_s": self.memcpy_bytes_per_s,
            "share_of_memcpy": self.bytes_per_s / self.memcpy_bytes_per_s,
            "num_batches": self.num_batches,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return (
            f"{self.samples_per_s:,.0f} samples/s, {format_size(self.bytes_per_s)}/s in batches of "
            f"{format_size(self.num_bytes / self.num_batches)}: "
            f"{self.bytes_per_s / self.memcpy_bytes_per_s:.0%} of memcpy ({format_size(self.memcpy_bytes_per_s)}/s)"
        )


def bench(cache: Cache, batch_size: int = 64, seconds: float = 5.0) -> BenchReport:
    """Iterate shuffled epochs of what is cached for about `seconds`, and copy memory for comparison.

    Raises NotEnoughSamplesError when the cache does not hold one batch.
    """
    if cache.num_samples < batch_size:
        raise NotEnoughSamplesError(
            f"{cache.path} holds {cache.num_samples} samples, less than a batch of {batch_size}; "
            "fill it first, or give a smaller --batch-size"
        )
    with EpochLoader(cache, batch_size) as loader:
        for _ in loader:
            pass
        begun_s = time.perf_counter()
        sizes = [_nbytes(batch) for batch in _batches(loader, begun_s + seconds)]
        spent_s = time.perf_counter() - begun_s
    return BenchReport(len(sizes) * batch_size, len(sizes), sum(sizes), spent_s, memcpy_bytes_per_s())


def _batches(loader: EpochLoader, until_s: float) -> Iterator[Any]:
    """Batches of one epoch after another until the time is up, but at least one epoch."""
    yield from loader
    while time.perf_counter() < until_s:
        for batch in loader:
            yield batch
            if time.perf_counter() >= until_s:
                return


def _nbytes(value: Any) -> int:
    """Bytes of the tensors, str and bytes in a batch."""
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value)


def memcpy_bytes_per_s() -> float:
    """Bytes a second that one thread copies between two buffers of 64 MiB, the best of ten."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    best_s = float("inf")
    for _ in range(_COPIES):
        begun_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return _COPY_BYTES / best_s
