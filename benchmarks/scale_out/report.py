"""The runs that are simulated, their figures, the comparison with measured ones, and the plots."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.scale_out.cluster import simulate
from benchmarks.scale_out.values import Arrangement, Calibration, Outcome, Setup
from cachestream.config import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["SETUP", "SIZES", "calibration_of", "check", "figures_of", "table", "write_guide"]

SIZES: Final = (8, 64, 512, 4096)
ASSUMED: Final = Calibration(
    remote_bytes_per_s=1e9, copy_bytes_per_s=1.5e9, shard_overhead_s=0.02, decode_s=0.008, source="assumed"
)
# 4 TB as cached, in shards of the usual size, 1/16 of it in a cache; 20 GB/s from the remote for the job.
SETUP: Final = Setup(
    nodes=8,
    num_shards=62_500,
    shard_bytes=64_000_000,
    fetched_bytes=51_200_000,
    samples_per_shard=512,
    limit_bytes=256 * 10**9,
    processors=32,
    job_bytes_per_s=20e9,
    calibration=ASSUMED,
)
PLOT: Final = Path(__file__).parents[2] / "docs" / "scale-out.png"
FAILURES_PLOT: Final = PLOT.with_name("scale-out-failures.png")
GUIDE: Final = PLOT.parent / "guide" / "nodes.md"
TABLE: Final = re.compile(r"(?<=<!-- by make results -->\n).*?(?=\n\n)", re.DOTALL)
_ROWS: Final = {
    "the caches are full after": ("full, median (s)", "s"),
    "training begins after": ("first batch (s)", "s"),
    "batches are drawn from, samples": ("distinct (million samples)", "million"),
    "one node sees in a day": ("one node has seen (%)", "%"),
    "egress in a day": ("egress (TB)", "TB"),
    "copied between nodes in a day": ("between nodes (TB)", "TB"),
    "a failed node reads again": ("re-read for a failure (GB)", "GB"),
    "its replacement is warm after": ("replaced node warm (s)", "s"),
}
_COLOURS: Final = ("#000000", "#0072B2", "#009E73")  # Okabe and Ito's
_MARKS: Final = ("o", "s", "P")

Figures = Mapping[str, float | Sequence[float]]


def calibration_of(figures: Figures) -> Calibration:
    """The speeds of a node that `benchmarks.cluster` measured, by the keys above."""
    names = ("remote_bytes_per_s", "copy_bytes_per_s", "shard_overhead_s", "decode_s")
    return Calibration(**{name: _figure(figures, name) for name in names}, source="measured")


def check(figures: Figures) -> dict[str, float]:
    """The ratio of the model to each measured figure called "N nodes, ARRANGEMENT / …", by its name."""
    whole = ("num_shards", "shard_bytes", "fetched_bytes", "samples_per_shard", "limit_bytes", "processors")
    arrangements = {one.value: one for one in Arrangement}
    found: dict[str, float] = {}
    for name, measured in figures.items():
        row, _, figure = name.partition(" / ")
        nodes, _, arrangement = row.partition(" nodes, ")
        if figure not in ("full_s", "egress_bytes") or arrangement not in arrangements:
            continue
        setup = Setup(
            nodes=int(nodes),
            **{key: round(_figure(figures, key)) for key in whole},
            job_bytes_per_s=_figure(figures, "job_bytes_per_s"),
            calibration=calibration_of(figures),
            turnover=0.0,  # one filling is compared
            unevenness=0.0,
            mtbf_s=math.inf,
        )
        outcome = simulate(setup, arrangements[arrangement])
        modelled = outcome.full_s if figure == "full_s" else outcome.egress_bytes
        found[name] = modelled / _median(measured)
    return found


def figures_of(nodes: int, name: str, outcome: Outcome) -> Iterator[tuple[str, float]]:
    """The figures of one row of the table; what did not come in the time of the run is left out."""
    columns = {
        "full, median (s)": outcome.full_s,
        "full, p99 (s)": outcome.full_p99_s,
        "distinct (million samples)": outcome.distinct_samples / 1e6,
        "one node has seen (%)": 100 * outcome.seen_share,
        "egress (TB)": outcome.egress_bytes / 1e12,
        "between nodes (TB)": outcome.copied_bytes / 1e12,
        "first batch (s)": outcome.first_s,
        "waiting (s)": outcome.waiting_s,
        "failures": outcome.failures,
        "re-read for a failure (GB)": outcome.reread_bytes / max(1, outcome.failures) / 1e9,
        "replaced node warm (s)": outcome.warm_s,
    }
    for column, value in columns.items():
        if math.isfinite(value):
            yield f"{nodes} nodes, {name} / {column}", value


def table(figures: Mapping[str, float], nodes: int = SIZES[-1]) -> str:
    """The table of the guide: the arrangements of `nodes` nodes side by side."""
    lines = [
        f"| {nodes:,} nodes | {' | '.join(one.value for one in Arrangement)} |",
        "|-" * (len(Arrangement) + 1) + "|",
    ]
    for title, (column, unit) in _ROWS.items():
        values = [figures.get(f"{nodes} nodes, {one.value} / {column}") for one in Arrangement]
        lines.append(f"| {title} | {' | '.join(_shown(value, unit) for value in values)} |")
    return "\n".join(lines)


def write_guide(figures: Mapping[str, float]) -> None:
    """Draw the plots of the guide, and put the table into its page."""
    draw(figures)
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(TABLE.sub(lambda _: table(figures), text), encoding="utf-8")


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not in a day"
    if unit == "s" and value >= 7200:
        value, unit = value / 3600, "h"
    return f"{format_number(value)} {unit}"


def draw(figures: Mapping[str, float]) -> None:
    """Draw what `main` emits, for the guide."""
    panels = {
        "full, median (s)": "time until the cache is full (s; dotted: p99)",
        "first batch (s)": "time until the trainer begins (s)",
        "distinct (million samples)": "samples that a global batch draws from (million)",
        "one node has seen (%)": "seen by one node in 24 h (% of the data set)",
        "egress (TB)": "egress in 24 h (TB)",
        "between nodes (TB)": "copied between nodes in 24 h (TB)",
    }
    _draw(figures, panels, PLOT)
    panels = {
        "re-read for a failure (GB)": "read again from the remote for a failure (GB)",
        "replaced node warm (s)": "time until the replaced node is warm (s)",
    }
    _draw(figures, panels, FAILURES_PLOT)


def _draw(figures: Mapping[str, float], panels: Mapping[str, str], path: Path) -> None:
    rows = len(panels) // 2
    from matplotlib.figure import Figure  # takes a second to load

    figure = Figure(figsize=(10, 3.2 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False)
    for axes, (column, title) in zip(grid.flat, panels.items(), strict=True):
        _panel(axes, figures, column)
        axes.set_title(title, fontsize=11)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=100)


def _panel(axes: Axes, figures: Mapping[str, float], column: str) -> None:
    for i, arrangement in enumerate(Arrangement):
        points = _points(figures, arrangement, column)
        (line,) = axes.plot([*points], [*points.values()], _MARKS[i] + "-", color=_COLOURS[i], alpha=0.85)
        line.set_label(arrangement.value)
        line.set_markersize(9 - i)  # of lines that coincide all are seen
        if column == "full, median (s)":
            points = _points(figures, arrangement, "full, p99 (s)")
            axes.plot([*points], [*points.values()], ":", color=_COLOURS[i])
    axes.set_xscale("log", base=2)
    if column.startswith(("distinct", "re-read")):
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log")
    axes.set_xticks(SIZES, [f"{nodes:,}" for nodes in SIZES])
    axes.set_xlabel("nodes")
    axes.grid(alpha=0.25)


def _points(figures: Mapping[str, float], arrangement: Arrangement, column: str) -> dict[int, float]:
    """The figures of a column by the number of nodes; none where nothing is copied, which has no logarithm."""
    names = {nodes: f"{nodes} nodes, {arrangement.value} / {column}" for nodes in SIZES}
    points = {nodes: figures[name] for nodes, name in names.items() if name in figures}
    return {} if column.startswith("between") and not any(points.values()) else points


def _figure(figures: Figures, name: str) -> float:
    """The median of the rounds of a measured figure."""
    if name not in figures:
        raise ValueError(
            f"results/cluster.json: no figure {name!r}; run 'python -m benchmarks cluster --save', and see the keys in "
            "benchmarks/scale_out/__init__.py"
        )
    return _median(figures[name])


def _median(value: float | Sequence[float]) -> float:
    return statistics.median(value) if isinstance(value, Sequence) else float(value)
