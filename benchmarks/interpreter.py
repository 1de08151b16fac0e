"""Whether the trainer's own Python keeps its speed: `python -m benchmarks.interpreter`.

A loop in pure Python, alone and while the loader delivers 1 GB/s (batches of 8 MiB); the share of the speed that is
left, in short turns, since a machine's speed changes within seconds: the median of the pairs. And the same while
another process, which shares no interpreter with the loop, gathers as much: what the machine itself takes. And what the
kernel counts: the share of the time for which the loop's thread was on a processor.
"""

from __future__ import annotations

import signal
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

PAIRS = 40
TURN_S = 0.25
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
    due_s = time.perf_counter()
    while True:
        torch.index_select(rows, 0, torch.randint(0, warm.SAMPLES, (warm.BATCH,)), out=out)
        now_s = time.perf_counter()
        due_s = max(due_s + warm.BATCH_BYTES / BYTES_PER_S, now_s)  # stopped meanwhile, it does not hurry
        time.sleep(due_s - now_s)


def alone() -> float:
    """Turns a second of the loop by itself."""
    began_s = time.perf_counter()
    return spin(began_s + TURN_S) / (time.perf_counter() - began_s)


def shares_beside_another_process() -> list[float]:
    """The shares of the loop's speed while `gather` runs: it is stopped in between."""
    command = [sys.executable, "-m", "benchmarks.interpreter", "gather"]
    shares = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(PAIRS):
            process.send_signal(signal.SIGSTOP)
            before = alone()
            process.send_signal(signal.SIGCONT)
            shares.append(alone() / before)
        process.kill()
    return shares


def main() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        cache = warm.fill(folder / "cache")
        with cs.EpochLoader(cache, batch_size=warm.BATCH) as loader:
            endless = batches(loader)
            for _ in range(warm.SAMPLES // warm.BATCH):
                next(endless)
            shares, processor = [], []
            every_s = warm.BATCH_BYTES / BYTES_PER_S
            for _ in range(PAIRS):
                before = alone()
                began_s, used_s, turns, taken = time.perf_counter(), time.thread_time(), 0, 0
                while time.perf_counter() - began_s < TURN_S:
                    batch = next(endless)
                    taken += 1
                    turns += spin(began_s + taken * every_s)
                    del batch
                took_s = time.perf_counter() - began_s
                shares.append(turns / took_s / before)
                processor.append((time.thread_time() - used_s) / took_s)
    others = shares_beside_another_process()
    emit(
        share_of_python_speed=statistics.median(shares),
        lowest_share=min(shares),
        share_of_a_processor=statistics.median(processor),
        share_beside_another_process=statistics.median(others),
        lowest_beside_another_process=min(others),
    )


if __name__ == "__main__":
    gather() if sys.argv[1:] == ["gather"] else main()
