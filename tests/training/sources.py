"""Sources for workers of the training tests. Sampling processes import this: it must not load torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["COUNT", "Numbered", "Single", "Slow"]

COUNT = 600


class Numbered:
    """Units of several samples, which their keys and values identify."""

    def __init__(self, units: int = COUNT // 4, samples: int = 4, size: int = 1000) -> None:
        self.fingerprint, self.num_units = f"numbered {units} {samples} {size}", units
        self.samples, self.size = samples, size

    def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        for sample in range(self.samples):
            number = unit * self.samples + sample
            yield (
                f"{number}",
                {"x": np.full(self.size, number % 251, np.uint8), "n": number, "t": "." * (number % 7)},
            )


class Slow(Numbered):
    """The same samples, one unit after the other; the second half waits until the file `gate` is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        time.sleep(0.015)
        while 2 * unit >= self.num_units and not self.gate.exists():
            time.sleep(0.02)
        yield from super().read(unit, rng)


class Single:
    """`num_units` units of one sample of `nbytes` bytes, which holds its own number."""

    def __init__(self, num_units: int, nbytes: int) -> None:
        self.fingerprint, self.num_units, self.nbytes = f"single {num_units} {nbytes}", num_units, nbytes

    def read(self, unit: int, _rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        yield str(unit), {"x": np.full(self.nbytes, unit % 256, np.uint8), "n": np.int64(unit)}
