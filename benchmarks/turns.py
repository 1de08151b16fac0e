"""Two versions of the library side by side: `python -m benchmarks.turns TREE [ROUNDS] [NAME ...]`.

TREE is the root of another checkout, with its part in C built. Each benchmark runs there and here in turns, in processes of their
own; the order of the two changes every round. The medians, and their ratio (here to there), go to stdout and, as JSON, to
`benchmarks/results/turns.json`. A benchmark that fails on either side is left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from benchmarks.measure import figures_of
from benchmarks.record import RESULTS, commit_of, machine
from benchmarks.registry import TURNS

HERE: Final = Path(__file__).parents[1]
TIMEOUT_S: Final = 1800
NAMES: Final = (
    "warm",
    "small",
    "ragged",
    "ranks",
    "interpreter",
    "photographs",
    "cold",
    "remote",
    "scale",
    "sources",
)

Figures = dict[str, float]


def main(there: Path, rounds: int, names: list[str]) -> None:
    found: dict[str, dict[str, list[Figures]]] = {name: {"there": [], "here": []} for name in names}
    trees = [("there", there), ("here", HERE)]
    for number in range(rounds):
        for name in list(found):
            for side, tree in trees if number % 2 == 0 else reversed(trees):
                print(f"round {number + 1} of {rounds}: {name}, {side}", file=sys.stderr, flush=True)
                try:
                    found[name][side].append(figures_of(["-m", f"benchmarks.{name}"], TIMEOUT_S, tree))
                except (subprocess.SubprocessError, ValueError, IndexError) as error:
                    print(f"failed: {name}, {side}: {error}", file=sys.stderr, flush=True)
                    del found[name]
                    break
    rows = []
    for name, sides in found.items():
        for figure in sides["here"][0]:
            if all(figure in run for run in sides["there"]):
                one, other = (
                    statistics.median(run[figure] for run in sides[side]) for side in ("there", "here")
                )
                rows.append(
                    {"benchmark": name, "figure": figure, "there": one, "here": other, "rounds": rounds}
                )
                ratio = f"{other / one:.2f}" if one else "-"
                print(f"{name:12} {figure:42} {one:12.4g} {other:12.4g}  {ratio}")
    today = datetime.now(tz=timezone.utc).date().isoformat()
    told = {
        "machine": machine(),
        "date": today,
        "there": commit_of(there),
        "here": commit_of(),
        "rows": rows,
    }
    (RESULTS / f"{TURNS}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]) if sys.argv[2:] else 3, sys.argv[3:] or list(NAMES))
