"""The runs as a picture and as figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from benchmarks.peers.accuracy.entries import ENTRIES, OURS, Entry
from benchmarks.peers.accuracy.train import Outcome
from benchmarks.record import Figures

__all__ = ["Run", "draw", "draw_sweep", "figures_of", "figures_of_sweep", "final", "reached_s"]

LAST: Final = 5  # the final accuracy is the mean of so many last ones
IN_A_ROW: Final = 3  # an accuracy is reached where so many in a row are at it


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one loader; `fetched_bytes` is what went through the proxy meanwhile.

    `speed` is that of the remote, of what the trainer could take.
    """

    title: str
    seed: int
    fetched_bytes: int
    outcome: Outcome
    speed: float = 0.1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Run:
        told = json.loads(line)
        return cls(**{**told, "outcome": Outcome(**told["outcome"])})


def final(outcome: Outcome) -> float:
    """The accuracy at the end of the budget."""
    return statistics.mean(outcome.accuracy[-LAST:])


def reached_s(outcome: Outcome, accuracy: float) -> float | None:
    """Time of the first of three accuracies in a row, none below `accuracy`; None: never."""
    for start in range(len(outcome.accuracy) - IN_A_ROW + 1):
        if min(outcome.accuracy[start : start + IN_A_ROW]) >= accuracy:
            return outcome.times_s[start]
    return None


def _shown(runs: Sequence[Run]) -> list[tuple[Entry, list[Run]]]:
    grouped = [(entry, [run for run in runs if run.title == entry.title]) for entry in ENTRIES]
    return [(entry, group) for entry, group in grouped if group]


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture: the mean over the seeds as a line, each seed as a thin one."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(7.5, 5.5), layout="constrained")
    for entry, group in _shown(runs):
        curves = np.array([[0.0, *run.outcome.accuracy] for run in group])
        times_s = [0.0, *group[0].outcome.times_s]
        for curve in curves:
            axes.plot(times_s, 100 * curve, entry.line, color=entry.colour, linewidth=0.6, alpha=0.4)
        label = entry.title.replace("`", "")
        axes.plot(times_s, 100 * curves.mean(0), entry.line, color=entry.colour, linewidth=2, label=label)
    axes.set_xlabel("seconds since the loader was made")
    axes.set_ylabel("accuracy on held-out views, %")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 100)
    axes.grid(visible=True, alpha=0.25)
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_sweep(runs: Sequence[Run], path: Path) -> None:
    """Write the picture of runs at several speeds: accuracy and samples trained on, a line for each loader."""
    mpl.use("Agg")
    figure, (accuracy, samples) = plt.subplots(1, 2, figsize=(9.5, 4.8), layout="constrained")
    for entry, group in _shown(runs):
        speeds = sorted({run.speed for run in group})
        at = [[run for run in group if run.speed == speed] for speed in speeds]
        label = entry.title.replace("`", "")
        final_ones = [100 * statistics.mean(final(run.outcome) for run in some) for some in at]
        trained = [statistics.mean(run.outcome.samples for run in some) for some in at]
        accuracy.plot(speeds, final_ones, entry.line, color=entry.colour, marker="o", label=label)
        samples.plot(speeds, trained, entry.line, color=entry.colour, marker="o")
    accuracy.set_ylabel("accuracy on held-out views in the end, %")
    samples.set_ylabel("samples trained on")
    accuracy.set_ylim(0, 100)
    samples.set_ylim(bottom=0)
    for axes in (accuracy, samples):
        axes.set_xscale("log")
        ticks = sorted({run.speed for run in runs})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("speed of the remote, of what the trainer takes")
        axes.grid(visible=True, alpha=0.25)
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def figures_of_sweep(runs: Sequence[Run]) -> Figures:
    """A row for each loader; accuracy and samples trained on at each speed of the remote."""
    found: Figures = {}
    for entry, group in _shown(runs):
        for speed in sorted({run.speed for run in group}):
            some = [run for run in group if run.speed == speed]
            found[f"{entry.title} / accuracy at {speed:g}, %"] = [100 * final(run.outcome) for run in some]
            found[f"{entry.title} / samples at {speed:g}"] = [float(run.outcome.samples) for run in some]
    return found


def figures_of(runs: Sequence[Run]) -> Figures:
    """A row for each loader, its values for each seed; then the shares of the budget that have a target."""
    found: Figures = {}
    ours = {run.seed: run.outcome for run in runs if run.title == OURS}
    for entry, group in _shown(runs):
        columns = {
            "accuracy, %": [100 * final(run.outcome) for run in group],
            "samples trained on": [float(run.outcome.samples) for run in group],
            "waiting, %": [100 * run.outcome.waited for run in group],
            "first batch, s": [run.outcome.first_batch_s for run in group],
            "MB fetched": [run.fetched_bytes / 1e6 for run in group],
        }
        if entry.module != "ours":
            columns["cachestream there at"] = [
                _share(ours[run.seed], final(run.outcome)) for run in group if run.seed in ours
            ]
        found |= {f"{entry.title} / {column}": values for column, values in columns.items() if values}
    streaming = {entry.title for entry in ENTRIES if entry.module != "ours" and not entry.repeats}
    best = {
        seed: max(
            (final(run.outcome) for run in runs if run.seed == seed and run.title in streaming), default=None
        )
        for seed in ours
    }
    shares = [_share(ours[seed], accuracy) for seed, accuracy in best.items() if accuracy is not None]
    return found | ({"ours_there_at": shares} if shares else {})


def _share(ours: Outcome, accuracy: float) -> float:
    """The share of the budget after which ours had `accuracy`; 1 if it never had."""
    at_s = reached_s(ours, accuracy)
    return 1.0 if at_s is None else at_s / ours.times_s[-1]
