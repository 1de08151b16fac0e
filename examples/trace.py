"""Trace two seconds of training and draw the timeline: `python examples/trace.py`, then open trace.png or trace.json."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.random import Generator

import cachestream as cs

COLORS = {
    "read": "#0072B2",
    "transform": "#56B4E9",
    "pack": "#009E73",
    "publish": "#F0E442",
    "prepare": "#CC79A7",
    "snapshot": "#882255",
    "gather": "#E69F00",
    "wait": "#D55E00",
    "wait for space": "#999999",
}


def window(rng: Generator) -> dict[str, Any]:
    time.sleep(0.004)  # as a remote would take
    return {"window": rng.standard_normal((3, 128, 128), dtype=np.float32)}


def scaled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"window": np.clip(sample["window"], -2, 2).astype(np.float16)}


def train(folder: str, seconds: float) -> int:
    """Train on a growing cache for some seconds; returns the number of batches."""
    batches, source = 0, cs.CallableSource(window)
    with cs.stream(
        source, cache=folder, size_limit="300MB", batch_size=32, transform=scaled, num_workers=2
    ) as loader:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for batch in loader:
                batches += len(batch["window"]) == 32
                time.sleep(0.02)  # the step
    return batches


def draw(trace: Path, picture: Path) -> None:
    """Draw the events of `trace`, a row for each thread."""
    events = json.loads(trace.read_text())["traceEvents"]
    named = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            process = named[event["pid"], 0, "process_name"]
            rows[process, named[event["pid"], event["tid"], "thread_name"]].append(event)
    began = min(event["ts"] for event in events if event["ph"] == "X")
    figure = Figure(figsize=(11, 0.42 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    for place, events_here in enumerate(rows[row] for row in sorted(rows)):
        inner_last = sorted(events_here, key=lambda event: -event["dur"])  # and so above
        spans = [((event["ts"] - began) / 1e6, event["dur"] / 1e6) for event in inner_last]
        colors = [COLORS.get(event["name"], "black") for event in inner_last]
        axes.broken_barh(spans, (place - 0.4, 0.8), color=colors, linewidth=0)
    axes.set_yticks(range(len(rows)), [f"{process}: {thread}" for process, thread in sorted(rows)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    found = {event["name"] for event in events}
    patches: Iterator[Any] = (
        axes.broken_barh([(0, 0)], (0, 0), color=color, label=name)
        for name, color in COLORS.items()
        if name in found
    )
    figure.legend(handles=list(patches), loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--output", type=Path, default=Path("trace.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cs.trace(arguments.output):
        print(train(folder, arguments.seconds), "batches")
    draw(arguments.output, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
