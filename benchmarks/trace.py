"""The cost of a trace: `python -m benchmarks.trace`.

The warm batches of `benchmarks.warm`, epochs with and without a trace in turns; one process that fills a cache from a function
of half a millisecond a sample, with and without a trace in turns; and one that fills from a function of nearly nothing, which
turns the recording of its own process off and on, by processor time, as wall time varies by more than a trace costs. Ratios are
medians of those of the turns.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import cachestream as cs
from benchmarks.measure import emit, median_ratio, scratch
from benchmarks.warm import BATCH, fill
from cachestream import tracing

EPOCH_TURNS = 60
FILL_TURNS = 10
FILL_SAMPLES = 3000
FLOATS = 4096  # a sample
TINY_TURNS = 400
TINY_SAMPLES = 1000  # a turn


def spectrum() -> object:
    """A function that draws noise and gives its spectrum: about half a millisecond of a processor."""

    def sample(rng: np.random.Generator) -> npt.NDArray[np.float32]:
        noise = rng.random(FLOATS * 8, dtype=np.float32)
        return np.abs(np.fft.rfft(noise))[:FLOATS].astype(np.float32)

    return sample


class Tiny:
    """A function of 64-byte samples that stops and resumes the trace of its process in turns, and writes to `file` the
    processor time of each turn after the first few: [traced, seconds].
    """

    def __init__(self, file: Path) -> None:
        self._file, self._sample = file, {"x": np.zeros(16, np.float32)}
        self._calls, self._begun_s = 0, 0.0
        self._times: list[tuple[bool, float]] = []
        self._recorder: Any = None
        self._is_on, self._random = True, np.random.default_rng(0)

    def __call__(self, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
        turn, rest = divmod(self._calls, TINY_SAMPLES)
        self._calls += 1
        if not rest:
            self._next(turn)
        return self._sample

    def _next(self, turn: int) -> None:
        now_s = time.process_time()
        if turn == 0:
            self._recorder = tracing._recorder
            assert self._recorder is not None
        elif turn > 8:  # reads are still being doubled before
            self._times.append((self._is_on, now_s - self._begun_s))
        if turn == TINY_TURNS + 8:
            self._file.with_suffix(".part").write_text(json.dumps(self._times))
            self._file.with_suffix(".part").replace(self._file)
        # At random within a pair: a fixed pattern meets the shards, which are published at regular intervals.
        self._is_on = not self._is_on if turn % 2 else bool(self._random.integers(2))
        tracing._recorder = self._recorder if self._is_on else None
        self._begun_s = time.process_time()


def tiny_ratios(folder: Path) -> tuple[float, float]:
    """The speed with a trace, of that without, and the processor time of a traced sample in seconds."""
    file = folder / "times.json"
    with (
        cs.trace(folder / "tiny.json"),
        cs.Cache(folder / "tiny", size_limit="2GB") as cache,
        cs.start_worker(cache, Tiny(file), num_workers=1),
    ):
        cache.wait((TINY_TURNS + 10) * TINY_SAMPLES, timeout_s=300)
    times = json.loads(file.read_text())
    on, off = ([took_s for is_on, took_s in times if is_on is wanted] for wanted in (True, False))
    return median_ratio(off, on), statistics.median(on) / TINY_SAMPLES


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


def traced(folder: Path, *, on: bool) -> contextlib.AbstractContextManager[object]:
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
                    with traced(folder, on=on):
                        seconds_of_epoch(loader)  # some of it was gathered during the pause
                        epochs[on].append(seconds_of_epoch(loader))
        for turn in range(FILL_TURNS):
            for on in (False, True) if turn % 2 else (True, False):
                with traced(folder, on=on):
                    fillings[on].append(seconds_of_filling(folder / f"filling-{turn}-{on}"))
        tiny_to_untraced, tiny_s = tiny_ratios(folder)
    emit(
        epochs_to_untraced=median_ratio(epochs[False], epochs[True]),
        filling_to_untraced=median_ratio(fillings[False], fillings[True]),
        tiny_to_untraced=tiny_to_untraced,
        epoch_ms=1e3 * statistics.median(epochs[True]),
        filling_s=statistics.median(fillings[True]),
        tiny_us=1e6 * tiny_s,
    )


if __name__ == "__main__":
    main()
