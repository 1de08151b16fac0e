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
    "from nothing over S3 at 40 MiB/s, 60 s": ["-m", "benchmarks.cold"],
    "60,000 samples of 784 bytes, batch 256": ["-m", "benchmarks.small"],
    "2,000 photographs, decoded once": ["-m", "benchmarks.photographs"],
    "pure Python beside 1 GB/s": ["-m", "benchmarks.interpreter"],
    "10,000 shards": ["-m", "benchmarks.scale"],
    "1,000 epochs": ["-m", "benchmarks.scale", "epochs"],
    "two ranks": ["-m", "benchmarks.ranks"],
    "fields whose shape varies": ["-m", "benchmarks.ragged"],
    "shuffling within a window": ["-m", "benchmarks.locality", "quality"],
}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    sys.stdout.write(table(run_rounds(MEASUREMENTS, rounds)) + "\n")


if __name__ == "__main__":
    main()
