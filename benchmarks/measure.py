"""How things are measured here: each figure in a process of its own, in turns, medians of the rounds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

__all__ = ["Figure", "emit", "median_ratio", "memcpy_gb_per_s", "run_rounds", "scratch", "seconds", "table"]

MEMCPY_BYTES: Final = 8 << 20
TIMEOUT_S: Final = 600


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number: `name` says what and in which unit."""

    name: str
    value: float


def emit(**figures: float) -> None:
    """Tell the figures of one run to the process that asked for it."""
    print(json.dumps(figures), flush=True)


def median_ratio(ours: list[float], others: list[float]) -> float:
    """The median of what we reach of what others do, of figures that were taken in turns."""
    return statistics.median(one / other for one, other in zip(ours, others, strict=True))


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    begun_s = time.perf_counter()
    function()
    return time.perf_counter() - begun_s


def memcpy_gb_per_s(total_bytes: int = 1 << 30) -> float:
    """What one thread copies: 8 MiB at a time from 256 MiB into one buffer that is reused."""
    source = np.ones(256 << 20, np.uint8)
    target = np.empty(MEMCPY_BYTES, np.uint8)
    target[:] = 0
    pieces = len(source) // MEMCPY_BYTES

    def copy() -> None:
        for i in range(total_bytes // MEMCPY_BYTES):
            start = i % pieces * MEMCPY_BYTES
            np.copyto(target, source[start : start + MEMCPY_BYTES])

    copy()
    return total_bytes / statistics.median(seconds(copy) for _ in range(5)) / 1e9


def _figures(arguments: list[str], timeout_s: float) -> dict[str, float]:
    """What one run of this Python emits, as its last line."""
    done = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, timeout=timeout_s, check=True, text=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder for one run."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="cachestream-bench-") as folder:
        yield Path(folder)


def run_rounds(
    commands: dict[str, list[str]], rounds: int, *, timeout_s: float = TIMEOUT_S, keep_going: bool = False
) -> dict[str, dict[str, float]]:
    """The median figures of each of `commands` (arguments to this Python), run in turns.

    A command that fails or takes longer than `timeout_s` raises; with `keep_going` it is left out of the rest.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in commands}
    for number in range(rounds):
        for name in list(found):
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                figures = _figures(commands[name], timeout_s)
            except subprocess.SubprocessError as error:
                if not keep_going:
                    raise
                print(f"failed: {name}: {error}", file=sys.stderr, flush=True)
                del found[name]
                continue
            for figure, value in figures.items():
                found[name].setdefault(figure, []).append(value)
    return {
        name: {figure: statistics.median(values) for figure, values in figures.items()}
        for name, figures in found.items()
    }


def table(results: dict[str, dict[str, float]]) -> str:
    """The figures as a Markdown table, a row each."""
    lines = ["| what | figure | median |", "|-|-|-|"]
    for name, figures in results.items():
        lines += [
            f"| {name} | {figure.replace('_', ' ')} | {value:.4g} |" for figure, value in figures.items()
        ]
    return "\n".join(lines)
