"""The share of the fetched samples that is trained on, by the speed of filling: `python -m benchmarks.waste`.

A cache holds a fifth of the remote, and a trainer takes 50 ms a step. The speed of filling is set by a pause before each
sample, and given in caches' worth that a filler alone would fetch in an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

import cachestream as cs
from benchmarks.measure import emit, scratch

REMOTE: Final = 4000
CACHED: Final = 840
SAMPLE_BYTES: Final = 4000
STEP_S: Final = 0.05
BATCH: Final = 32
PROCESSES: Final = 2
SECONDS: Final = 20.0
RATIOS: Final = (0.1, 0.5, 2.0, 8.0)
PLOT: Final = Path(__file__).parents[1] / "docs" / "waste.png"


class Numbers:
    """`REMOTE` samples, each after a pause."""

    fingerprint = "waste"
    num_units = REMOTE

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, dict[str, object]]]:
        time.sleep(self.pause_s)
        yield str(unit), {"x": np.full(SAMPLE_BYTES, unit % 256, np.uint8)}


def trained_share(ratio: float) -> float:
    """The share of the fetched samples that was trained on, without those that still wait for an epoch."""
    pause_s = PROCESSES * STEP_S / BATCH / ratio
    limit_bytes = CACHED * (SAMPLE_BYTES + 60) + 700_000
    trained: dict[int, int] = {}
    with scratch() as folder, cs.Cache(folder / "cache", limit_bytes, min_free=0) as cache:
        source = Numbers(pause_s)
        with (
            cs.start_worker(cache, source, num_workers=PROCESSES, concurrency=1),
            cs.EpochLoader(cache, BATCH, min_samples=CACHED // 4) as loader,
        ):
            until_s = time.monotonic() + SECONDS
            while time.monotonic() < until_s:
                for _ in loader:
                    snapshot = loader.dataset.snapshot
                    trained.update(zip(snapshot.shard_ids.tolist(), snapshot.counts.tolist(), strict=True))
                    time.sleep(STEP_S)
        with cache.catalogue.reading() as tables:
            fetched = int(tables.meta("written_samples"))
            idle = sum(row.num_samples for row in tables.shards() if row.id not in trained)
    return sum(trained.values()) / (fetched - idle)


def draw(figures: Mapping[str, float]) -> None:
    """Draw what `main` emits, for the guide."""
    shares = [100 * figures[_name(ratio)] for ratio in RATIOS]
    from matplotlib.figure import Figure  # takes a second to load, and the page needs the rest alone

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.semilogx(RATIOS, shares, "o-", color="#0072B2")
    axes.set(
        ylim=(0, 105),
        xlabel="caches fetched in an epoch, if nothing waited",
        ylabel="fetched and trained on (%)",
    )
    axes.grid(alpha=0.25)
    figure.savefig(PLOT, dpi=120)


def _name(ratio: float) -> str:
    return f"trained_share_at_{ratio:g}"


if __name__ == "__main__":
    emit(**{_name(ratio): trained_share(ratio) for ratio in RATIOS})
