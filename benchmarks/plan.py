"""The forecast of `cachestream plan` beside the run that it is of: `python -m benchmarks.plan`.

4,000 arrays of 20 kB in local files, read at 4 MB/s at most into a cache of 20 MB, a quarter of them; batches of 32 every
10 ms, once 600 samples are cached. The forecast is made from the sizes and rates that are set. Both say when the cache is
full, when half and when 95 % of the remote have been trained on, and which share of the time the trainer waits.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

import cachestream as cs
from benchmarks.measure import emit, scratch
from cachestream.tools.forecast import Setup, simulate

SAMPLES = 4000
SAMPLE_BYTES = 20_000
FILE_BYTES = SAMPLE_BYTES + 128  # with the header of .npy
SETUP = Setup(
    num_samples=SAMPLES,
    fetched_bytes=FILE_BYTES,
    cached_bytes=1.02 * SAMPLE_BYTES,  # keys, headers and whole blocks of the disk
    fill_per_s=4e6 / FILE_BYTES,
    size_limit=20_000_000,
    batch_size=32,
    step_s=0.01,
    duration_s=60.0,
    min_samples=600,
    num_workers=2,
    shard_bytes=1_000_000,
)
READY_S = 0.001  # taking a batch that is ready takes 0.1 ms; what takes longer was waited for


def seen_after(times_s: list[tuple[float, int]], share: float) -> float:
    """The first of (time, samples seen) with `share` of all, or the end."""
    return next((at_s for at_s, seen in times_s if seen >= share * SAMPLES), SETUP.duration_s)


def ratio(real_s: float, forecast_s: float) -> float:
    """The longer of two times to the shorter."""
    return max(real_s, forecast_s) / min(real_s, forecast_s)


def run(
    begun_s: float, loader: cs.EpochLoader, cache: cs.Cache
) -> tuple[float, float, list[tuple[float, int]]]:
    """Train for the time of the setup; returns the time when the cache was full, the time waited, and what was seen when."""
    seen, times_s, full_s, waited_s = set[int](), list[tuple[float, int]](), SETUP.duration_s, 0.0
    asked_s = begun_s
    while True:
        for batch in loader:
            came_s = time.perf_counter()
            if came_s - asked_s >= READY_S:
                waited_s += came_s - asked_s
            seen.update(batch["array"][:, 0].tolist())
            now_s = came_s - begun_s
            if not times_s or now_s - times_s[-1][0] > 0.1:
                times_s.append((now_s, len(seen)))
                if full_s == SETUP.duration_s and cache.size_bytes > 0.95 * SETUP.size_limit:
                    full_s = now_s
            if now_s > SETUP.duration_s:
                return full_s, waited_s, times_s
            time.sleep(max(0.0, SETUP.step_s - (time.perf_counter() - came_s)))
            asked_s = time.perf_counter()


def main() -> None:
    with scratch() as folder:
        (folder / "data").mkdir()
        for number in range(SAMPLES):
            np.save(folder / "data" / f"{number:05d}.npy", np.full(SAMPLE_BYTES // 4, number, np.int32))
        begun_s = time.perf_counter()
        cache = cs.Cache(folder / "cache", SETUP.size_limit, min_free=0)
        with (
            cs.start_worker(
                cache,
                str(folder / "data"),
                num_workers=2,
                bandwidth_limit=int(4e6),
                shard_size=SETUP.shard_bytes,
            ),
            cs.EpochLoader(
                cache, SETUP.batch_size, turnover=SETUP.turnover, min_samples=SETUP.min_samples
            ) as loader,
        ):
            full_s, waited_s, times_s = run(begun_s, loader, cache)
        forecast = simulate(replace(SETUP, first_s=0.3))
        expected = [(epoch.at_s, epoch.seen) for epoch in forecast.epochs]
        emit(
            full_ratio=ratio(full_s, forecast.full_s or SETUP.duration_s),
            half_seen_ratio=ratio(seen_after(times_s, 0.5), seen_after(expected, 0.5)),
            most_seen_ratio=ratio(seen_after(times_s, 0.95), seen_after(expected, 0.95)),
            waiting_ratio=ratio(waited_s, forecast.waited_s),
            waiting_percent=100 * waited_s / SETUP.duration_s,
        )


if __name__ == "__main__":
    main()
