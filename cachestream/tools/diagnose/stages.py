"""From measurements of the stages that a sample passes to a verdict, the stage that holds up the rest, and to
the findings that are shown. Nothing here does I/O.

Stages are compared by the samples a second that each would let through if the others took no time. Reading
counts as measured with as many reads at once as a worker has. Stages that calculate share the cores; a
transform that waits holds up its sampling process; the disk and the loader do one thing at a time.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from cachestream.config import format_size

BUSY: Final = 0.8  # of the cores, or of the one core that the interpreter's lock leaves to Python
_ONE_INTERPRETER: Final = 1.3  # above that many cores, it is not the interpreter's lock that holds it up
_TOO_SHORT_S: Final = 0.05
_WIDTH: Final = 80
_LEAST_S: Final = 1e-9
_NO_TIME: Final = dict.fromkeys(("read", "decode", "transform", "pack"), 0.0)


@dataclass(slots=True)
class Measurement:
    """Figures of `reads` units read at once, for `seconds`; they grow while the reads go on.

    `fetched_bytes`: 0 where the source does not report bytes. `busy_cores`: the cores that this process used.
    `wall_s` and `cpu_s`: by stage, the time of all samples, and the processor's part of it, which has a
    meaning for a single read only. `units`: those that were read to the end.
    """

    reads: int
    num_samples: int = 0
    fetched_bytes: int = 0
    seconds: float = 0.0
    busy_cores: float = 0.0
    wall_s: dict[str, float] = field(default_factory=_NO_TIME.copy)
    cpu_s: dict[str, float] = field(default_factory=_NO_TIME.copy)
    units: int = 0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples that were written, or delivered by the loader, in `seconds`."""

    num_samples: int
    num_bytes: int
    seconds: float

    @property
    def samples_per_s(self) -> float:
        return _rate(self.num_samples, self.seconds)

    @property
    def bytes_per_s(self) -> float:
        return _rate(self.num_bytes, self.seconds)


@dataclass(frozen=True, slots=True)
class Stages:
    """Measurements of a source: `alone` by one read, with transform and packing, `together` by many without.

    `num_units`: None for an endless source; `is_listing` while the listing is incomplete. `written`: the
    packed samples, at the speed of the disk; `delivered`: onto `device`. `workers`: the sampling processes of
    a worker, on `cores`.
    """

    list_s: float
    num_units: int | None
    is_listing: bool
    alone: Measurement
    together: Measurement
    written: Throughput
    delivered: Throughput
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
        each = _rate(alone.num_samples, alone.wall_s["transform"])  # a process transforms one at a time
        rates["transform"] = min(rates["transform"], self.workers * each)
        return rates | {"write": self.written.samples_per_s, "transfer": self.delivered.samples_per_s}

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
    what_next: list[str]


_SMALLER: Final = (
    "make samples smaller before they are cached: --resize, --crop, a transform that keeps uint8"
)
_PROCESSES: Final = (
    "more processes, where cores are free: --workers above {workers}, each reads 16 units at once"
)
_ADVICE: Final = {  # the reason, then what to do next
    "remote": (
        "reads wait for answers, and many at once bring more",
        _PROCESSES,
        "larger units (tars instead of small files), but no fewer than are read at once",
    ),
    "network": (
        "many reads at once bring hardly more than one: the bandwidth is used up, or the server",
        "fetch fewer bytes: smaller files, only the columns or windows that are needed",
        "look for a limit on the way: other programs, the link, the bucket; or run nearer to the data",
    ),
    "requests": (
        "asking for bytes keeps the processor busy",
        "larger units need fewer requests: tars, Parquet or MDS instead of small files, larger windows of arrays",
        _PROCESSES,
    ),
    "decode": (
        "decoding keeps the processor busy",
        "images: --resize and --crop unpack large JPEGs at a part of their size, cachestream[jpeg] faster",
        _PROCESSES,
    ),
    "transform": (
        "the transform keeps the processor busy, or waits and holds up its process",
        "move random augmentation to batch_transform, which works on whole batches while training",
        _PROCESSES,
    ),
    "pack": (
        "packing samples into columns keeps the processor busy",
        _SMALLER,
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
        "see 'cachestream bench CACHE' for the loader alone",
    ),
}  # fmt: skip


def judge(stages: Stages) -> Verdict:
    """The verdict on the stage that lets the fewest samples through."""
    rates, cpu_s = stages.rates, stages.alone.cpu_s
    busiest = max(cpu_s, key=lambda stage: cpu_s[stage]).replace("read", "requests")
    limits = [(stages.processor_per_s, busiest), (rates["transform"], "transform")]
    limits += [(rates["write"], "disk"), (rates["transfer"], "transfer")]
    if not stages.remote_has_more:
        limits.append((rates["read"], "remote" if stages.more_reads_help else "network"))
    samples_per_s, binds = min(limits)
    because, *steps = _ADVICE[binds]
    return Verdict(binds, samples_per_s, because, [step.format(workers=stages.workers) for step in steps])


@dataclass(frozen=True, slots=True)
class Findings:
    """Measurements of `source` (redacted), and the verdict on them.

    `skipped` samples or units could not be used, the first because of `failure`.
    """

    source: str
    stages: Stages
    verdict: Verdict
    skipped: int = 0
    failure: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; None for what has no limit."""
        return {
            "source": self.source,
            "verdict": asdict(self.verdict) | {"samples_per_s": _finite(self.verdict.samples_per_s)},
            "samples_per_s": {name: _finite(rate) for name, rate in self.stages.rates.items()},
            "fill_samples_per_s": _finite(self.stages.fill_per_s),
            "stages": asdict(self.stages),
            "skipped": self.skipped,
            "failure": self.failure,
        }

    def __str__(self) -> str:
        """A table of 80 columns, and sentences."""
        stages, alone, written, verdict = self.stages, self.stages.alone, self.stages.written, self.verdict
        units = "endless" if stages.num_units is None else f"{stages.num_units:,} units"
        lines = [f"{self.source}: {units}{' and more' if stages.is_listing else ''}"]
        each = f", {format_size(written.num_bytes / written.num_samples)} cached"
        if alone.fetched_bytes:
            each = f", {format_size(alone.fetched_bytes / alone.num_samples)} fetched for each{each}"
        lines += _wrapped(f"{alone.num_samples:,} samples looked at one by one{each}")
        lines += ["", f"{'':10}{'ms a sample':>11}{'samples/s':>12}"]
        for name, each_s, note in self._rows():
            rate = stages.rates.get(name, math.inf)
            bound = "> " if name == "read" and stages.remote_has_more else ""
            shown = f"{bound}{_number(rate)}" if math.isfinite(rate) else ""
            lines.append(f"{name:10}{_number(1000 * each_s):>11}{shown:>12}  {note}")
        because, most = verdict.because[0].upper() + verdict.because[1:], _number(verdict.samples_per_s)
        lines += ["", *_wrapped(f"Verdict: {verdict.binds}. {because}; it lets {most} samples/s through.")]
        for step in verdict.what_next:
            lines += textwrap.wrap(step, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
        fill, served = _number(stages.fill_per_s), _number(stages.rates["transfer"])
        cached = f"A cache fills with up to {fill} samples/s, and is served with up to {served}."
        lines += ["", *_wrapped(cached)]
        if self.skipped:
            lines += _wrapped(f"{self.skipped:,} skipped, the first because: {self.failure}")
        return "\n".join(lines)

    def _rows(self) -> Iterator[tuple[str, float, str]]:
        """The name of each stage, its seconds a sample, and a note."""
        stages, alone, run = self.stages, self.stages.alone, self.stages.together
        yield "list", stages.list_s, "once, before the first sample"
        note = f"{run.reads} at once; the source does not tell bytes"
        if alone.fetched_bytes and run.fetched_bytes:
            many, one = run.fetched_bytes / run.seconds, alone.fetched_bytes / max(stages.read_s, _LEAST_S)
            note = f"{format_size(many)}/s by {run.reads} at once; one alone {format_size(one)}/s"
        yield "read", stages.read_s / alone.num_samples, note
        yield "decode", alone.cpu_s["decode"] / alone.num_samples, f"cores: {stages.cores}"
        if wall_s := alone.wall_s["transform"]:
            yield "transform", wall_s / alone.num_samples, f"sampling processes: {stages.workers}"
        yield "pack", alone.cpu_s["pack"] / alone.num_samples, f"cores: {stages.cores}"
        onto = "no accelerator" if stages.device == "cpu" else f"onto {stages.device}"
        for name, done, how in (("write", stages.written, "synced"), ("transfer", stages.delivered, onto)):
            yield name, 1 / done.samples_per_s, f"{format_size(done.bytes_per_s)}/s, {how}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False)


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _number(value: float) -> str:
    """Three significant digits: "0.52", "31.2", "4,120"."""
    if not math.isfinite(value):
        return "any number of"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 1000 else f"{value:.3g}"
