"""A source that tells who reads what and holds back what a test is not ready for; transforms; what a cache holds.

Sampling processes load this module, so it loads little.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

import cachestream as cs

NUM_SAMPLES: Final = 300
SHARD_SIZE: Final = "64KB"

DEADLINE_S: Final = 120.0
ROOT: Final = Path(__file__).parents[2]
FOUR: Final = "16KB"  # a shard of four samples of `Told`


def numbered(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Samples that say which they are: `x` float32 [1024] full of the number, and `number`."""
    return [{"x": np.full(1024, i, np.float32), "number": i} for i in range(first, first + count)]


@dataclass(frozen=True)
class Told:
    """`units` units of `samples` samples: `number`, and `x` float32 `[floats]` full of it; the key is "unit/sample".

    Each read adds a line to the file `journal` in `folder`, and another one at its end; beyond those that `allow`
    allows, reads wait.
    """

    folder: str
    units: int | None = 60
    samples: int = 1
    floats: int = 1024
    fingerprint: str = "told"

    @property
    def num_units(self) -> int | None:
        return self.units

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        self._tell(f"+{os.getpid()} {unit}\n")
        rank = len(self.reads)
        while rank > self._allowed():
            time.sleep(0.005)
        for number in range(unit * self.samples, (unit + 1) * self.samples):
            key = f"{unit}/{number % self.samples}"
            yield key, {"number": number, "x": np.full(self.floats, number, np.float32)}
        self._tell(f"-{os.getpid()} {unit}\n")

    def _tell(self, line: str) -> None:
        with open(os.path.join(self.folder, "journal"), "ab", buffering=0) as file:
            file.write(line.encode())

    @property
    def numbers(self) -> list[int]:
        """The numbers of all samples."""
        return list(range((self.units or 0) * self.samples))

    def _allowed(self) -> float:
        try:
            return int(Path(self.folder, "allowed").read_text())
        except (OSError, ValueError):
            return float("inf")

    def allow(self, reads: int | None) -> None:
        """Let this many reads go on, all for None."""
        allowed = Path(self.folder, "allowed")
        if reads is None:
            allowed.unlink(missing_ok=True)
        else:
            allowed.with_suffix(".new").write_text(str(reads))
            allowed.with_suffix(".new").replace(allowed)

    @property
    def lines(self) -> list[str]:
        """The journal: "+PID UNIT" for the beginning of a read, "-PID UNIT" for its end."""
        try:
            return Path(self.folder, "journal").read_text().splitlines()
        except FileNotFoundError:
            return []

    @property
    def reads(self) -> list[tuple[int, int]]:
        """The process and the unit of each read so far."""
        begun = [line[1:].split() for line in self.lines if line[0] == "+"]
        return [(int(pid), int(unit)) for pid, unit in begun]

    @property
    def units_read(self) -> list[int]:
        """The unit of each read so far."""
        return [unit for _, unit in self.reads]

    @property
    def most_at_once(self) -> int:
        """The most reads that were under way at once."""
        return max(accumulate(1 if line[0] == "+" else -1 for line in self.lines))


class Listed:
    """A torch sampler over units, by what makes it one: it is gone through, and has a length."""

    def __init__(self, units: list[Any]) -> None:
        self.units = units

    def __iter__(self) -> Iterator[Any]:
        return iter(self.units)

    def __len__(self) -> int:
        return len(self.units)


def endless(rng: np.random.Generator) -> dict[str, Any]:
    """A sample of 16 KiB that can be told from a torn one."""
    number = int(rng.integers(1 << 20))
    return {"number": number, "x": np.full(4096, number, np.float32)}


def with_draws(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Add a random number."""
    return sample | {"draw": rng.random()}


def several(sample: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Make two of each sample, but drop every third one."""
    return None if sample["number"] % 3 == 0 else [sample, sample | {"x": sample["x"] + 0.5}]


def hangs(sample: dict[str, Any]) -> dict[str, Any]:
    """Hang with number 30."""
    if sample["number"] == 30:
        threading.Event().wait()
    return sample


def numbers_in(cache: cs.Cache) -> list[int]:
    """The numbers of the cached samples, sorted; each sample is whole."""
    if not cache.num_samples:
        return []
    with cache.snapshot(turnover=0.0) as dataset:
        samples = dataset[:]
    assert (samples["x"] == samples["number"][:, None]).all()
    return sorted(samples["number"].tolist())


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition()` is true."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"still not so: {what}"
        time.sleep(0.02)


def pid_of(cache: cs.Cache) -> int:
    """The process id of the worker, 0 if there is none."""
    process = cache.status().worker
    return 0 if process is None else process.pid


def is_running(pid: int) -> bool:
    """True if the process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run `code` in a Python of its own, killed at the end if it is still there."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that the process prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate(timeout=DEADLINE_S)[1])
    return line.strip()
