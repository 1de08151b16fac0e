"""Fill the cache of one host from that of another, so that the remote is read once.

    python examples/cache_source.py                                    (its caches are ./host-0 and ./host-1)
    python examples/cache_source.py sftp://host-0/scratch/train        (the cache of a host, or a copy: s3://bucket/cache)

The first host simulates here what a slow remote would give. The last line tells that both hold the same.
"""

import sys
from typing import Any

import numpy as np

import cachestream as cs


def simulate(rng: np.random.Generator) -> dict[str, Any]:
    """A sample of a remote: a noisy wave and its frequency."""
    frequency = rng.uniform(2, 6)
    wave = np.sin(2 * np.pi * frequency * np.linspace(0, 1, 256)) + rng.normal(0, 0.1, 256)
    return {"wave": wave.astype(np.float32), "frequency": frequency}


def fill(cache: cs.Cache, source: cs.Source) -> None:
    with cs.start_worker(cache, source, num_workers=2) as worker:
        worker.wait(timeout_s=600)
    print(f"{cache.path}: {cache.num_samples} samples")


url = sys.argv[1] if len(sys.argv) > 1 else "host-0"
if url == "host-0":
    fill(cs.Cache("host-0", "100MB"), cs.CallableSource(simulate, num_units=500))

second = cs.Cache("host-1", "100MB")
fill(second, cs.CacheSource(url))

total = 0.0
with cs.EpochLoader(second, batch_size=50, shuffle=False, drop_last=False) as loader:
    for batch in loader:  # {"wave": float32 [50, 256], "frequency": float64 [50]}
        total += float(batch["frequency"].sum())
print(f"a mean frequency of {total / second.num_samples:.2f} in {second.num_samples} samples")
