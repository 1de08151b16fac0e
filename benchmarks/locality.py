"""What `locality=` costs in shuffling and gains in reading: `python -m benchmarks.locality [quality|speed]`.

quality: 100,000 samples in shards of 2,000, sorted into 100 classes, so that a batch of one place has one class; batches
of 256. For each window: how far neighbours in the order lie from each other in the cache, as a share of what a full
shuffle gives; the entropy of the classes in a batch, likewise; how many classes a batch has; how many of the cache's
samples are within reach of a batch.

speed: small samples (2 KiB), 256 MiB of them, in shards of 8 MB, none in the page cache, a quarter of an epoch in batches of
256; shuffled fully, within windows, and in order. Rows as large as the pages that a disk reads gain nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import cachestream as cs
from benchmarks.measure import emit, scratch
from benchmarks.pagecache import evict
from cachestream.permutation import Permutation
from cachestream.training.plan import LocalOrder, SampleOrder, SequentialOrder, ShuffledOrder, run_length
from tests.support.caches import add_shard

SAMPLES, SHARD, CLASSES, BATCH = 100_000, 2_000, 100, 256
WINDOWS = (1_000, 4_000, 16_000, 64_000)
ROW_FLOATS, SHARDS, SHARD_ROWS = 512, 32, 4096
KEY = 11


def orders() -> dict[str, SampleOrder]:
    run = run_length(np.full(SAMPLES // SHARD, SHARD))
    local = {f"{w:,}": LocalOrder(SAMPLES, SAMPLES, w, run, KEY) for w in WINDOWS}
    return {
        "full": ShuffledOrder(SAMPLES, Permutation(SAMPLES, KEY)),
        **local,
        "none": SequentialOrder(SAMPLES),
    }


def entropy_bits(labels: npt.NDArray[np.int64]) -> float:
    """The entropy of the classes among `labels`, in bits."""
    share = np.bincount(labels, minlength=CLASSES) / len(labels)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def quality(order: SampleOrder) -> tuple[float, float, float]:
    """Distance of neighbours (in samples), entropy (bits) and number of classes in a batch."""
    drawn = order.at(np.arange(order.size, dtype=np.int64))
    labels = drawn // (SAMPLES // CLASSES)
    batches = labels[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH)
    return (
        float(np.abs(np.diff(drawn)).mean()),
        statistics.mean(map(entropy_bits, batches)),
        statistics.mean(len(np.unique(batch)) for batch in batches),
    )


def measure_quality() -> None:
    found = {name: quality(order) for name, order in orders().items()}
    full = found["full"]
    for name, (distance, bits, classes) in found.items():
        print(f"{name:>8} {distance / full[0]:8.3f} {bits / full[1]:8.3f} {classes:6.1f}", file=sys.stderr)
    emit(**{f"entropy_share_{name}": bits / full[1] for name, (_, bits, _) in found.items()})


def fill(folder: Path) -> cs.Cache:
    cache = cs.Cache(folder, size_limit="4GB", min_free=0)
    for shard in range(SHARDS):
        rows = torch.arange(shard * SHARD_ROWS, (shard + 1) * SHARD_ROWS, dtype=torch.float32)
        add_shard(cache, ((str(int(n)), {"x": torch.full((ROW_FLOATS,), float(n))}) for n in rows))
    return cache


def cold_rate(cache: cs.Cache, folder: Path, **options: object) -> float:
    """Samples a second from the first batch on."""
    with cs.EpochLoader(cache, BATCH, **options) as loader:  # type: ignore[arg-type]
        for _ in loader:
            pass
        loader.set_epoch(loader.epoch + 1)
        evict(folder)
        came_s = []
        for batch in loader:
            assert torch.equal(batch["x"][:, 0], batch["x"][:, -1])
            came_s.append(time.perf_counter())
            if len(came_s) == SHARDS * SHARD_ROWS // BATCH // 4:
                break
        return (len(came_s) - 1) * BATCH / (came_s[-1] - came_s[0])


def measure_speed() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        cache = fill(folder)
        ways: dict[str, dict[str, object]] = {
            "full": {},
            "window_32768": {"locality": 32_768},
            "window_8192": {"locality": 8192},
            "none": {"shuffle": False},
        }
        emit(**{f"{name}_samples_per_s": cold_rate(cache, folder, **way) for name, way in ways.items()})


if __name__ == "__main__":
    if sys.argv[1:] != ["speed"]:
        measure_quality()
    if sys.argv[1:] != ["quality"]:
        measure_speed()
