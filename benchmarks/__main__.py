"""Measure this machine: `python -m benchmarks [NAME ...] [--rounds 3] [--save]` (or `make bench`).

Without names all benchmarks that this machine can run, but those of other loaders. Prints the median and the spread of
every figure; with --save they are kept in benchmarks/results/NAME.json after every run, from which `make results` makes
the page.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.measure import run_rounds
from benchmarks.record import save
from benchmarks.registry import BENCHMARKS
from cachestream.training.batches.transfer import accelerator


def main() -> None:
    names = [name for name, benchmark in BENCHMARKS.items() if not benchmark.command]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure this machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    wanted = options.names or [
        name for name in names if accelerator() is not None or not BENCHMARKS[name].needs_accelerator
    ]
    timeout_s = max(BENCHMARKS[name].timeout_s for name in wanted)
    commands = {name: ["-m", f"benchmarks.{name}"] for name in wanted}
    found = run_rounds(
        commands,
        options.rounds,
        timeout_s=timeout_s,
        keep_going=True,
        on_run=save if options.save else lambda _name, _figures: None,
    )
    for name, figures in found.items():
        for figure, values in figures.items():
            print(
                f"{name}: {figure}: {statistics.median(values):.4g}  ({min(values):.4g} to {max(values):.4g})"
            )
    if failed := set(wanted) - set(found):
        sys.exit(f"failed: {', '.join(sorted(failed))}")


if __name__ == "__main__":
    main()
