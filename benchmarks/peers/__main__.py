"""Every loader side by side: `python -m benchmarks.peers [--rounds 3] [--workloads A,B] [--only TEXT,…] [--scale 1] [--save]`.

A: 8192 samples of 128 KiB float32, shuffled, batch 64. B: 60,000 samples of 784 uint8 and a label, batch 256. Both
warm: local files in the page cache. Every figure comes from a process of its own, the loaders take turns, the median
of the rounds counts; a loader that cannot run, or delivers something else than was written, is left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.measure import run_rounds, scratch
from benchmarks.page import matrix
from benchmarks.peers.entries import ENTRIES, Entry
from benchmarks.peers.report import Rates, figures_of
from benchmarks.record import save

__all__ = ["measure"]

TIMEOUT_S = 180


def _command(task: str, module: str, work: str, scale: float, folder: Path, *more: str) -> list[str]:
    return ["-m", "benchmarks.peers.one", task, module, work, str(scale), str(folder / work / module), *more]


def measure(entries: Iterable[Entry], works: Iterable[str], rounds: int, scale: float, folder: Path) -> Rates:
    """Samples a second in each round by (title, workload, workers); what failed is absent."""
    entries, works = list(entries), list(works)
    modules = dict.fromkeys(entry.module for entry in entries)
    prepared = run_rounds(
        {
            f"prepare {module} {work}": _command("prepare", module, work, scale, folder)
            for work in works
            for module in modules
            if module != "memcpy"
        },
        rounds=1,
        timeout_s=TIMEOUT_S,
        keep_going=True,
    )
    places = {
        f"{entry.title}, workload {work}, {workers} workers": (entry, work, workers)
        for work in works
        for entry in entries
        for workers in entry.workers
        if entry.module == "memcpy" or f"prepare {entry.module} {work}" in prepared
    }
    found = run_rounds(
        {
            name: _command("measure", entry.module, work, scale, folder, str(workers), entry.option)
            for name, (entry, work, workers) in places.items()
        },
        rounds,
        timeout_s=TIMEOUT_S,
        keep_going=True,
    )
    return {
        (entry.title, work, workers): found[name]["samples_per_s"]
        for name, (entry, work, workers) in places.items()
        if name in found
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default="A,B")
    parser.add_argument("--only", default="", help="parts of the names of loaders, separated by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args(arguments)
    works, parts = options.workloads.split(","), options.only.split(",")
    entries = [entry for entry in ENTRIES if any(part in entry.title for part in parts)]
    with scratch() as folder:
        rates = measure(entries, works, options.rounds, options.scale, folder)
    figures = figures_of(entries, works, rates)
    print("\n".join(matrix(figures)), end="\n\n")
    for name, values in figures.items():
        if " / " not in name:
            print(f"{name}: {statistics.median(values):.3g}")
    if options.save:
        print(f"wrote {save('peers', figures)}")


if __name__ == "__main__":
    main()
