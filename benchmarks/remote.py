"""The share of a distant remote's bandwidth that the filling uses: `python -m benchmarks.remote`.

A real S3 server (rclone) behind a network that adds 50 ms to every request and passes 40 MB/s in all;
objects of 100 KB, four sampling processes. The share is taken over the samples cached between 2 s and
the end, so start-up and the first shards do not count.
"""

from __future__ import annotations

import time

import numpy as np

import cachestream as cs
from benchmarks.measure import emit, scratch
from tests.support.proxy import run_proxy
from tests.support.s3 import run_s3_server

OBJECTS = 6000
OBJECT_BYTES = 100_000
LATENCY_S = 0.05
BYTES_PER_S = 40e6


def main() -> None:
    with scratch() as folder, run_s3_server(folder / "s3", fresh=False) as server:
        bucket = server.bucket("arrays")
        data = np.random.default_rng(0).integers(0, 256, OBJECT_BYTES, dtype=np.uint8)
        for i in range(OBJECTS):
            data[:4] = np.frombuffer(np.uint32(i).tobytes(), np.uint8)
            (bucket / f"{i:06d}.bin").write_bytes(data.tobytes())
        with run_proxy(server.port, latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S) as proxy:
            begun_s = time.perf_counter()
            source = cs.open_source("s3://arrays", storage_options=server.options_through(proxy.port))
            cache = cs.Cache(folder / "cache", size_limit="4GB")
            with cs.start_worker(cache, source, num_workers=4):
                cache.wait(1, timeout_s=60)
                first_s = time.perf_counter()
                before = cache.wait(OBJECTS // 5, timeout_s=60)
                before_s = time.perf_counter()
                after = cache.wait(OBJECTS * 9 // 10, timeout_s=120)
                after_s = time.perf_counter()
        rate = (after - before) * OBJECT_BYTES / (after_s - before_s)
        emit(
            first_sample_s=first_s - begun_s,
            mb_per_s=rate / 1e6,
            share_of_bandwidth=rate / BYTES_PER_S,
            most_in_flight=proxy.in_flight_peak,
        )


if __name__ == "__main__":
    main()
