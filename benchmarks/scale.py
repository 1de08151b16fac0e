"""Large caches, made of tiny shards: `python -m benchmarks.scale [shards]`.

With `shards` shards (10,000 by default) of 8 small samples: opening an existing cache to its first batch, in a process
of its own with its peak memory beside that of `import torch` alone; a snapshot; the gap between epochs when nothing
and when a quarter of the shards are new; and a position of an epoch of 10⁹ samples.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import cachestream as cs
from benchmarks.measure import emit, scratch
from cachestream.permutation import Permutation
from cachestream.training.plan import ShuffledOrder
from tests.support.caches import add_shard, numbered

SAMPLES_EACH = 8
BATCH = 64

OPEN = """
import json, resource, sys, time
import torch
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import cachestream as cs
begun = time.perf_counter()
cache = cs.Cache(sys.argv[1])
loader = cs.EpochLoader(cache, batch_size=64)
next(iter(loader))
took = time.perf_counter() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begun = time.perf_counter()
cache.snapshot().close()
snapshot = time.perf_counter() - begun
loader.close()
print(json.dumps({"first_batch_s": took, "memory_mb": (peak - base) / 1024, "snapshot_s": snapshot}))
"""


def add_shards(cache: cs.Cache, first: int, count: int) -> None:
    for shard in range(first, first + count):
        add_shard(cache, numbered(shard * SAMPLES_EACH, SAMPLES_EACH))


def open_cold(folder: Path) -> dict[str, float]:
    """First batch, memory and snapshot of an existing cache, in a process that knows nothing of it."""
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder)], stdout=subprocess.PIPE, check=True, timeout=300, text=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def gaps_ms(loader: cs.EpochLoader, epochs: int) -> list[float]:
    """From the last batch of an epoch to the first of the next, with a little training at each batch."""
    found, ended_s = [], 0.0
    for _ in range(epochs):
        for number, _ in enumerate(loader):
            if number == 0 and ended_s:
                found.append(1e3 * (time.perf_counter() - ended_s))
            time.sleep(0.001)
            ended_s = time.perf_counter()
    return found


def main(shards: int = 10_000) -> None:
    with scratch() as folder:
        cache = cs.Cache(folder / "cache", size_limit="8GB")
        add_shards(cache, 0, shards * 3 // 4)
        opened = open_cold(folder / "cache")
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            next(iter(loader))
            same = gaps_ms(loader, 4)
            running = iter(loader)
            next(running)
            add_shards(cache, shards, shards // 4)
            for _ in running:
                time.sleep(0.001)
            ended_s = time.perf_counter()
            next(iter(loader))
            grown_ms = 1e3 * (time.perf_counter() - ended_s)
    order = ShuffledOrder(10**9, Permutation(10**9, 0))
    begun_s = time.perf_counter()
    order.at(np.array([123_456_789]))
    position_ms = 1e3 * (time.perf_counter() - begun_s)
    emit(
        **opened, gap_ms=statistics.median(same), gap_quarter_new_ms=grown_ms, position_of_1e9_ms=position_ms
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
