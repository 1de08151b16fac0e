"""Fields whose shape varies, as lists, padded and nested: `python -m benchmarks.ragged`.

32,768 samples of 1 to 512 int64 tokens, batches of 256, shuffled, warm; and 4,096 of 1 to 64 KiB of bytes, batches of 64.
Million tokens and GB a second, of the loader alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cachestream as cs
from benchmarks.measure import emit, scratch
from tests.support.caches import add_shard

EPOCHS = 5


def fill(folder: Path, samples: Iterator[dict[str, Any]], shard: int, shards: int) -> cs.Cache:
    cache = cs.Cache(folder, size_limit="4GB", min_free=0)
    for _ in range(shards):
        add_shard(cache, ((str(i), next(samples)) for i in range(shard)))
    return cache


def tokens(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    while True:
        yield {"x": torch.from_numpy(rng.integers(0, 50_000, rng.integers(1, 513)))}


def blobs(rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    while True:
        yield {"x": rng.bytes(int(rng.integers(1024, 65_537)))}


def rate(cache: cs.Cache, batch_size: int, ragged: Any, total: int) -> float:
    """`total` by the median seconds of an epoch."""
    with cs.EpochLoader(cache, batch_size, ragged=ragged) as loader:
        took_s = []
        for _ in range(EPOCHS):
            begun_s = time.perf_counter()
            for _ in loader:
                pass
            took_s.append(time.perf_counter() - begun_s)
    return total / statistics.median(took_s)


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    figures: dict[str, float] = {}
    with scratch() as folder:
        text = fill(folder / "tokens", tokens(rng), 2048, 16)
        data = fill(folder / "bytes", blobs(rng), 256, 16)
        for ragged in ("list", "padded", "nested"):
            figures[f"{ragged}_million_tokens_per_s"] = rate(text, 256, ragged, 32_768 * 256) / 1e6
            figures[f"{ragged}_gb_per_s"] = rate(data, 64, ragged, 4_096 * 33_280) / 1e9
    emit(**figures)


if __name__ == "__main__":
    main()
