"""Large caches, made of tiny shards, and many epochs: `python -m benchmarks.scale`.

With 10,000 shards of 8 small samples, and with 100,000: opening an existing cache to its first batch, in a process of its
own with its peak memory above what it has with torch loaded; a snapshot. With 10,000: the gap between epochs when nothing
and when a third of the shards are new. A position of an epoch of 10⁹ samples. 1,000 epochs over 100 shards: the growth of
memory and of file descriptors after the first 100.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import cachestream as cs
from benchmarks.measure import emit, scratch
from cachestream.permutation import Permutation
from cachestream.storage.shard import shard_path
from cachestream.training.plan import ShuffledOrder
from tests.support.caches import add_shard, numbered

SHARDS = 10_000
MOST_SHARDS = 100_000
EPOCHS = 1000
SAMPLES_EACH = 8
BATCH = 64

OPEN = """
import json, sys, time
import torch
import cachestream as cs
cs.EpochLoader

def mb(name):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status[name].split()[0]) / 1024

open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
base = mb("VmRSS")
begun = time.perf_counter()
cache = cs.Cache(sys.argv[1])
loader = cs.EpochLoader(cache, batch_size=64)
next(iter(loader))
took = time.perf_counter() - begun
peak = mb("VmHWM")
loader.close()
begun = time.perf_counter()
cache.snapshot().close()
snapshot = time.perf_counter() - begun
print(json.dumps({"first_batch_s": took, "memory_mb": peak - base, "snapshot_s": snapshot}))
"""


def add_shards(cache: cs.Cache, first: int, count: int) -> None:
    for shard in range(first, first + count):
        add_shard(cache, numbered(shard * SAMPLES_EACH, SAMPLES_EACH))


def copy_shards(cache: cs.Cache, count: int) -> None:
    """`count` more shards, copies of the first one: 100,000 in a minute."""
    with cache.catalogue.transaction() as tables:
        template = min(tables.shard_ids())
        content = Path(shard_path(cache.path, template)).read_bytes()
        for _ in range(count):
            shard_id = tables.add("last_shard_id", 1)
            Path(shard_path(cache.path, shard_id)).write_bytes(content)
            tables.execute(
                "INSERT INTO shards (id, state, owner, size_bytes, num_samples, shapes) "
                "SELECT ?, state, owner, size_bytes, num_samples, shapes FROM shards WHERE id = ?",
                (shard_id, template),
            )


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


def held() -> tuple[float, int]:
    """The memory of this process in MB, and its open file descriptors."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20, len(os.listdir("/proc/self/fd"))


def growth() -> tuple[float, int]:
    """Growth of memory (MB) and of file descriptors over many epochs; a shard goes and one comes every ten."""
    with scratch() as folder:
        cache = cs.Cache(folder / "cache", size_limit="1GB", min_free=0)
        add_shards(cache, 0, 100)
        memory_mb, files = held()
        with cs.EpochLoader(cache, BATCH) as loader:
            for epoch in range(EPOCHS):
                if epoch % 10 == 9:
                    add_shards(cache, 100 + epoch, 1)
                    cache.evict(int(cache.size_bytes * 0.99))
                for _ in loader:
                    pass
                if epoch == EPOCHS // 10:
                    memory_mb, files = held()
            after_mb, files_after = held()
    return after_mb - memory_mb, files_after - files


def main() -> None:
    memory_mb, files = growth()
    with scratch() as folder:
        cache = cs.Cache(folder / "cache", size_limit="8GB")
        add_shards(cache, 0, 1)
        copy_shards(cache, SHARDS - SHARDS // 3 - 1)
        opened = open_cold(folder / "cache")
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            next(iter(loader))
            same = gaps_ms(loader, 4)
            running = iter(loader)
            next(running)
            copy_shards(cache, SHARDS // 3)
            for _ in running:
                time.sleep(0.001)
            ended_s = time.perf_counter()
            next(iter(loader))
            grown_ms = 1e3 * (time.perf_counter() - ended_s)
        copy_shards(cache, MOST_SHARDS - SHARDS)
        largest = open_cold(folder / "cache")
    order = ShuffledOrder(10**9, Permutation(10**9, 0))
    begun_s = time.perf_counter()
    order.at(np.array([123_456_789]))
    position_ms = 1e3 * (time.perf_counter() - begun_s)
    emit(
        **opened,
        **{f"{name}_at_{MOST_SHARDS}": value for name, value in largest.items()},
        gap_ms=statistics.median(same),
        gap_third_new_ms=grown_ms,
        position_of_1e9_ms=position_ms,
        memory_growth_mb=memory_mb,
        files_growth=files,
    )


if __name__ == "__main__":
    main()
