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


def speeds(loader: cs.EpochLoader) -> tuple[float, float]:
    """Samples a second, and samples a second of processor time."""
    begun_s, cpu_s, samples = 0.0, 0.0, 0
    for epoch in range(1 + EPOCHS):
        for batch in loader:
            samples += len(batch["x"]) if epoch else 0
        if not epoch:
            begun_s, cpu_s = time.perf_counter(), time.process_time()
    return samples / (time.perf_counter() - begun_s), samples / (time.process_time() - cpu_s)


def main() -> None:
    torch.set_num_threads(1)
    options: dict[str, dict[str, Any]] = {
        "without": {},
        "fixed": {"mixture": {"many": 3, "few": 1}},
        "by_step": {"mixture": rising},
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in options}
    with scratch() as folder, fill(folder) as cache:
        loaders = {name: cs.EpochLoader(cache, BATCH, **mixture) for name, mixture in options.items()}
        for turn in range(1 + TURNS):
            for name, loader in loaders.items():
                taken = speeds(loader)
                found[name] += [taken] if turn else []  # the first reads the files
        assert abs(loaders["fixed"].stats.mixture["few"].share - 0.25) < 1e-9
        for loader in loaders.values():
            loader.close()
    by_clock, by_cpu = ({name: [pair[n] for pair in pairs] for name, pairs in found.items()} for n in (0, 1))
    figures = {f"{name}_samples_per_s": statistics.median(rates) for name, rates in by_clock.items()}
    for name in ("fixed", "by_step"):
        figures[f"{name}_to_without"] = median_ratio(by_clock[name], by_clock["without"])
        figures[f"{name}_cpu_to_without"] = median_ratio(by_cpu["without"], by_cpu[name])
    emit(**figures)


if __name__ == "__main__":
    main()
