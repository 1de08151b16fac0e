"""The gate of speed: two versions of the library side by side, no figure of which may be worse by more than a twentieth.

`python -m benchmarks.turns TREE [NAME ...] [--rounds 3] [--save]`. TREE is the root of another checkout, with its part in C
built. Each benchmark runs there and here in turns, in processes of their own; the order of the two changes every round. Prints
every figure of every benchmark: the medians, and the gain from there to here, 1.10 for a rate that is a tenth higher or a time that
is a tenth shorter. A benchmark with a figure below 0.95 runs as many rounds again, twice at most, since the speed of a machine
changes. Exits with 1 if a figure stays below, or a benchmark fails on either side. With --save the figures are kept in
`benchmarks/results/turns.json` for the page of results.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from benchmarks.measure import figures_of
from benchmarks.record import RESULTS, commit_of, machine
from benchmarks.registry import BENCHMARKS, TURNS

__all__ = ["NAMES", "Compared", "compare", "gain", "told_by_one"]

HERE: Final = Path(__file__).parents[1]
LEAST_GAIN: Final = 0.95
MOST_TRIES: Final = 3
NAMES: Final = (
    "warm",
    "small",
    "ragged",
    "ranks",
    "interpreter",
    "photographs",
    "cold",
    "remote",
    "fill",
    "sources",
    "scale",
)
# What is measured beside the library, to compare its figures with: the machine, not a version.
BESIDE: Final = frozenset(
    {
        "memcpy_gb_per_s",
        "gather_gb_per_s",
        "gather_samples_per_s",
        "two_processes_memcpy_gb_per_s",
        "two_processes_memcpy_in_turn_gb_per_s",
        "views_share_of_a_loop_that_takes_nothing",
        "driver_alone_s",
        "possible_steps",
        "most_in_flight",
        "disk_mb_per_s",
    }
)
_LESS_IS_BETTER: Final = re.compile(
    r"(?<!per)_(?P<unit>s|ms|mb)(_at_\d+)?$|^(?P<other>files_growth|waiting_percent)$"
)
# Below these a figure is as good as none: they are the noise of a clock, an allocator, and a scheduler.
_NOISE: Final = {"s": 0.005, "ms": 0.2, "mb": 2.0, "files_growth": 1.0, "waiting_percent": 1.0}

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a benchmark: its medians over `rounds` turns on both sides."""

    benchmark: str
    figure: str
    there: float
    here: float
    rounds: int

    @property
    def is_worse(self) -> bool:
        return self.figure not in BESIDE and gain(self.figure, self.there, self.here) < LEAST_GAIN

    def __str__(self) -> str:
        verdict = "beside" if self.figure in BESIDE else "WORSE" if self.is_worse else ""
        ratio = gain(self.figure, self.there, self.here)
        return f"{self.benchmark:12} {self.figure:46} {self.there:12.4g} {self.here:12.4g}  {ratio:5.2f}  {verdict}".rstrip()


def gain(figure: str, there: float, here: float) -> float:
    """The factor by which `here` is better than `there`: of times, memory and waiting, less is better."""
    if less := _LESS_IS_BETTER.search(figure):
        noise = _NOISE[less["unit"] or less["other"]]
        return max(there, noise) / max(here, noise)
    return here / there if there else float("inf") if here else 1.0


def compare(name: str, there: Sequence[Figures], here: Sequence[Figures]) -> list[Compared]:
    """All figures that both sides of the benchmark `name` have, in the order in which it tells them."""
    return [
        Compared(
            name,
            figure,
            statistics.median(run[figure] for run in there),
            statistics.median(run[figure] for run in here),
            len(here),
        )
        for figure in here[0]
        if all(figure in run for run in (*there, *here))
    ]


def told_by_one(there: Sequence[Figures], here: Sequence[Figures]) -> list[str]:
    """The figures that some run lacks: they cannot be compared."""
    runs = (*there, *here)
    return sorted({figure for run in runs for figure in run if any(figure not in other for other in runs)})


def run_in_turns(name: str, there: Path, rounds: int) -> list[Compared]:
    """Compare the benchmark `name` in `there` with that of this checkout; raises as `figures_of`."""
    runs: dict[Path, list[Figures]] = {there: [], HERE: []}
    compared: list[Compared] = []
    for number in range(rounds * MOST_TRIES):
        for tree in (there, HERE) if number % 2 == 0 else (HERE, there):
            print(f"round {number + 1}: {name}, {tree}", file=sys.stderr, flush=True)
            figures = figures_of(["-m", f"benchmarks.{name}"], BENCHMARKS[name].timeout_s, tree)
            runs[tree].append(figures)
        compared = compare(name, runs[there], runs[HERE])
        if (number + 1) % rounds == 0 and not any(one.is_worse for one in compared):
            break
    if lacking := told_by_one(runs[there], runs[HERE]):
        print(f"{name}: only some runs have {', '.join(lacking)}", file=sys.stderr, flush=True)
    return compared


def save(there: Path, compared: Sequence[Compared]) -> None:
    told = {
        "machine": machine(),
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "there": commit_of(there),
        "here": commit_of(),
        "rows": [
            {name: getattr(one, name) for name in ("benchmark", "figure", "there", "here", "rounds")}
            for one in compared
        ],
    }
    (RESULTS / f"{TURNS}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.turns", description="Compare two versions in speed."
    )
    parser.add_argument("there", type=Path, metavar="TREE", help="the root of another checkout")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    there = options.there.resolve()
    found: list[Compared] = []
    failed: list[str] = []
    for name in options.names or NAMES:
        try:
            compared = run_in_turns(name, there, options.rounds)
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            print(f"failed: {name}: {error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        print(*compared, sep="\n", flush=True)
        found += compared
    if options.save:
        save(there, found)
    worse = [f"{one.benchmark}, {one.figure}" for one in found if one.is_worse]
    told = [f"{what}: {'; '.join(names)}" for what, names in (("worse", worse), ("failed", failed)) if names]
    if told:
        sys.exit("\n".join(told))


if __name__ == "__main__":
    main()
