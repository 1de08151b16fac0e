"""The figures of a comparison: a table of every loader, and the ratios that have a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

from benchmarks.peers.entries import Entry
from benchmarks.peers.workload import scaled
from benchmarks.record import Figures

__all__ = ["Rates", "figures_of"]

# Samples a second in each round by (title, workload, workers).
Rates: TypeAlias = dict[tuple[str, str, int], list[float]]

_WORKERS: Final = (0, 1, 2)
_CACHING: Final = ("lit", "mosaic")  # modules of loaders that cache remote data


def figures_of(entries: Sequence[Entry], works: Sequence[str], rates: Rates) -> Figures:
    """Figures called "loader / workload, workers" in GB/s or thousand samples/s; then the ratios of ours."""
    found: Figures = {}
    for entry in entries:
        for work in works:
            for workers in entry.workers:
                if values := rates.get((entry.title, work, workers)):
                    column = f"{work}, {workers} worker{'' if workers == 1 else 's'}"
                    found[f"{entry.title} / {column}"] = [value / _per(work) for value in values]
    for work in works:
        found |= dict(_ratios(entries, work, rates))
    return found


def _per(work: str) -> float:
    """Samples a second in the unit of a workload: GB/s, or thousand samples/s."""
    workload = scaled(work, 1)
    return 1e3 if workload.labelled else 1e9 / workload.sample_bytes


def _ratios(entries: Sequence[Entry], work: str, rates: Rates) -> Iterator[tuple[str, list[float]]]:
    def best(wanted: Callable[[Entry], bool], workers: Sequence[int] = _WORKERS) -> list[float]:
        """The most of the wanted entries in each round; empty where none of them ran."""
        found = [
            rates[entry.title, work, count]
            for entry in entries
            for count in workers
            if wanted(entry) and (entry.title, work, count) in rates
        ]
        return [max(values) for values in zip(*found, strict=True)]

    loader = best(lambda entry: entry.option == "EpochLoader")
    for name, wanted in (
        ("gather", lambda entry: entry.option == "one thread"),
        ("memmap", lambda entry: entry.module == "memmap" and entry.option.startswith("batched")),
        ("caching_peer", lambda entry: entry.module in _CACHING),
    ):
        others = best(wanted)
        if loader and others:
            yield f"{work}_loader_to_{name}", [a / b for a, b in zip(loader, others, strict=True)]
    by_workers = []
    for workers in _WORKERS:
        dataset = best(lambda entry: entry.option == "DataLoader", (workers,))
        peers = best(lambda entry: entry.kind == "peer", (workers,))
        if dataset and peers:
            by_workers.append([a / b for a, b in zip(dataset, peers, strict=True)])
    if by_workers:
        yield f"{work}_dataset_to_peer", [min(ratios) for ratios in zip(*by_workers, strict=True)]
