"""The cost of a trace of tiny samples: `python -m benchmarks.trace_tiny`.

One process fills a cache from a function of nearly nothing, which stops and resumes the trace of its own process in turns. By
processor time, as wall time varies by more than a trace costs; the ratio is the median of those of the pairs of turns.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import cachestream as cs
from benchmarks.measure import emit, median_ratio, scratch
from cachestream import tracing

TURNS = 400
SAMPLES = 1000  # a turn


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
        turn, rest = divmod(self._calls, SAMPLES)
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
        if turn == TURNS + 8:
            self._file.with_suffix(".part").write_text(json.dumps(self._times))
            self._file.with_suffix(".part").replace(self._file)
        # At random within a pair: a fixed pattern meets the shards, which are published at regular intervals.
        self._is_on = not self._is_on if turn % 2 else bool(self._random.integers(2))
        tracing._recorder = self._recorder if self._is_on else None
        self._begun_s = time.process_time()


def ratios(folder: Path) -> tuple[float, float]:
    """The speed with a trace, of that without, and the processor time of a traced sample in seconds."""
    file = folder / "times.json"
    with (
        cs.trace(folder / "tiny.json"),
        cs.Cache(folder / "tiny", size_limit="2GB") as cache,
        cs.start_worker(cache, Tiny(file), num_workers=1),
    ):
        cache.wait((TURNS + 10) * SAMPLES, timeout_s=300)
    times = json.loads(file.read_text())
    on, off = ([took_s for is_on, took_s in times if is_on is wanted] for wanted in (True, False))
    return median_ratio(off, on), statistics.median(on) / SAMPLES


def main() -> None:
    with scratch() as folder:
        ratio, sample_s = ratios(folder)
    emit(tiny_to_untraced=ratio, tiny_us=1e6 * sample_s)


if __name__ == "__main__":
    main()
