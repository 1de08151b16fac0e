"""The stages that a sample passes, and the one that holds up the rest: pure, from measurements to a verdict.

Stages are compared by the samples a second that each would let through if the others took no time. Reading
counts as measured with as many reads at once as a worker has. Stages that calculate share the cores; a
transform that waits holds up its sampling process; the disk and the loader do one thing at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

BUSY: Final = 0.8  # of the cores, or of the one core that the interpreter's lock leaves to Python
_ONE_INTERPRETER: Final = 1.3  # above that many cores, it is not the interpreter's lock that holds it up
_TOO_SHORT_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurements of `reads` units that were read at once, for `seconds`.

    `fetched_bytes`: 0 where the source does not report bytes. `busy_cores`: the cores that this process used.
    `wall_s` and `cpu_s`: by stage ("read", "decode", "transform", "pack"), the time of all samples, and the
    processor's part of it, which has a meaning for a single read only.
    """

    reads: int
    num_samples: int
    fetched_bytes: int
    seconds: float
    busy_cores: float
    wall_s: dict[str, float]
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples that were written, or delivered by the loader, in `seconds`."""

    num_samples: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stages:
    """Measurements of one source: `alone` by one read, with transform and packing; `together` by many,
    without.

    `num_units`: None for an endless source; `is_listing` while the listing is incomplete. `written` (synced,
    as a part of full shards) and `delivered` (onto `device`) are None where they could not be measured.
    `workers`: the sampling processes of a worker, on `cores`.
    """

    list_s: float
    num_units: int | None
    is_listing: bool
    has_transform: bool
    alone: Measurement
    together: Measurement
    written: Throughput | None
    delivered: Throughput | None
    device: str
    cores: int
    workers: int

    @property
    def read_s(self) -> float:
        """Seconds of reading by one read alone; of a source that reports no bytes, those that it waited."""
        wall_s, cpu_s = self.alone.wall_s, self.alone.cpu_s
        waited_s = 0.0 if self.alone.fetched_bytes else max(0.0, wall_s["decode"] - cpu_s["decode"])
        return wall_s["read"] + waited_s

    @property
    def remote_has_more(self) -> bool:
        """True if the processor held up the reads, not the remote, or if they were done at once."""
        run, wall_s = self.together, self.together.wall_s
        if run.seconds < _TOO_SHORT_S:
            return True
        if run.fetched_bytes and wall_s["decode"] > wall_s["read"]:
            return True  # not all cores need be busy: threads also wait for memory, and for one another
        return run.busy_cores >= BUSY * self.cores or BUSY <= run.busy_cores <= _ONE_INTERPRETER

    @property
    def more_reads_help(self) -> bool:
        """True if many reads at once brought many times as much: latency holds them up, not bandwidth."""
        alone, run = self.alone, self.together
        if not alone.fetched_bytes or run.reads < 2 or not self.read_s:
            return True
        gain = run.fetched_bytes / run.seconds / (alone.fetched_bytes / self.read_s)
        return gain >= math.sqrt(run.reads)  # between 1, no gain, and `reads`

    @property
    def rates(self) -> dict[str, float]:
        """Samples a second that each stage lets through; a lower bound for "read" if `remote_has_more`."""
        alone, run = self.alone, self.together
        read = _rate(run.num_samples, run.seconds)
        if alone.fetched_bytes:  # of large units, few samples are complete when the time is up
            read = max(read, run.fetched_bytes / run.seconds * alone.num_samples / alone.fetched_bytes)
        rates = {"read": read or _rate(alone.num_samples, self.read_s)}
        for stage in ("decode", "transform", "pack"):
            rates[stage] = self.cores * _rate(alone.num_samples, alone.cpu_s[stage])
        one_each = self.workers * _rate(alone.num_samples, alone.wall_s["transform"])
        rates["transform"] = min(rates["transform"], one_each)
        for stage, done in (("write", self.written), ("transfer", self.delivered)):
            rates[stage] = math.inf if done is None else _rate(done.num_samples, done.seconds)
        return rates

    @property
    def processor_per_s(self) -> float:
        """Samples a second that the stages which calculate let through together."""
        return self.cores * _rate(self.alone.num_samples, sum(self.alone.cpu_s.values()))

    @property
    def fill_per_s(self) -> float:
        """Samples a second that a worker fills a cache with, at most."""
        rates = self.rates
        read = math.inf if self.remote_has_more else rates["read"]
        return min(read, self.processor_per_s, rates["transform"], rates["write"])


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Verdict:
    """The stage that `binds`, the samples a second that it lets through, the reason, and what to do next."""

    binds: str
    samples_per_s: float
    because: str
    what_next: tuple[str, ...]


_SMALLER: Final = (
    "make samples smaller before they are cached: --resize, --crop, a transform that keeps uint8"
)
_PROCESSES: Final = "more processes: --workers above {workers}, where cores are free"
_ADVICE: Final = {  # the reason, then what to do next
    "remote": (
        "reads wait for answers, and many at once bring more",
        "more processes: --workers above {workers}, each reads up to 16 units at once",
        "larger units (tars instead of small files), above all where it answers that there are too many requests",
        "smaller units, where the source has fewer than are read at once; or run nearer to the data",
    ),
    "network": (
        "many reads at once bring hardly more than one: the bandwidth is used up, or the server",
        "fetch fewer bytes: smaller files, only the columns or windows that are needed",
        "look for a limit on the way: the link, a proxy, the bucket's own; or run nearer to the data",
        "look again while nothing else runs on this machine: other programs slow down reads, too",
    ),
    "requests": (
        "asking for bytes keeps the processor busy",
        "larger units need fewer requests: tars, Parquet or MDS instead of small files, larger windows of arrays",
        _PROCESSES,
    ),
    "decode": (
        "decoding keeps the processor busy",
        "images: --resize and --crop; large JPEGs are then unpacked at a part of their size",
        "JPEGs: a faster decoder, pip install 'cachestream[jpeg]'",
        _PROCESSES,
    ),
    "transform": (
        "the transform keeps the processor busy, or waits and holds up its process",
        "move random augmentation to batch_transform, which works on whole batches while training",
        "let it do less for each sample, or crop and resize while decoding (--resize, --crop)",
        "more processes: --workers above {workers}, where cores are free or the transform waits",
    ),
    "pack": (
        "packing samples into columns keeps the processor busy",
        _SMALLER,
        "give samples fewer fields, with fixed shapes",
        "leave out the transform: sources of columns (Parquet, TFRecord) are then packed many at once",
    ),
    "disk": (
        "the disk takes samples more slowly than they come",
        _SMALLER,
        "put the cache on a faster disk; try one by --folder",
    ),
    "transfer": (
        "batches are delivered more slowly than samples come",
        _SMALLER,
        "give batches that are smaller in bytes; see 'cachestream bench CACHE' for the loader alone",
    ),
}  # fmt: skip


def judge(stages: Stages) -> Verdict:
    """The verdict on the stage that lets the fewest samples through."""
    rates, cpu_s = stages.rates, stages.alone.cpu_s
    busiest = max(cpu_s, key=lambda stage: cpu_s[stage]).replace("read", "requests")
    limits = [
        (stages.processor_per_s, busiest),
        (rates["transform"], "transform"),
        (rates["write"], "disk"),
        (rates["transfer"], "transfer"),
    ]
    if not stages.remote_has_more:
        limits.append((rates["read"], "remote" if stages.more_reads_help else "network"))
    samples_per_s, binds = min(limits)
    because, *steps = _ADVICE[binds]
    return Verdict(
        binds, samples_per_s, because, tuple(step.format(workers=stages.workers) for step in steps)
    )
