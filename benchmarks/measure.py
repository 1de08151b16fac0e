"""Measuring: each run in a process of its own, several benchmarks in turns, all figures of all rounds kept."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

__all__ = ["emit", "figures_of", "median_ratio", "memcpy_gb_per_s", "run_rounds", "scratch"]

MEMCPY_BYTES: Final = 8 << 20
TIMEOUT_S: Final = 600


def emit(**figures: float) -> None:
    """Tell the figures of this run to the process that asked for it."""
    print(json.dumps(figures), flush=True)


def median_ratio(ours: list[float], others: list[float]) -> float:
    """The median of the ratios of figures that were taken in turns."""
    return statistics.median(one / other for one, other in zip(ours, others, strict=True))


def memcpy_gb_per_s(total_bytes: int = 1 << 30) -> float:
    """Speed of one thread that copies 8 MiB at a time from 256 MiB into one reused buffer."""
    source = np.ones(256 << 20, np.uint8)
    target = np.empty(MEMCPY_BYTES, np.uint8)
    target[:] = 0
    pieces = len(source) // MEMCPY_BYTES

    def copy() -> None:
        for i in range(total_bytes // MEMCPY_BYTES):
            start = i % pieces * MEMCPY_BYTES
            np.copyto(target, source[start : start + MEMCPY_BYTES])

    def seconds() -> float:
        begun_s = time.perf_counter()
        copy()
        return time.perf_counter() - begun_s

    copy()
    return total_bytes / statistics.median(seconds() for _ in range(5)) / 1e9


def figures_of(arguments: list[str], timeout_s: float, tree: Path | None = None) -> dict[str, float]:
    """The figures that one run of this Python emits, as its last line; `tree`: the checkout that it runs in.

    Byte code is stored, as on a user's machine: without it, each start of a process compiles all modules anew.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        timeout=timeout_s,
        check=True,
        text=True,
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder for one run."""
    with tempfile.TemporaryDirectory(prefix="cachestream-bench-") as folder:
        yield Path(folder)


def run_rounds(
    commands: dict[str, list[str]],
    rounds: int,
    *,
    timeout_s: float = TIMEOUT_S,
    keep_going: bool = False,
    on_run: Callable[[str, dict[str, list[float]]], object] = lambda _name, _figures: None,
) -> dict[str, dict[str, list[float]]]:
    """The figures of each of `commands` (arguments to this Python) in every round; the commands take turns.

    A command that fails or takes longer than `timeout_s` raises; with `keep_going` it is left out of the rest.
    `on_run` gets the name and the figures so far after each run.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in commands}
    for number in range(rounds):
        for name in list(found):
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                figures = figures_of(commands[name], timeout_s)
            except subprocess.SubprocessError as error:
                if not keep_going:
                    raise
                print(f"failed: {name}: {error}", file=sys.stderr, flush=True)
                del found[name]
                continue
            for figure, value in figures.items():
                found[name].setdefault(figure, []).append(value)
            on_run(name, found[name])
    return found
