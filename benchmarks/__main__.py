"""All measurements of this machine, three rounds in turns, as a table of medians: `make bench`."""

from __future__ import annotations

import sys
from typing import Final

from benchmarks.measure import run_rounds, table

MEASUREMENTS: Final = {
    "warm batches, 8192 × 128 KiB, batch 64": ["-m", "benchmarks.warm"],
    "fill from local .npy files, 2 processes": ["-m", "benchmarks.fill", "files", "2"],
    "fill from a function, 2 processes": ["-m", "benchmarks.fill", "function", "2"],
    "fill from S3 with 50 ms latency, 40 MB/s, 4 processes": ["-m", "benchmarks.remote"],
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    sys.stdout.write(table(run_rounds(MEASUREMENTS, rounds)) + "\n")


if __name__ == "__main__":
    main()
