"""The cost of a mixture: `python -m benchmarks.mixture`.

16,384 samples of 32 KiB, three quarters of them of one source and the rest of another, in batches of 64 from the page cache, three
ways in turns: without a mixture; with the proportions of the cache; and with a function of the step, which goes from a tenth of the
smaller source to a half within an epoch. The first epoch of each turn is not counted: some of it was gathered during the pause.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import cachestream as cs
from benchmarks.measure import emit, median_ratio, scratch

SAMPLES: Final = 16_384
FLOATS: Final = 8 * 1024
BATCH: Final = 64
TURNS: Final = 11
EPOCHS: Final = 3  # of a turn


class Numbered:
    """Samples that hold their own number throughout."""

    def __init__(self, name: str, num_units: int) -> None:
        self.fingerprint, self.num_units = name, num_units

    def read(self, unit: int, rng: np.random.Generator) -> object:
        yield str(unit), {"x": np.full(FLOATS, unit, np.float32)}


def fill(folder: Path) -> cs.Cache:
    few = SAMPLES // 4
    mixed = cs.mix({"many": (Numbered("many", SAMPLES - few), 3), "few": (Numbered("few", few), 1)})
    cache = cs.Cache(folder, size_limit="2GB", min_free=0)
    with cs.start_worker(cache, mixed, num_workers=2) as worker:
        worker.wait(timeout_s=300)
    assert cache.num_samples == SAMPLES
    return cache


def rising(step: int) -> dict[str, float]:
    few = 0.1 + 0.4 * (step % (SAMPLES // BATCH)) / (SAMPLES // BATCH)
    return {"many": 1 - few, "few": few}


def samples_per_s(loader: cs.EpochLoader) -> float:
    begun_s, samples = 0.0, 0
    for epoch in range(1 + EPOCHS):
        for batch in loader:
            samples += len(batch["x"]) if epoch else 0
        begun_s = begun_s or time.perf_counter()
    return samples / (time.perf_counter() - begun_s)


def main() -> None:
    torch.set_num_threads(1)
    options: dict[str, dict[str, Any]] = {
        "without": {},
        "fixed": {"mixture": {"many": 3, "few": 1}},
        "by_step": {"mixture": rising},
    }
    with scratch() as folder, fill(folder) as cache:
        found: dict[str, list[float]] = {name: [] for name in options}
        loaders = {name: cs.EpochLoader(cache, BATCH, **mixture) for name, mixture in options.items()}
        for turn in range(1 + TURNS):
            for name, loader in loaders.items():
                speed = samples_per_s(loader)
                found[name] += [speed] if turn else []  # the first reads the files
        drawn = loaders["fixed"].stats.mixture["few"]
        assert abs(drawn.share - 0.25) < 1e-9
        for loader in loaders.values():
            loader.close()
    figures = {f"{name}_samples_per_s": statistics.median(speeds) for name, speeds in found.items()}
    for name in ("fixed", "by_step"):
        figures[f"{name}_to_without"] = median_ratio(found[name], found["without"])
    emit(**figures)


if __name__ == "__main__":
    main()
