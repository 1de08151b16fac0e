"""Large caches, made of tiny shards: `python -m benchmarks.scale [shards | plot [most shards] | epochs [count]]`.

With `shards` shards (10,000 by default) of 8 small samples: opening an existing cache to its first batch, in a process
of its own with its peak memory above what it has with torch loaded; a snapshot; the gap between epochs when nothing
and when a third of the shards are new; and a position of an epoch of 10⁹ samples.

plot: one cache that grows from 10 to 100,000 shards; at each power of ten the first batch, its memory and a snapshot, drawn
into benchmarks/output/scale.png.

epochs: 1,000 epochs over 100 shards: how the memory and the number of file descriptors grow after the first 100.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import cachestream as cs
from benchmarks.measure import emit, scratch
from cachestream.permutation import Permutation
from cachestream.storage.shard import shard_path
from cachestream.training.plan import ShuffledOrder
from tests.support.caches import add_shard, numbered

OUTPUT = Path(__file__).parent / "output"
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
    """`count` more shards, copies of the first one without fsync: 100,000 in a minute."""
    with cache.catalogue.transaction() as tables:
        template = min(tables.shard_ids())
        row = tables.shard(template)
    assert row is not None
    content = Path(shard_path(cache.path, template)).read_bytes()
    with cache.catalogue.transaction() as tables:
        schema_id = tables.schema_id(tables.schemas()[0])
        for _ in range(count):
            shard_id = tables.add("last_shard_id", 1)
            Path(shard_path(cache.path, shard_id)).write_bytes(content)
            tables.insert_shard(replace(row, id=shard_id, uses=0), schema_id, 0, [])


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


def plot(most: int = 100_000) -> None:
    """Measure a cache as it grows, and draw it."""
    found: dict[int, dict[str, float]] = {}
    with scratch() as folder:
        cache = cs.Cache(folder / "cache", size_limit="8GB", min_free=0)
        sizes = [10**power for power in range(1, 10) if 10**power <= most]
        add_shards(cache, 0, 1)
        for before, size in itertools.pairwise([1, *sizes]):
            copy_shards(cache, size - before)
            runs = [open_cold(folder / "cache") for _ in range(3)]
            found[size] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            print(size, found[size], file=sys.stderr, flush=True)
    OUTPUT.mkdir(exist_ok=True)
    draw(found, OUTPUT / "scale.png")
    emit(**{f"{name}_at_{size}": value for size, row in found.items() for name, value in row.items()})


def draw(found: dict[int, dict[str, float]], path: Path) -> None:
    """Seconds and memory against the number of shards."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = list(found)
    left.loglog(sizes, [found[n]["first_batch_s"] for n in sizes], "o-", label="open and first batch")
    left.loglog(sizes, [found[n]["snapshot_s"] for n in sizes], "s-", label="snapshot")
    left.axhline(2, ls=":", color="C0", label="target: 2 s")
    left.axhline(0.3, ls=":", color="C1", label="target: 0.3 s")
    left.set(xlabel="shards", ylabel="seconds", title="time")
    left.set(ylim=(None, 20))
    left.legend(loc="upper left", ncols=2, fontsize="small")
    right.semilogx(sizes, [found[n]["memory_mb"] for n in sizes], "o-")
    right.axhline(300, ls=":", color="C0")
    right.set(xlabel="shards", ylabel="MB", ylim=(0, None), title="memory beside torch's (target: 300 MB)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def held() -> tuple[float, int]:
    """The memory of this process in MB, and its open file descriptors."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20, len(os.listdir("/proc/self/fd"))


def epochs(count: int = 1000) -> None:
    """Memory and file descriptors over `count` epochs; a shard goes and one comes every ten."""
    with scratch() as folder:
        cache = cs.Cache(folder / "cache", size_limit="1GB", min_free=0)
        add_shards(cache, 0, 100)
        memory_mb, files = held()
        with cs.EpochLoader(cache, BATCH) as loader:
            for epoch in range(count):
                if epoch % 10 == 9:
                    add_shards(cache, 100 + epoch, 1)
                    cache.evict(int(cache.size_bytes * 0.99))
                for _ in loader:
                    pass
                if epoch == count // 10:
                    memory_mb, files = held()
            after_mb, files_after = held()
    emit(memory_growth_mb=after_mb - memory_mb, memory_mb=after_mb, files_growth=files_after - files)


def main(shards: int = 10_000) -> None:
    with scratch() as folder:
        cache = cs.Cache(folder / "cache", size_limit="8GB")
        add_shards(cache, 0, 1)
        copy_shards(cache, shards - shards // 3 - 1)
        opened = open_cold(folder / "cache")
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            next(iter(loader))
            same = gaps_ms(loader, 4)
            running = iter(loader)
            next(running)
            copy_shards(cache, shards // 3)
            for _ in running:
                time.sleep(0.001)
            ended_s = time.perf_counter()
            next(iter(loader))
            grown_ms = 1e3 * (time.perf_counter() - ended_s)
    order = ShuffledOrder(10**9, Permutation(10**9, 0))
    begun_s = time.perf_counter()
    order.at(np.array([123_456_789]))
    position_ms = 1e3 * (time.perf_counter() - begun_s)
    emit(**opened, gap_ms=statistics.median(same), gap_third_new_ms=grown_ms, position_of_1e9_ms=position_ms)


if __name__ == "__main__":
    modes = {"plot": plot, "epochs": epochs}
    if sys.argv[1:2] and sys.argv[1] in modes:
        modes[sys.argv[1]](*map(int, sys.argv[2:]))
    else:
        main(*map(int, sys.argv[1:]))
