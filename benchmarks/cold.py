"""From nothing, over a slow remote: `python -m benchmarks.cold [seconds]`.

A real S3 server behind a network that passes 40 MiB/s; arrays of 128 KiB. The trainer takes batches of 64 (8 MiB) and
computes for 25 ms each, so it wants 335 MB/s. Counted from the call of `stream`, in a script that has loaded torch: when the first batch came, how many
steps were made, which share of the time after the first batch went into waiting, and how much of the bandwidth the
filling used meanwhile. Before that, for comparison: a new Python that only loads numpy and s3fs and reads
the samples of one batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch  # noqa: F401 - as the script that trains has done

import cachestream as cs
from benchmarks.fill import write_arrays
from benchmarks.measure import emit, scratch
from tests.support.proxy import run_proxy
from tests.support.s3 import run_s3_server

BYTES_PER_S = 40 * 2**20
SAMPLE_BYTES = 128 * 1024
BATCH = 64
COMPUTE_S = 0.025
S3FS_ALONE = f"""
import json, sys, numpy, s3fs
filesystem = s3fs.S3FileSystem(**json.loads(sys.argv[1]))
found = filesystem.cat([f"arrays/{{number:06d}}.npy" for number in range({BATCH})])
assert len(found) == {BATCH}
"""


def driver_alone_s(options: dict[str, Any]) -> float:
    """Seconds in which a new Python loads numpy and s3fs and reads the objects of one batch."""
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", S3FS_ALONE, json.dumps(options)], check=True, timeout=60.0)
    return time.perf_counter() - begun_s


def train(loader: cs.EpochLoader, begun_s: float, seconds: float) -> tuple[float, int, float]:
    """Seconds to the first batch, the steps made, and the seconds spent waiting after the first."""
    first_s, steps, waited_s = 0.0, 0, 0.0
    while True:
        asked_s = time.perf_counter()
        for batch in loader:
            came_s = time.perf_counter()
            assert batch["array"].shape[0] == BATCH
            if not first_s:
                first_s = came_s - begun_s
            else:
                waited_s += came_s - asked_s
            if came_s - begun_s >= seconds:
                return first_s, steps, waited_s
            time.sleep(COMPUTE_S)
            steps += 1
            asked_s = time.perf_counter()


def main(seconds: float = 60.0) -> None:
    with scratch() as folder, run_s3_server(folder / "s3", fresh=False) as server:
        bucket = server.bucket("arrays")
        bucket.rmdir()
        objects = int(1.1 * seconds * BYTES_PER_S / SAMPLE_BYTES)
        write_arrays(bucket, objects)
        os.sync()  # the disk of a remote does not write while it is read
        with run_proxy(server.port, bytes_per_s=BYTES_PER_S) as proxy:
            options = server.options_through(proxy.port)
            alone_s = driver_alone_s(options)
            begun_s = time.perf_counter()
            loader = cs.stream(
                f"s3://arrays/{{000000..{objects - 1:06d}}}.npy",  # this server lists 1,000 names a second
                cache=folder / "cache",
                size_limit="8GB",
                batch_size=BATCH,
                num_workers=2,
                storage_options=options,
            )
            first_s, steps, waited_s = train(loader, begun_s, seconds)
            cached = loader.cache.num_samples
            loader.close()
        emit(
            first_batch_s=first_s,
            driver_alone_s=alone_s,
            steps=steps,
            possible_steps=seconds / COMPUTE_S,
            waiting_percent=100 * waited_s / (seconds - first_s),
            bandwidth_used_percent=100 * cached * SAMPLE_BYTES / (BYTES_PER_S * seconds),
        )


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
