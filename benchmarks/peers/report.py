"""The results as one Markdown table, and what they mean for us."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from benchmarks.peers.entries import Entry
from benchmarks.peers.workload import scaled

__all__ = ["Results", "best", "markdown"]

# Samples a second by (title, workload, workers).
Results: TypeAlias = dict[tuple[str, str, int], float]

_WORKERS = (0, 1, 2)


def best(entry: Entry, work: str, results: Results) -> float | None:
    """The best of its numbers of workers; None when none of them ran."""
    return max(
        (rate for (title, of, _), rate in results.items() if (title, of) == (entry.title, work)), default=None
    )


def _unit(work: str) -> tuple[str, float]:
    """The unit of a workload, and how many samples a second it stands for."""
    workload = scaled(work, 1)
    return ("k samples/s", 1e3) if workload.labelled else ("GB/s", 1e9 / workload.sample_bytes)


def _cells(entry: Entry, work: str, results: Results) -> list[str]:
    """A cell for each number of workers, and one for the best; the best in bold."""
    top, (_, per) = best(entry, work, results), _unit(work)
    cells = []
    for workers in _WORKERS:
        rate = results.get((entry.title, work, workers))
        if workers not in entry.workers:
            cells.append("–")
        elif rate is None:
            cells.append("failed")
        else:
            cells.append(f"**{rate / per:.3g}**" if rate == top else f"{rate / per:.3g}")
    return cells


def _ratios(entries: Sequence[Entry], work: str, results: Results) -> list[str]:
    """How ours compares: the first of ours with the limit and the peers, and a DataLoader worker by worker."""
    lines = []
    ours = [entry for entry in entries if entry.kind == "ours"]
    others = [entry for entry in entries if entry.kind != "ours"]
    if ours and (rate := best(ours[0], work, results)):
        ratios = [
            f"{rate / other:.3g} × {entry.title}" for entry in others if (other := best(entry, work, results))
        ]
        if ratios:
            lines.append(f"- {work}: {_name(ours[0])} reaches " + "; ".join(ratios) + ".")
    datasets = [entry for entry in ours if entry.option == "DataLoader"]
    for under, workers in itertools.product(datasets, _WORKERS):
        rates = {
            entry.title: rate
            for entry in entries
            if entry.kind == "peer" and (rate := results.get((entry.title, work, workers)))
        }
        mine = results.get((under.title, work, workers))
        if mine and rates:
            title = max(rates, key=rates.__getitem__)
            lines.append(
                f"- {work}, {workers} workers: {_name(under)} is {mine / rates[title]:.3g} × the fastest peer under a "
                f"DataLoader ({title})."
            )
    return lines


def _name(entry: Entry) -> str:
    """What one of ours is called in a sentence."""
    return entry.title.strip("*").removeprefix("cachestream ")


def markdown(entries: Sequence[Entry], works: Sequence[str], results: Results) -> str:
    """The table, a row each, the columns of the workloads side by side; then the ratios."""
    heads = [f"{work}, {_unit(work)[0]}: {workers} workers" for work in works for workers in _WORKERS]
    lines = ["| what | " + " | ".join(heads) + " |", "|-" * (len(heads) + 1) + "|"]
    for entry in entries:
        cells = [cell for work in works for cell in _cells(entry, work, results)]
        lines.append(f"| {entry.title} | " + " | ".join(cells) + " |")
    ratios = [line for work in works for line in _ratios(entries, work, results)]
    return "\n".join([*lines, "", *ratios]).rstrip()
