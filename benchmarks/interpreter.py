"""The speed that the trainer's own Python keeps: `python -m benchmarks.interpreter`.

A loop in pure Python that takes a batch of 8 MiB every 8.4 ms, 1 GB/s: from the loader, and as views of a tensor in memory,
which is the same loop without a loader; and both against the loop that takes nothing. Shares of the speed in turns of a
quarter of a second, since a machine's speed changes within seconds; medians. The two that take batches have turns of their
own: a loop that has just done anything else is slower for half a second, whatever it was, so that what comes after the loop
that takes nothing looks better than what comes later. And the loop that takes nothing while another process, which shares
no interpreter with it, gathers as much: what the machine itself takes. And what the kernel counts: the share of the time
for which the loop's thread was on a processor.
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


def held() -> Iterator[Any]:
    """Batches without a loader: views of a few tensors that lie in memory, as new as a loader's."""
    rows, numbers = torch.rand(4 * warm.BATCH, SAMPLE_FLOATS), torch.arange(4 * warm.BATCH)
    while True:
        for start in range(0, len(rows), warm.BATCH):
            part = slice(start, start + warm.BATCH)
            yield {"x": rows[part], "i": numbers[part]}


def alone() -> float:
    """Turns a second of the loop by itself."""
    began_s = time.perf_counter()
    return spin(began_s + TURN_S) / (time.perf_counter() - began_s)


def over(source: Iterator[Any]) -> tuple[float, float]:
    """Turns a second of the loop that takes 1 GB/s from `source`, and the share of the time it was on a processor."""
    every_s = warm.BATCH_BYTES / BYTES_PER_S
    began_s, used_s, turns, taken = time.perf_counter(), time.thread_time(), 0, 0
    while time.perf_counter() - began_s < TURN_S:
        batch = next(source)
        taken += 1
        turns += spin(began_s + taken * every_s)
        del batch
    took_s = time.perf_counter() - began_s
    return turns / took_s, (time.thread_time() - used_s) / took_s


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
            views = held()
            shares, of_alone, views_of_alone, processor = [], [], [], []
            for _ in range(PAIRS):
                without = over(views)[0]
                turns, on_processor = over(endless)
                shares.append(turns / without)
                processor.append(on_processor)
            for _ in range(PAIRS // 2):
                of_alone.append(over(endless)[0] / alone())
                views_of_alone.append(over(views)[0] / alone())
    others = shares_beside_another_process()
    emit(
        share_of_python_speed=statistics.median(shares),
        lowest_share=min(shares),
        share_of_a_loop_that_takes_nothing=statistics.median(of_alone),
        views_share_of_a_loop_that_takes_nothing=statistics.median(views_of_alone),
        share_of_a_processor=statistics.median(processor),
        share_beside_another_process=statistics.median(others),
        lowest_beside_another_process=min(others),
    )


if __name__ == "__main__":
    gather() if sys.argv[1:] == ["gather"] else main()
