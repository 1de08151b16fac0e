"""A record of one benchmark: its figures in every round, and the machine, date and version that they belong to.

Records lie in `benchmarks/results/NAME.json`; `benchmarks.page` makes benchmarks/RESULTS.md of them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

import cachestream

__all__ = ["RESULTS", "ROOT", "Figures", "Record", "commit_of", "load", "machine", "save"]

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"

# Figure name to its value in each round. Figures of a table of their own are called "row / column".
Figures = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Record:
    """Figures of a benchmark. `commit` ends in "+" where the library had changes that were not committed."""

    machine: str
    date: str
    version: str
    commit: str
    figures: Figures

    @property
    def rounds(self) -> int:
        return max(map(len, self.figures.values()), default=0)


def save(name: str, figures: Figures) -> Path:
    """Write what this machine measured just now."""
    rounded = {figure: [float(f"{value:.5g}") for value in values] for figure, values in figures.items()}
    today = datetime.now(tz=timezone.utc).date().isoformat()
    record = Record(machine(), today, cachestream.__version__, commit_of(), rounded)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps(asdict(record), indent=1, ensure_ascii=False)
    # The rounds of a figure on one line.
    text = re.sub(r"\[\s+([^\]]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def load(name: str, folder: Path | None = None) -> Record | None:
    """The record of a benchmark, None where there is none."""
    path = (folder or RESULTS) / f"{name}.json"
    if not path.exists():
        return None
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Record(**values)


def machine() -> str:
    """Processor, cores, memory and versions, in one line."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = models[0] if models else platform.machine()
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{len(os.sched_getaffinity(0))} cores of {processor}, {memory_gb:.0f} GB of memory, {gpu}, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}"
    )


def commit_of(root: Path = ROOT) -> str:
    """The commit of the library in `root`, "" outside a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "cachestream") else "")
