"""What to choose when 8 to 4,096 nodes train on one remote data set through bounded caches: `python -m benchmarks.scale_out`.

The nodes of a job are alike, so that an arrangement of them is one cache: `cachestream plan` forecasts it
(`cachestream.tools.forecast`), for the samples that a node keeps and the rate at which it gets them. What the whole job fetches and
copies, and what a failure costs, follows by arithmetic. Nodes that differ are not simulated, nor a link for both copies and the remote.

With the speeds that `benchmarks.cluster` measured on one machine, read from results/cluster.json, the model is compared with the
runs of three to five caches there; without that file the run says that it is not.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from benchmarks.measure import emit
from benchmarks.record import load
from cachestream.config import format_number
from cachestream.storage.reservations import HEADROOM_BYTES
from cachestream.tools.forecast import Setup, simulate

SIZES: Final = (8, 64, 512, 4096)
PLOT: Final = Path(__file__).parents[1] / "docs" / "scale-out.png"
GUIDE: Final = PLOT.parent / "guide" / "nodes.md"
TABLE: Final = re.compile(r"(?<=<!-- by make results -->\n).*?(?=\n\n)", re.DOTALL)
# The figures of an outcome by its fields: the title and the unit, and how much of the field a unit is.
FIGURES: Final = {
    "full_s": ("the caches are full after", "s", 1.0),
    "first_s": ("training begins after", "s", 1.0),
    "drawn_from": ("batches are drawn from, samples", "million", 1e6),
    "seen_share": ("one node sees in a day", "%", 0.01),
    "egress_bytes": ("egress in a day", "TB", 1e12),
    "copied_bytes": ("copied between nodes in a day", "TB", 1e12),
    "reread_bytes": ("a failed node reads again", "GB", 1e9),
    "warm_s": ("the replacement of a failed node is warm after", "s", 1.0),
}
COLOURS: Final = ("#000000", "#0072B2", "#009E73")  # Okabe and Ito's
MARKS: Final = ("o", "s", "P")

Figures = Mapping[str, float]


class Arrangement(Enum):
    """Who fetches, and who keeps."""

    ALONE = "alone"  # every node all of the remote, in an order of its own
    PARTITION = "partition"  # every node its part of the remote
    SHARE = "share"  # one node fetches a shard, and all others copy it


@dataclass(frozen=True, slots=True)
class Job:
    """`nodes` like `node`, which alone fills at `fill_per_s`.

    The remote gives `remote_bytes_per_s` to all of them. A node receives the shards of others at `copy_bytes_per_s`. An empty
    node takes the place of a failed one after `replace_s`.
    """

    nodes: int
    node: Setup
    remote_bytes_per_s: float
    copy_bytes_per_s: float
    replace_s: float = 300.0

    def setup(self, arrangement: Arrangement) -> Setup:
        """One cache of an arrangement; one that others share has at least two nodes."""
        node, nodes = self.node, self.nodes
        fill_per_s = min(node.fill_per_s, self.remote_bytes_per_s / node.fetched_bytes / nodes)
        if arrangement is Arrangement.ALONE:
            return replace(node, fill_per_s=fill_per_s)
        if arrangement is Arrangement.PARTITION:
            return replace(node, fill_per_s=fill_per_s, num_samples=round(node.whole / nodes))
        copied_per_s = self.copy_bytes_per_s / node.cached_bytes * nodes / (nodes - 1)
        # A node fetches a shard, then all who have it send it on: with each copy twice as many.
        fetch_s = node.shard_bytes / node.cached_bytes / fill_per_s
        spread_s = math.ceil(math.log2(nodes)) * node.shard_bytes / self.copy_bytes_per_s
        shared_per_s = min(nodes * fill_per_s, copied_per_s)
        return replace(node, fill_per_s=shared_per_s, first_s=node.first_s + fetch_s + spread_s)


ASSUMED: Final = Job(
    nodes=8,
    # 4 TB as cached, 1/16 of it in a cache. A node trains on 512 samples/s: its cache within an hour.
    node=Setup(
        num_samples=32_000_000,
        fetched_bytes=100e3,
        cached_bytes=125e3,
        fill_per_s=3500.0,
        size_limit=256 * 10**9,
        batch_size=256,
        step_s=0.5,
        duration_s=86_400.0,
        min_samples=4096,
    ),
    remote_bytes_per_s=20e9,
    copy_bytes_per_s=1e9,
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of a job's run; inf for what does not come in its time.

    `drawn_from`: the samples of the last epochs of all nodes together. `seen_share`: of the data set, by one node. `reread_bytes`:
    what a full cache that is lost fetches again. `warm_s`: from the failure until the replacement has it, at the latest.
    """

    full_s: float
    first_s: float
    drawn_from: float
    seen_share: float
    egress_bytes: float
    copied_bytes: float
    reread_bytes: float
    warm_s: float


def outcome_of(job: Job, arrangement: Arrangement) -> Outcome:
    """Simulate one cache of the arrangement, and work out what all of them do."""
    setup, node, nodes = job.setup(arrangement), job.node, job.nodes
    forecast = simulate(setup)
    found_s = forecast.complete_s if forecast.full_s is None else forecast.full_s
    full_s = math.inf if found_s is None else found_s
    held = min(setup.whole, (setup.size_limit - HEADROOM_BYTES) / setup.cached_bytes)  # by a full cache
    # A replacement has the remote to itself where the others hold all of their data, and else its part, as at first.
    reading = job if forecast.complete_s is None else replace(job, nodes=1)
    refill_per_s = reading.setup(Arrangement.ALONE).fill_per_s
    samples = forecast.epochs[-1].samples if forecast.epochs else 0
    outcome = Outcome(
        full_s=full_s,
        first_s=math.inf if forecast.first_batch_s is None else forecast.first_batch_s,
        drawn_from=node.whole * (1 - (1 - samples / node.whole) ** nodes),
        seen_share=forecast.seen / node.whole,
        egress_bytes=nodes * forecast.fetched_bytes,
        copied_bytes=0.0,
        reread_bytes=held * node.fetched_bytes,
        warm_s=job.replace_s + held / refill_per_s,
    )
    if arrangement is Arrangement.PARTITION:
        return replace(outcome, drawn_from=min(nodes * samples, node.whole))
    if arrangement is Arrangement.SHARE:
        return replace(
            outcome,
            drawn_from=samples,
            egress_bytes=forecast.fetched_bytes,
            copied_bytes=(nodes - 1) * forecast.fetched_bytes / node.fetched_bytes * node.cached_bytes,
            reread_bytes=0.0,
            warm_s=job.replace_s + held * node.cached_bytes / job.copy_bytes_per_s,
        )
    return outcome


def figures_of(nodes: int, arrangement: Arrangement, outcome: Outcome) -> Iterator[tuple[str, float]]:
    """The figures of an outcome by their names; what does not come is left out."""
    for field, (title, unit, scale) in FIGURES.items():
        if math.isfinite(value := getattr(outcome, field) / scale):
            yield _name(nodes, arrangement, title, unit), value


def _name(nodes: int, arrangement: Arrangement, title: str, unit: str) -> str:
    return f"{nodes} nodes, {arrangement.value} / {title} ({unit})"


def measured_job(measured: Figures, nodes: int) -> Job:
    """The job that `benchmarks.cluster` ran on `nodes` nodes, of which one filling is compared, by its figures."""
    samples, shard_bytes = measured["samples_per_shard"], measured["shard_bytes"]
    own_s = measured["decode_s"] * samples / measured["processors"] + measured["shard_overhead_s"]
    copy_s = shard_bytes / measured["copy_bytes_per_s"] + measured["shard_overhead_s"]
    node = Setup(
        num_samples=round(measured["num_shards"] * samples),
        fetched_bytes=measured["fetched_bytes"] / samples,
        cached_bytes=shard_bytes / samples,
        fill_per_s=samples * min(measured["remote_bytes_per_s"] / measured["fetched_bytes"], 1 / own_s),
        size_limit=round(measured["limit_bytes"]),
        batch_size=1,
        step_s=1.0,
        duration_s=3600.0,
        first_s=0.0,  # the runs were timed from the first byte on
        turnover=0.0,
        num_workers=1,
        shard_bytes=round(shard_bytes),
    )
    return Job(nodes, node, measured["job_bytes_per_s"], shard_bytes / copy_s)


def check(measured: Figures) -> dict[str, float]:
    """The ratio of the model to each measured figure called "N nodes, ARRANGEMENT / …", by its name."""
    found: dict[str, float] = {}
    for name, value in measured.items():
        row, _, field = name.partition(" / ")
        nodes, _, arrangement = row.partition(" nodes, ")
        if field in ("full_s", "egress_bytes"):
            outcome = outcome_of(measured_job(measured, int(nodes)), Arrangement(arrangement))
            found[f"{name}, model to measured"] = getattr(outcome, field) / value
    return found


def table(figures: Figures, nodes: int = SIZES[-1]) -> str:
    """The table of the guide: the arrangements of `nodes` nodes side by side."""
    lines = [
        f"| {nodes:,} nodes | {' | '.join(one.value for one in Arrangement)} |",
        "|-" * (len(Arrangement) + 1) + "|",
    ]
    for title, unit, _ in FIGURES.values():
        values = [figures.get(_name(nodes, one, title, unit)) for one in Arrangement]
        lines.append(f"| {title} | {' | '.join(_shown(value, unit) for value in values)} |")
    return "\n".join(lines)


def write_guide(figures: Figures) -> None:
    """Draw the plot of the guide, and put the table into its page."""
    draw(figures)
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(TABLE.sub(lambda _: table(figures), text), encoding="utf-8")


def draw(figures: Figures) -> None:
    """Draw what `main` emits, for the guide: the figures that no arrangement has a 0 of."""
    from matplotlib.figure import Figure  # takes a second to load

    shown = [(title, unit, _lines(figures, title, unit)) for title, unit, _ in FIGURES.values()]
    shown = [(title, unit, lines) for title, unit, lines in shown if all(map(all, lines))]
    figure = Figure(figsize=(10, 3.2 * len(shown) / 2 + 0.5), layout="constrained")
    grid = figure.subplots(len(shown) // 2, 2)
    for axes, (title, unit, lines) in zip(grid.flat, shown, strict=True):
        for i, (arrangement, values) in enumerate(zip(Arrangement, lines, strict=True)):
            # Smaller marks above larger ones: of lines that coincide all are seen.
            style = {"color": COLOURS[i], "marker": MARKS[i], "markersize": 9 - i, "alpha": 0.85}
            axes.semilogx(SIZES, values, base=2, label=arrangement.value, **style)
        if unit == "million":
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
        axes.set_title(f"{title} ({unit})", fontsize=11)
        axes.set_xticks(SIZES, [f"{nodes:,}" for nodes in SIZES])
        axes.set_xlabel("nodes")
        axes.grid(alpha=0.25)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(PLOT, dpi=100)


def _lines(figures: Figures, title: str, unit: str) -> list[list[float]]:
    """A figure by arrangement and number of nodes; nan for what does not come."""
    return [[figures.get(_name(nodes, one, title, unit), math.nan) for nodes in SIZES] for one in Arrangement]


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "not in a day"
    if unit == "s" and value >= 7200:
        value, unit = value / 3600, "h"
    return f"{format_number(value)} {unit}"


def main() -> None:
    figures = dict[str, float]()
    if (measured := load("cluster")) is None:
        print("results/cluster.json is missing: the model is not compared", file=sys.stderr, flush=True)
    else:
        figures |= check({name: statistics.median(values) for name, values in measured.figures.items()})
        figures["worst_ratio"] = max(max(ratio, 1 / ratio) for ratio in figures.values())
    began_s = time.process_time()
    for nodes in SIZES:
        for arrangement in Arrangement:
            outcome = outcome_of(replace(ASSUMED, nodes=nodes), arrangement)
            figures |= figures_of(nodes, arrangement, outcome)
            print(f"{nodes} nodes, {arrangement.value}: {outcome}", file=sys.stderr, flush=True)
    figures["simulation_s"] = time.process_time() - began_s
    emit(**figures)


if __name__ == "__main__":
    main()
