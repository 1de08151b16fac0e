"""Whether the trainer's own Python keeps its speed: `python -m benchmarks.interpreter`.

A loop in pure Python, alone and while the loader delivers 1 GB/s (batches of 8 MiB); the share of the speed that is
left, in alternation, median of the pairs. And the same while another process, which shares no interpreter with the
loop, gathers as much: what the machine itself takes.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import cachestream as cs
from benchmarks import warm
from benchmarks.measure import emit, scratch

PAIRS = 5
TURN_S = 1.0
BYTES_PER_S = 1e9
SAMPLE_FLOATS = warm.BATCH_BYTES // warm.BATCH // 4


def spin(until_s: float) -> int:
    """Turns of a pure-Python loop until then."""
    turns = 0
    while time.perf_counter() < until_s:
        for _ in range(200):
            turns += 1
    return turns


def batches(loader: cs.EpochLoader) -> Iterator[Any]:
    while True:
        yield from loader


def gather() -> None:
    """Gather 1 GB/s for ever, as another process."""
    torch.set_num_threads(1)
    rows, out = torch.rand(warm.SAMPLES, SAMPLE_FLOATS), torch.empty(warm.BATCH, SAMPLE_FLOATS)
    torch.index_select(rows, 0, torch.randint(0, warm.SAMPLES, (warm.BATCH,)), out=out)
    print("ready", flush=True)
    began_s = time.perf_counter()
    for done in itertools.count(1):
        torch.index_select(rows, 0, torch.randint(0, warm.SAMPLES, (warm.BATCH,)), out=out)
        time.sleep(max(0.0, began_s + done * warm.BATCH_BYTES / BYTES_PER_S - time.perf_counter()))


def share_beside_another_process() -> float:
    """The share of the loop's speed while `gather` runs."""
    alone = spin((began_s := time.perf_counter()) + TURN_S) / (time.perf_counter() - began_s)
    command = [sys.executable, "-m", "benchmarks.interpreter", "gather"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        beside = spin((began_s := time.perf_counter()) + TURN_S) / (time.perf_counter() - began_s)
        process.kill()
    return beside / alone


def main() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        cache = warm.fill(folder / "cache")
        with cs.EpochLoader(cache, batch_size=warm.BATCH) as loader:
            endless = batches(loader)
            for _ in range(warm.SAMPLES // warm.BATCH):
                next(endless)
            shares = []
            every_s = warm.BATCH_BYTES / BYTES_PER_S
            for _ in range(PAIRS):
                began_s = time.perf_counter()
                alone = spin(began_s + TURN_S) / (time.perf_counter() - began_s)
                began_s, turns, taken = time.perf_counter(), 0, 0
                while time.perf_counter() - began_s < TURN_S:
                    batch = next(endless)
                    taken += 1
                    turns += spin(began_s + taken * every_s)
                    del batch
                shares.append(turns / (time.perf_counter() - began_s) / alone)
    others = [share_beside_another_process() for _ in range(PAIRS)]
    emit(
        share_of_python_speed=statistics.median(shares),
        lowest_share=min(shares),
        share_beside_another_process=statistics.median(others),
        lowest_beside_another_process=min(others),
    )


if __name__ == "__main__":
    gather() if sys.argv[1:] == ["gather"] else main()
