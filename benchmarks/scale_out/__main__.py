"""Simulate all sizes and arrangements, and emit the figures."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from benchmarks.measure import emit
from benchmarks.record import load
from benchmarks.scale_out.cluster import simulate
from benchmarks.scale_out.report import SETUP, SIZES, check, figures_of
from benchmarks.scale_out.values import Arrangement


def main() -> None:
    figures = dict[str, float]()
    if (measured := load("cluster")) is None:
        print("results/cluster.json is missing: the model is not compared", file=sys.stderr, flush=True)
    else:
        ratios = {f"{name}, model to measured": ratio for name, ratio in check(measured.figures).items()}
        figures |= ratios
        figures["worst_ratio"] = max(max(ratio, 1 / ratio) for ratio in ratios.values())
    for nodes in SIZES:
        began_s = time.process_time()
        for arrangement in Arrangement:
            outcome = simulate(replace(SETUP, nodes=nodes), arrangement)
            figures |= figures_of(nodes, arrangement.value, outcome)
            print(f"{nodes} nodes, {arrangement.value}: {outcome}", file=sys.stderr, flush=True)
        figures[f"simulation_s_at_{nodes}"] = time.process_time() - began_s
    emit(**figures)


if __name__ == "__main__":
    main()
