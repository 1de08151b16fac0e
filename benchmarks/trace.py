"""The cost of a trace: `python -m benchmarks.trace`.

The warm batches of `benchmarks.warm`, epochs with and without a trace in turns; and one process that fills a cache from a
function of half a millisecond a sample, with and without a trace in turns. Ratios are medians of those of the turns.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import cachestream as cs
from benchmarks.measure import emit, median_ratio, scratch
from benchmarks.warm import BATCH, fill

EPOCH_TURNS = 60
FILL_TURNS = 10
FILL_SAMPLES = 3000
FLOATS = 4096  # a sample


def spectrum() -> object:
    """A function that draws noise and gives its spectrum: about half a millisecond of a processor."""

    def sample(rng: np.random.Generator) -> npt.NDArray[np.float32]:
        noise = rng.random(FLOATS * 8, dtype=np.float32)
        return np.abs(np.fft.rfft(noise))[:FLOATS].astype(np.float32)

    return sample


def seconds_of_epoch(loader: cs.EpochLoader) -> float:
    begun_s = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begun_s


def seconds_of_filling(folder: Path) -> float:
    """The time from the first samples to the last."""
    with cs.Cache(folder, size_limit="2GB") as cache, cs.start_worker(cache, spectrum(), num_workers=1):
        cache.wait(64, timeout_s=60)
        begun_s = time.perf_counter()
        cache.wait(FILL_SAMPLES, timeout_s=120)
        took_s = time.perf_counter() - begun_s
    shutil.rmtree(folder)
    return took_s


def tracing(folder: Path, *, on: bool) -> contextlib.AbstractContextManager[object]:
    return cs.trace(folder / "trace.json") if on else contextlib.nullcontext()


def main() -> None:
    torch.set_num_threads(1)
    epochs: dict[bool, list[float]] = {False: [], True: []}
    fillings: dict[bool, list[float]] = {False: [], True: []}
    with scratch() as folder:
        cache = fill(folder / "cache")
        with cs.EpochLoader(cache, batch_size=BATCH) as loader:
            for turn in range(EPOCH_TURNS):
                for on in (False, True) if turn % 2 else (True, False):
                    with tracing(folder, on=on):
                        seconds_of_epoch(loader)  # some of it was gathered during the pause
                        epochs[on].append(seconds_of_epoch(loader))
        for turn in range(FILL_TURNS):
            for on in (False, True) if turn % 2 else (True, False):
                with tracing(folder, on=on):
                    fillings[on].append(seconds_of_filling(folder / f"filling-{turn}-{on}"))
    emit(
        epochs_to_untraced=median_ratio(epochs[False], epochs[True]),
        filling_to_untraced=median_ratio(fillings[False], fillings[True]),
        epoch_ms=1e3 * statistics.median(epochs[True]),
        filling_s=statistics.median(fillings[True]),
    )


if __name__ == "__main__":
    main()
