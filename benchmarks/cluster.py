"""Filling on a Ray cluster: `python -m benchmarks.cluster`. The nodes of the cluster are processes of this machine.

Samples a second of a function that waits 50 ms, against the number of actors; photographs decoded by one actor, beside one
local process, in turns; the bytes that four caches with one filling read from a real S3 server (rclone), beside one cache;
and a fifth cache that joins them, beside copies of the same shards, each synced. For the simulation of `scale_out`: the speeds
of a node, and the time and the bytes that three to five caches take in each arrangement from a remote of 20 MiB/s.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
from PIL import Image
from ray.cluster_utils import Cluster

import cachestream as cs
from benchmarks.measure import emit, median_ratio, scratch
from cachestream.storage.telemetry import Board
from tests.support.s3 import run_s3_server

NODES: Final = 4
STORE_BYTES: Final = 400 << 20
WAIT_S: Final = 0.05
ACTORS: Final = (1, 4, 16, 32)
PER_ACTOR: Final = 60  # samples that are timed, for each actor
PHOTOGRAPHS, SIDE = 1500, 512
TURNS: Final = 3
FILES, FILE_FLOATS = 400, 256 * 1024  # 1 MiB each
REMOTE_MIB_PER_S, SMALL_FILES = 20, 96  # of the runs that the simulation is compared with
SMALL_SHARD: Final = 4 << 20
ARRANGEMENTS: Final[dict[str, dict[str, Any]]] = {
    "alone": {},
    "partition": {},
    "share": {"share": "all"},
}
TIMEOUT_S: Final = 300.0


def slow(sample: Any, seen: Path) -> Any:
    """Wait, and leave the number of this process in the folder `seen`."""
    (seen / str(os.getpid())).touch()
    time.sleep(WAIT_S)
    return sample


@contextmanager
def nodes(count: int) -> Iterator[None]:
    """A Ray cluster of `count` nodes, to which this process is connected."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE_BYTES}
    )
    for _ in range(count - 1):
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def fetched_bytes(cache: cs.Cache) -> int:
    """The bytes that the processes of the cache have read from the remote."""
    return int(Board(cache.directory.worker_file("board")).totals().fetched_bytes)


def seconds_between(cache: cs.Cache, first: int, last: int) -> float:
    """The time that the cache takes from `first` samples to `last`."""
    cache.wait(first, timeout_s=TIMEOUT_S)
    begun_s, begun = time.perf_counter(), cache.num_samples
    while (count := cache.num_samples) < last:
        time.sleep(0.02)
        if time.perf_counter() - begun_s > TIMEOUT_S:
            raise TimeoutError(f"{count} of {last} samples after {TIMEOUT_S:g} s")
    return (time.perf_counter() - begun_s) / (count - begun) * (last - first)


def rate_of_waiting(folder: Path, actors: int) -> float:
    """Samples a second of a transform that waits, by so many actors, from when all of them work."""
    samples = [{"x": np.full(16, i, np.float32)} for i in range(actors * 16 * PER_ACTOR)]
    seen = folder / "seen"
    seen.mkdir(parents=True)
    options: dict[str, Any] = {"engine": "ray", "num_workers": actors, "ray_options": {"num_cpus": 0.01}}
    with (
        cs.Cache(folder / "cache", size_limit="100MB") as cache,
        cs.start_worker(cache, samples, transform=partial(slow, seen=seen), **options),
    ):
        while len(os.listdir(seen)) < actors:
            time.sleep(0.1)
        first = cache.num_samples + actors * PER_ACTOR
        return PER_ACTOR * actors / seconds_between(cache, first, first + PER_ACTOR * actors)


def write_photographs(folder: Path) -> None:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(64):
        coarse = rng.integers(0, 255, (16, 16, 3), np.uint8)
        image = Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        image.save(folder / f"{number:04d}.jpg", quality=90)
    for number in range(64, PHOTOGRAPHS):
        shutil.copyfile(folder / f"{number % 64:04d}.jpg", folder / f"{number:04d}.jpg")


def seconds_of_photographs(folder: Path, photographs: Path, engine: str, concurrency: int) -> float:
    source = cs.open_source(f"{photographs}/*.jpg", resize=(224, 224))
    with (
        cs.Cache(folder, size_limit="2GB") as cache,
        cs.start_worker(cache, source, num_workers=1, engine=engine, concurrency=concurrency),
    ):
        took_s = seconds_between(cache, PHOTOGRAPHS // 5, PHOTOGRAPHS * 9 // 10)
    shutil.rmtree(folder)
    return took_s


def copy_seconds(cache: cs.Cache, folder: Path) -> float:
    """The time that copies of all shards of the cache take, each synced."""
    folder.mkdir()
    begun_s = time.perf_counter()
    for path in sorted(Path(cache.directory.shards).glob("*.safetensors")):
        with open(path, "rb") as source, open(folder / path.name, "wb") as target:
            shutil.copyfileobj(source, target, 8 << 20)
            target.flush()
            os.fsync(target.fileno())
    return time.perf_counter() - begun_s


def measure_sharing(folder: Path) -> dict[str, float]:
    """The figures of four caches that share a filling, and of a fifth one that joins."""
    rng = np.random.default_rng(0)
    with run_s3_server(folder / "s3") as server, ExitStack() as stack:
        bucket = server.bucket("remote")
        for number in range(FILES):
            np.save(bucket / f"{number:04d}.npy", rng.random(FILE_FLOATS, dtype=np.float32))
        source = cs.open_source("s3://remote/*.npy", storage_options=server.storage_options)

        def start(name: str, **options: Any) -> cs.Cache:
            cache = stack.enter_context(cs.Cache(folder / name, size_limit="2GB"))
            stack.enter_context(cs.start_worker(cache, source, num_workers=1, shard_size="16MB", **options))
            return cache

        alone = start("alone")
        alone_s = seconds_between(alone, FILES // 10, FILES) / 0.9
        totals = Board(alone.directory.worker_file("board")).totals()
        caches = [start(f"cache-{number}", share="benchmark") for number in range(NODES)]
        for cache in caches:
            cache.wait(FILES, timeout_s=TIMEOUT_S)
        read = sum(map(fetched_bytes, caches))
        begun_s = time.perf_counter()
        fifth = start("fifth", share="benchmark")
        fifth.wait(1, timeout_s=TIMEOUT_S)
        first_s = time.perf_counter() - begun_s
        fifth.wait(FILES, timeout_s=TIMEOUT_S)
        joining_s = time.perf_counter() - begun_s - first_s
        copying_s = statistics.median(copy_seconds(fifth, folder / f"copies-{turn}") for turn in range(TURNS))
        return {
            "shared_bytes_ratio": read / fetched_bytes(alone),
            "joined_bytes": fetched_bytes(fifth),
            "joining_to_copying": copying_s / joining_s,
            "joining_mb_per_s": FILES * FILE_FLOATS * 4 / joining_s / 1e6,
            "joining_first_s": first_s,
            "remote_bytes_per_s": FILES * FILE_FLOATS * 4 / alone_s,
            "copy_bytes_per_s": FILES * FILE_FLOATS * 4 / joining_s,
            "shard_overhead_s": totals.publish_s / alone.num_shards,
            "decode_s": totals.pack_s / FILES,
        }


def measure_arrangements(folder: Path) -> dict[str, float]:
    """Seconds until the median cache is full, from the first byte on, and the bytes read, by arrangement."""
    rng, figures = np.random.default_rng(0), dict[str, float]()
    with run_s3_server(folder / "slow", bwlimit=f"{REMOTE_MIB_PER_S}M") as server:
        for number in range(SMALL_FILES):
            np.save(server.bucket("remote") / f"{number:04d}.npy", rng.random(FILE_FLOATS, dtype=np.float32))
        source = cs.open_source("s3://remote/*.npy", storage_options=server.storage_options)
        for count in (3, 4, 5):
            for name, options in ARRANGEMENTS.items():
                paths = [folder / f"{name}-{count}-{node}" for node in range(count)]
                caches = [cs.Cache(path, size_limit="1GB") for path in paths]
                given = [of_node(name, node, count, options) for node in range(count)]
                with ThreadPoolExecutor() as threads, ExitStack() as stack:
                    times = threads.submit(times_until_full, caches)
                    for worker in threads.map(partial(start_small, source), caches, given):
                        stack.enter_context(worker)
                    full_s, read = times.result()
                figures[f"{count} nodes, {name} / full_s"] = statistics.median(full_s)
                figures[f"{count} nodes, {name} / egress_bytes"] = read
    return figures


def of_node(name: str, node: int, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `start_worker` on one node of an arrangement."""
    if name == "alone":
        return {"seed": node}
    if name == "partition":
        return {"partition": (node, count)}
    return {**options, "share": f"{options['share']}-{count}"}


def start_small(source: cs.Source, cache: cs.Cache, options: dict[str, Any]) -> cs.Worker:
    return cs.start_worker(cache, source, num_workers=1, shard_size=SMALL_SHARD, **options)


def times_until_full(caches: list[cs.Cache]) -> tuple[list[float], int]:
    """The seconds from the first byte that any of `caches` reads until each is full, and the bytes read by all."""
    deadline_s, begun_s = time.perf_counter() + TIMEOUT_S, 0.0
    full: dict[str, float] = {}
    while len(full) < len(caches):
        time.sleep(0.05)
        now_s = time.perf_counter()
        if now_s > deadline_s:
            raise TimeoutError(f"{len(full)} of {len(caches)} caches are full after {TIMEOUT_S:g} s")
        if not begun_s and any(map(fetched_bytes, caches)):
            begun_s = now_s
        for cache in caches:
            if cache.path not in full and cache.fill_state() == "complete":
                full[cache.path] = now_s - begun_s
    return list(full.values()), sum(map(fetched_bytes, caches))


def main() -> None:
    figures: dict[str, float] = {}
    with scratch() as folder, nodes(NODES):
        rates = {actors: rate_of_waiting(folder / f"waiting-{actors}", actors) for actors in ACTORS}
        for actors, rate in rates.items():
            figures[f"waiting_{actors}_per_s"] = rate
        figures["waiting_to_linear"] = rates[ACTORS[-1]] / ACTORS[-1] * WAIT_S
        photographs = folder / "photographs"
        write_photographs(photographs)
        for name, concurrency in (("photographs", 1), ("photographs_at_once", 16)):
            times_s: dict[str, list[float]] = {"local": [], "ray": []}
            for turn, engine in itertools.product(range(TURNS), times_s):
                path = folder / f"{name}-{engine}-{turn}"
                times_s[engine].append(seconds_of_photographs(path, photographs, engine, concurrency))
            figures[f"{name}_to_local"] = median_ratio(times_s["local"], times_s["ray"])
            figures[f"{name}_per_s"] = PHOTOGRAPHS * 0.7 / statistics.median(times_s["ray"])
        figures |= measure_sharing(folder)
        figures |= measure_arrangements(folder)
        figures |= {
            "num_shards": SMALL_FILES * FILE_FLOATS * 4 // SMALL_SHARD,
            "shard_bytes": SMALL_SHARD,
            "fetched_bytes": SMALL_SHARD,
            "samples_per_shard": SMALL_SHARD // (FILE_FLOATS * 4),
            "limit_bytes": 10**9,
            "processors": 1,
            "job_bytes_per_s": REMOTE_MIB_PER_S << 20,
        }
    emit(**figures)


if __name__ == "__main__":
    main()
