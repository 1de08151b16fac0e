"""Speed of a cache: the loader alone, with a batch transform, onto the device; beside memcpy and the disk."""

from __future__ import annotations

import functools
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cachestream.config import format_size
from cachestream.errors import NotEnoughSamplesError
from cachestream.storage.cache import Cache
from cachestream.storage.shard import shard_path
from cachestream.training.batches.transfer import accelerator
from cachestream.training.loader import EpochLoader

_COPY_BYTES: Final = 64 * 2**20
_COPIES: Final = 10
_DISK_S: Final = 1.0
_DISK_DEPTH: Final = 16
_DISK_BLOCKS: Final = (4096, 1 << 20)  # the least and the most that is read at a time
_NO_DEVICE: Final = "no accelerator"
_NO_DISK: Final = "not read: this filesystem cannot bypass the page cache"


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
    accelerator, with the transform there, None without one. `disk_bytes_per_s`: random reads of `block_bytes`
    past the page cache, 16 at once; None where the filesystem cannot do that.
    """

    place: str
    batch_size: int
    alone: Throughput
    transformed: Throughput | None
    moved: Throughput | None
    memcpy_bytes_per_s: float
    disk_bytes_per_s: float | None
    block_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what was not measured is None."""
        return self._plain(self.alone) | {
            "memcpy_bytes_per_s": self.memcpy_bytes_per_s,
            "share_of_memcpy": self.alone.bytes_per_s / self.memcpy_bytes_per_s,
            "batch_transform": None if self.transformed is None else self._plain(self.transformed),
            "device": None if self.moved is None else self._plain(self.moved),
            "disk_bytes_per_s": self.disk_bytes_per_s,
            "disk_block_bytes": self.block_bytes,
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

        def line(name: str, bytes_per_s: float | None, samples: str = "", instead: str = "") -> str:
            if bytes_per_s is None:
                return f"{name:28}{instead}"
            share = bytes_per_s / self.memcpy_bytes_per_s
            return f"{name:28}{samples:>12}{format_size(bytes_per_s) + '/s':>14}{share:>12.0%}"

        def loader(name: str, rate: Throughput | None, instead: str = "") -> str:
            if rate is None:
                return line(name, None, instead=instead)
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
        lines.append(loader("onto the device", self.moved, f"{_NO_DEVICE:>26}"))
        disk = f"disk, random {format_size(self.block_bytes)}"
        return "\n".join([*lines, line(disk, self.disk_bytes_per_s, instead=_NO_DISK)])


def bench(
    cache: Cache,
    batch_size: int = 64,
    seconds: float = 5.0,
    batch_transform: Callable[..., Any] | None = None,
) -> BenchReport:
    """Iterate shuffled epochs of the cache for about `seconds` each: alone, with `batch_transform`, onto the
    accelerator.

    Memory copies and reads of the disk are measured for comparison.

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
    block = -(-alone.num_bytes // alone.num_samples // 4096) * 4096
    block = min(max(block, _DISK_BLOCKS[0]), _DISK_BLOCKS[1])
    return BenchReport(
        cache.path,
        batch_size,
        alone,
        transformed,
        moved,
        memcpy_bytes_per_s(),
        disk_bytes_per_s(cache, block, min(seconds, _DISK_S)),
        block,
    )


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


def disk_bytes_per_s(cache: Cache, block_bytes: int, seconds: float) -> float | None:
    """Bytes a second of random reads of the shards from the disk itself, `block_bytes` (a multiple of 4096),
    16 at once.

    The page cache is left as it is. None where the filesystem cannot bypass it (tmpfs).
    """
    snapshot, lease = cache.take_snapshot()
    try:
        paths = [shard_path(snapshot.root, number) for number in snapshot.shard_ids.tolist()]
        begun_s = time.perf_counter()
        read = functools.partial(_read_blocks, paths, block_bytes, begun_s + seconds)
        with ThreadPoolExecutor(_DISK_DEPTH) as threads:
            total = sum(threads.map(read, range(_DISK_DEPTH)))
        return total / (time.perf_counter() - begun_s) if total else None
    except OSError:
        return None
    finally:
        lease.release()


def _read_blocks(paths: list[str], block_bytes: int, until_s: float, seed: int) -> int:
    """Bytes read at random places of `paths` until `until_s`. Raises OSError where the filesystem cannot."""
    rng, count = random.Random(seed), 0
    with mmap.mmap(-1, block_bytes) as memory:  # begins at a page, as the kernel wants it
        while time.perf_counter() < until_s:
            fd = os.open(rng.choice(paths), os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                blocks = max(1, os.fstat(fd).st_size // block_bytes)
                for _ in range(8):
                    count += os.preadv(fd, [memory], rng.randrange(blocks) * block_bytes)
            finally:
                os.close(fd)
    return count
