"""Throughput against the size of a sample, as a picture: `python -m benchmarks.peers.sizes [FILE.png]`.

512 MiB of float32 samples of 4 KiB to 4 MiB, in the page cache, shuffled, in batches of 8 MiB but at most 512
samples; ours, a memmap batched by hand and LitData, without worker processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib import ticker

from benchmarks.measure import scratch
from benchmarks.peers.__main__ import measure
from benchmarks.peers.entries import ENTRIES, Entry
from benchmarks.peers.report import Results

__all__ = ["draw"]

SIZES: Final = tuple(4096 * 4**i for i in range(6))
SHOWN: Final = {
    "gather into a reused buffer, torch's threads": ("limit: gather into a reused buffer", "0.5", "--"),
    "**cachestream `EpochLoader`**": ("cachestream EpochLoader", "C0", "-"),
    "memmap, batched by hand": ("memmap, batched by hand", "C1", "-"),
    "LitData": ("LitData", "C2", "-"),
}


def _shown() -> list[Entry]:
    """The entries of the picture, in this process only."""
    return [
        Entry(entry.title, entry.module, entry.option, (0,), entry.kind)
        for entry in ENTRIES
        if entry.title in SHOWN
    ]


def _label(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def draw(
    results: Results, sizes: Sequence[int], looks: Mapping[str, tuple[str, str, str]], path: Path
) -> None:
    """Write the picture: GB/s of each title of `looks` (label, colour, line) over `sizes` in bytes."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for title, (label, colour, line) in looks.items():
        points = [
            (size, rate * size / 1e9) for size in sizes if (rate := results.get((title, f"size{size}", 0)))
        ]
        if points:
            axes.plot(*zip(*points, strict=True), line, color=colour, marker="o", markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xticks(sizes, [_label(size) for size in sizes])
    axes.set_xlabel("size of a sample")
    axes.set_ylabel("GB/s, shuffled, in the page cache")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.sizes", description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=Path("benchmarks/output/sizes.png"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 512 MiB")
    options = parser.parse_args()
    with scratch() as folder:
        works = [f"size{size}" for size in SIZES]
        results = measure(_shown(), works, options.rounds, options.scale, folder)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    draw(results, SIZES, SHOWN, options.path)
    print(f"wrote {options.path}")


if __name__ == "__main__":
    main()
