"""benchmarks/RESULTS.md from the records in benchmarks/results: `python -m benchmarks.page` (or `make results`)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import scale_out, waste
from benchmarks.record import RESULTS, ROOT, Record, load
from benchmarks.registry import BENCHMARKS, TURNS, Benchmark, Figure
from cachestream.config import format_number

__all__ = ["PAGE", "SECTIONS", "matrix", "render"]

PAGE: Final = ROOT / "benchmarks" / "RESULTS.md"
HEAD: Final = """\
# What was measured

Made by `make results` from the records in [results/](results), which `make bench`, `make bench-peers`, `make bench-accuracy` and
`make bench-mlperf` write. Each round runs in a process of its own. Figures are the medians of the rounds; the spread is their least and their most.
Every figure of the records is here: those that have no words of their own stand under the names that the benchmark gives them.
They hold for the machine and the commit that are named, and are not all of one: neither absolutes nor ratios carry over unchanged."""

# The sections of the page, and the benchmarks of each.
SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Beside other loaders": ("accuracy", "speeds", "peers", "mlperf"),
    "Batches from a cache": ("warm", "small", "ranks", "interpreter", "accelerator"),
    "What is in a batch": ("packing", "photographs", "ragged", "select", "mixture", "plugins"),
    "Large caches": ("scale", "beyond", "locality"),
    "Filling a cache": (
        "cold",
        "fill",
        "raw",
        "remote",
        "listing",
        "sources",
        "diversity",
        "trace",
    ),
    "What is fetched, and what is trained on": ("waste", "small_cache", "importance", "plan"),
    "Many nodes": ("cluster", "scale_out"),
}


def render(folder: Path = RESULTS) -> str:
    """The page."""
    records = {name: load(name, folder) for name in BENCHMARKS}
    parts = [HEAD, *_sittings(records)]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}")
        parts += ["\n".join(_benchmark(name, BENCHMARKS[name], records[name])) for name in names]
    parts.append("\n".join(_turns(folder / f"{TURNS}.json")))
    return "\n\n".join(parts) + "\n"


def _sittings(records: Mapping[str, Record | None]) -> Iterator[str]:
    """The machines, each with its dates and commits, and the benchmarks of these."""
    machines: dict[str, dict[str, list[str]]] = {}
    for name, record in records.items():
        if record is not None:
            commit = f" ({record.commit})" if record.commit else ""
            sitting = f"{record.date}, cachestream {record.version}{commit}"
            machines.setdefault(record.machine, {}).setdefault(sitting, []).append(name)
    if machines:
        yield "\n".join(
            f"- On {machine}. "
            + " ".join(f"{sitting}: {', '.join(names)}." for sitting, names in sittings.items())
            for machine, sittings in machines.items()
        )


def _benchmark(name: str, benchmark: Benchmark, record: Record | None) -> Iterator[str]:
    yield f"### {benchmark.title}\n"
    if record is None:
        yield f"Not yet measured on this version: `{benchmark.shown_command(name)}`. {benchmark.what}"
        return
    rounds = "1 round" if record.rounds == 1 else f"{record.rounds} rounds"
    yield f"`{benchmark.shown_command(name)}`, {rounds}. {benchmark.what}"
    shown = [figure for figure in _all_figures(benchmark, record.figures) if figure.name in record.figures]
    if shown:
        yield "\n| | target | median | spread |\n|-|-|-|-|"
        yield from (_row(figure, record.figures[figure.name]) for figure in shown)
    yield from matrix(record.figures)
    missed = [figure for figure in shown if figure.misses(statistics.median(record.figures[figure.name]))]
    if missed:
        yield "\nMissed: " + " ".join(f"*{figure.title}*. {figure.missed}".rstrip() for figure in missed)
    if benchmark.plot:
        yield f"\n![{benchmark.title}]({benchmark.plot})"


def _all_figures(benchmark: Benchmark, names: Iterable[str]) -> list[Figure]:
    """The figures of a benchmark, then those of `names` that it does not describe; cells of a matrix are left out."""
    described = {figure.name for figure in benchmark.figures}
    others = [name for name in names if name not in described and " / " not in name]
    return [*benchmark.figures, *(Figure(name, f"`{name}`") for name in others)]


def _row(figure: Figure, values: list[float]) -> str:
    spread = f"{format_number(min(values))}–{format_number(max(values))}" if len(values) > 1 else ""
    target = "" if figure.target is None else f"{figure.bound} {format_number(figure.target)}"
    median = f"**{format_number(statistics.median(values))}** {figure.unit}".rstrip()
    return f"| {figure.title} | {target} | {median} | {spread} |"


def matrix(figures: Mapping[str, list[float]]) -> Iterator[str]:
    """The figures called "row / column" as a table, in the order in which they came."""
    cells = {
        (row, column): statistics.median(values)
        for name, values in figures.items()
        for row, slash, column in [name.partition(" / ")]
        if slash
    }
    if not cells:
        return
    columns = _distinct(column for _, column in cells)
    yield f"\n| | {' | '.join(columns)} |\n{'|-' * (len(columns) + 1)}|"
    for row in _distinct(row for row, _ in cells):
        shown = [format_number(cells[row, column]) if (row, column) in cells else "–" for column in columns]
        yield f"| {row} | {' | '.join(shown)} |"


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _turns(path: Path) -> Iterator[str]:
    """The comparison of two versions: each figure of each benchmark that both have."""
    yield "## Beside another version"
    command = "`python -m benchmarks.turns TREE`"
    if not path.exists():
        yield f"Not yet measured on this version: {command}."
        return
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    here, there = told["here"], told["there"]
    yield f"{command}, {told['date']}, on {told['machine']}: version {here} and version {there}, in turns."
    yield from told.get("notes", [])
    yield f"\n| | | {there} | {here} | {here} to {there} |\n|-|-|-|-|-|"
    for name, benchmark in BENCHMARKS.items():
        found = {row["figure"]: row for row in told["rows"] if row["benchmark"] == name}
        for figure in _all_figures(benchmark, found):
            if row := found.get(figure.name):
                title = f"{figure.title}, {figure.unit}" if figure.unit else figure.title
                one, other = row["there"], row["here"]
                ratio = format_number(other / one) if one else "–"
                yield f"| {benchmark.title} | {title} | {format_number(one)} | {format_number(other)} | {ratio} |"


def main() -> None:
    PAGE.write_text(render(), encoding="utf-8")
    for name, draw in {"waste": waste.draw, "scale_out": scale_out.write_guide}.items():
        if record := load(name):
            draw({figure: statistics.median(values) for figure, values in record.figures.items()})
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
