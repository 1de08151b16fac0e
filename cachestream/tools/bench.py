"""Speed of a cache: the loader alone, with a batch transform, onto the device; beside memcpy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cachestream.config import format_size
from cachestream.errors import NotEnoughSamplesError
from cachestream.storage.cache import Cache
from cachestream.training.batches.transfer import accelerator
from cachestream.training.loader import EpochLoader

_COPY_BYTES: Final = 64 * 2**20
_COPIES: Final = 10


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples that a loader delivered in `seconds`."""

    num_samples: int
    num_bytes: int
    seconds: float

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / max(self.seconds, 1e-9)

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The speed of one cache, in batches of `batch_size`.

    `alone`: batches as gathered. `transformed`: with a `batch_transform`, None without one. `moved`: onto the
    accelerator, with the transform there, None without one.
    """

    place: str
    batch_size: int
    alone: Throughput
    transformed: Throughput | None
    moved: Throughput | None
    memcpy_bytes_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what was not measured is None."""
        return self._plain(self.alone) | {
            "memcpy_bytes_per_s": self.memcpy_bytes_per_s,
            "share_of_memcpy": self.alone.bytes_per_s / self.memcpy_bytes_per_s,
            "batch_transform": None if self.transformed is None else self._plain(self.transformed),
            "device": None if self.moved is None else self._plain(self.moved),
        }

    def _plain(self, done: Throughput) -> dict[str, float]:
        return {
            "samples_per_s": done.samples_per_s,
            "bytes_per_s": done.bytes_per_s,
            "num_batches": done.num_samples // self.batch_size,
            "seconds": done.seconds,
        }

    def __str__(self) -> str:
        """A table of 80 columns at most."""
        alone = self.alone
        # What a transform makes of a batch may have another size: bytes are those that were gathered.
        bytes_each = alone.num_bytes / alone.num_samples

        def line(name: str, bytes_per_s: float, samples: str = "") -> str:
            share = bytes_per_s / self.memcpy_bytes_per_s
            return f"{name:28}{samples:>12}{format_size(bytes_per_s) + '/s':>14}{share:>12.0%}"

        def loader(name: str, rate: Throughput | None, instead: str = "") -> str:
            if rate is None:
                return f"{name:28}{instead}"
            return line(name, bytes_each * rate.samples_per_s, f"{rate.samples_per_s:,.0f}")

        lines = [
            f"{self.place}: batches of {self.batch_size}, {format_size(self.batch_size * bytes_each)}",
            "",
            f"{'':28}{'samples/s':>12}{'bytes/s':>14}{'of memcpy':>12}",
            line("memcpy, one thread", self.memcpy_bytes_per_s),
            loader("loader alone", alone),
        ]
        if self.transformed is not None:
            lines.append(loader("with the batch transform", self.transformed))
        return "\n".join([*lines, loader("onto the device", self.moved, f"{'no accelerator':>26}")])


def bench(
    cache: Cache,
    batch_size: int = 64,
    seconds: float = 5.0,
    batch_transform: Callable[..., Any] | None = None,
) -> BenchReport:
    """Iterate shuffled epochs of the cache for about `seconds` each: alone, with `batch_transform`, onto the
    accelerator.

    Memory copies are measured for comparison.

    Raises NotEnoughSamplesError when the cache does not hold one batch, and whatever `batch_transform`
    raises.
    """
    if cache.num_samples < batch_size:
        raise NotEnoughSamplesError(
            f"{cache.path} holds {cache.num_samples} samples, less than a batch of {batch_size}; "
            "fill it first, or give a smaller --batch-size"
        )
    alone = measure_loader(cache, batch_size, seconds)
    transformed = moved = None
    if batch_transform is not None:
        transformed = measure_loader(cache, batch_size, seconds, batch_transform=batch_transform)
    if device := accelerator():
        moved = measure_loader(cache, batch_size, seconds, batch_transform=batch_transform, device=device)
    return BenchReport(cache.path, batch_size, alone, transformed, moved, memcpy_bytes_per_s())


def measure_loader(cache: Cache, batch_size: int, seconds: float, **options: Any) -> Throughput:
    """Iterate epochs of a loader with `options` for about `seconds`, at least one, after one to warm up."""
    with EpochLoader(cache, batch_size, **options) as loader:
        for _ in loader:
            pass
        begun_s = time.perf_counter()
        sizes = [_nbytes(batch) for batch in _batches(loader, begun_s + seconds)]
        return Throughput(len(sizes) * batch_size, sum(sizes), time.perf_counter() - begun_s)


def _batches(loader: EpochLoader, until_s: float) -> Iterator[Any]:
    """Batches of one epoch after another until the time is up, but at least one epoch."""
    yield from loader
    while time.perf_counter() < until_s:
        for batch in loader:
            yield batch
            if time.perf_counter() >= until_s:
                return


def _nbytes(value: Any) -> int:
    """Bytes of the tensors, str and bytes in a batch; 0 for anything else that a transform may make."""
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    if getattr(value, "is_nested", False):
        return _nbytes(value.values())
    return len(value) if isinstance(value, str | bytes) else int(getattr(value, "nbytes", 0))


def memcpy_bytes_per_s() -> float:
    """Bytes a second that one thread copies between two buffers of 64 MiB, the best of ten."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    best_s = float("inf")
    for _ in range(_COPIES):
        begun_s = time.perf_counter()
        np.copyto(target, source)
        best_s = min(best_s, time.perf_counter() - begun_s)
    return _COPY_BYTES / best_s
