"""`cachestream diagnose`: the stage that holds up filling from a source, or training on it.

Real workers fill for some seconds, and their counters are read. The first one reads one unit at a time and
drops what it reads: that is the time of `read` and `decode`. The second one is a worker as it will be, with
a cache in a temporary folder: that is the rate of reading, `transform` and `pack`. Both are needed: reads at
once do not tell a narrow link, which they share, from a remote that takes long to answer. `list` is opening
the source, `write` a file of 64 MiB in that folder, synced, and `transfer` the loader over that cache, onto
the accelerator if there is one.

Stages are compared by the samples a second that each would let through if the others took no time. Stages
that calculate share the cores; a transform that waits holds up its process. Not measured: how the remote
behaves at other times, and the model. Data that this machine has read before comes from its memory.
"""

from __future__ import annotations

import math
import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import format_number, format_size
from cachestream.errors import CacheFullError, SourceError
from cachestream.sources.datasets import CallableSource, DatasetSource, IterableSource
from cachestream.storage.cache import Cache
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.telemetry import Board, Totals
from cachestream.tools.bench import Throughput, measure_loader
from cachestream.tools.machine import existing_folder, synced_bytes_per_s
from cachestream.training.batches.transfer import accelerator
from cachestream.worker.worker import start_worker

if TYPE_CHECKING:
    from cachestream.sources.base import Source
    from cachestream.storage.status import CacheStatus

_BUSY: Final = 0.8  # of the cores, or of the one core that the interpreter's lock leaves to Python
_ONE_INTERPRETER: Final = 1.3  # above that many cores a process, its lock is not what holds it up
_WAITS: Final = 0.2  # of its time: a process that waits for less is not held up by its reads
_TOO_SHORT_S: Final = 0.05
_LOOK_S: Final = 0.02
_PATIENCE_S: Final = 30.0  # for the first sample
_TRANSFER_S: Final = 1.0
_BATCHES: Final = (64, 4096)  # samples, the least and the most
_BATCH_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 32_000  # of a remote object, which takes longer to ask for than to decode
_LEAST_UNITS: Final = 3  # by which the samples of all are estimated
_WIDTH: Final = 80


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The work of a worker: `samples` that it read, used or not, in `seconds`, and the time that it `spent`.

    `seconds` is 0 where all was done at once. `reads`: the units that were read at once, on average.
    """

    samples: int
    seconds: float
    reads: float
    spent: Totals

    def each(self, seconds: float) -> float:
        """The part of `seconds` for one sample."""
        return seconds / max(1, self.samples)

    def per_s(self, count: float) -> float:
        """`count` a second; inf where all was done at once."""
        return count / self.seconds if self.seconds else math.inf


@dataclass(frozen=True, slots=True)
class Stages:
    """The measurements of a source: `alone` by one read at a time, `together` by `workers` processes.

    `num_units`: None for an endless source; `is_listing` while the listing is incomplete. `num_samples`: None
    where units are too few to estimate it. `fetched_bytes` of the remote make a sample. `tells_bytes`: False
    for a dataset or function. `cached_bytes` of the disk hold a sample, written at `write_bytes_per_s`;
    `delivered`: onto `device`.
    """

    list_s: float
    num_units: int | None
    is_listing: bool
    num_samples: int | None
    fetched_bytes: float
    alone: MeasuredRun
    together: MeasuredRun
    cached_bytes: float
    write_bytes_per_s: float
    delivered: Throughput
    device: str
    cores: int
    workers: int
    tells_bytes: bool = True

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds that a sample takes in each stage, one after the other."""
        one, many = self.alone, self.together
        return {
            "read": one.each(max(0.0, one.spent.fetch_wait_s - one.spent.read_cpu_s)),
            "decode": one.each(one.spent.read_cpu_s),
            "transform": many.each(many.spent.transform_s),
            "pack": many.each(many.spent.pack_s),
            "write": self.cached_bytes / self.write_bytes_per_s,
            "transfer": 1 / self.delivered.samples_per_s,
        }

    @property
    def remote_has_more(self) -> bool:
        """True if the processes did not wait for reads, or if the processor held these up, not the remote."""
        run, shares = self.together, dict(self.together.spent.shares)
        if not run.seconds or shares.get("remote", 0.0) + shares.get("decoding", 0.0) < _WAITS:
            return True
        cores = run.per_s(run.spent.cpu_s)
        return cores >= _BUSY * self.cores or _BUSY <= cores / self.workers <= _ONE_INTERPRETER

    @property
    def more_reads_help(self) -> bool:
        """True if many reads at once brought many times as much: latency holds them up, not bandwidth."""
        alone_s = self.alone.spent.fetch_wait_s
        if self.together.reads < 2 or not alone_s or not self.tells_bytes:
            return True
        many = self.together.per_s(self.together.spent.fetched_bytes)
        gain = many * alone_s / max(1, self.alone.spent.fetched_bytes)
        return gain >= math.sqrt(self.together.reads)  # between 1, no gain, and the number of reads

    @property
    def rates(self) -> dict[str, float]:
        """Samples a second that each stage lets through; inf for "read" where the remote has more."""
        found = {name: 1 / seconds if seconds else math.inf for name, seconds in self.seconds.items()}
        found["read"] = math.inf if self.remote_has_more else self.together.per_s(self.together.samples)
        found["decode"] *= self.cores
        found["transform"] *= self.workers
        found["pack"] *= min(self.cores, self.workers)
        return found

    @property
    def processor_per_s(self) -> float:
        """Samples a second that the stages which calculate let through together."""
        each_s = self.together.each(self.together.spent.cpu_s)
        return self.cores / each_s if each_s else math.inf

    @property
    def fill_per_s(self) -> float:
        """Samples a second that a worker fills a cache with: measured, where that took long enough."""
        rates = self.rates
        most = min(self.processor_per_s, *(rates[name] for name in rates if name != "transfer"))
        return min(self.together.per_s(self.together.samples), most)


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
        "asking for many small objects keeps the processor busy",
        "larger units need fewer requests: tars, Parquet, MDS, not small files; large windows of arrays",
        _PROCESSES,
    ),
    "decode": (
        "reading and decoding keep the processor busy",
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


def judge(stages: Stages, source: str = "") -> Verdict:
    """The verdict on the stage that lets the fewest samples through, of the `source` of that name."""
    rates, each_s = stages.rates, stages.seconds
    is_small = "://" in source and stages.fetched_bytes < _SMALL_BYTES
    busiest = max(("decode", "transform", "pack"), key=lambda stage: each_s[stage])
    busiest = "requests" if busiest == "decode" and is_small else busiest
    limits = [(stages.processor_per_s, busiest), (rates["transform"], "transform")]
    limits += [(rates["write"], "disk"), (rates["transfer"], "transfer")]
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
        stages, verdict, rates = self.stages, self.verdict, self.stages.rates
        units = "endless" if stages.num_units is None else f"{stages.num_units:,} units"
        fetched, cached = format_size(stages.fetched_bytes), format_size(stages.cached_bytes)
        looked = f"{stages.together.samples:,} samples filled, {fetched} fetched for each, {cached} cached"
        lines = [f"{self.source}: {units}{' and more' if stages.is_listing else ''}", *_wrapped(looked)]
        lines += ["", f"{'':10}{'ms a sample':>11}{'samples/s':>12}"]
        lines.append(
            f"{'list':10}{format_number(1000 * stages.list_s):>11}{'':12}  once, before the first sample"
        )
        for name, note in self._notes():
            rate = f"{format_number(rates[name])}" if math.isfinite(rates[name]) else ""
            if name == "read" and stages.remote_has_more and stages.together.seconds:
                rate = f"> {format_number(stages.together.per_s(stages.together.samples))}"
            lines.append(f"{name:10}{format_number(1000 * stages.seconds[name]):>11}{rate:>12}  {note}")
        because, most = verdict.because[0].upper() + verdict.because[1:], format_number(verdict.samples_per_s)
        lines += ["", *_wrapped(f"Verdict: {verdict.binds}. {because}; it lets {most} samples/s through.")]
        lines += bullets(verdict.what_next)
        fill, served = format_number(stages.fill_per_s), format_number(rates["transfer"])
        lines += [
            "",
            *_wrapped(f"A cache fills with up to {fill} samples/s, and is served with up to {served}."),
        ]
        if self.skipped:
            lines += _wrapped(f"{self.skipped:,} skipped, the first because: {self.failure}")
        return "\n".join(lines)

    def _notes(self) -> Iterator[tuple[str, str]]:
        """The name of each stage that takes time, and a note on it."""
        stages, alone, many = self.stages, self.stages.alone, self.stages.together
        one = alone.spent.fetched_bytes / max(alone.spent.fetch_wait_s, 1e-9)
        rate = (
            f"{format_size(many.per_s(many.spent.fetched_bytes))}/s by {many.reads:.0f} at once; "
            if many.seconds and many.reads >= 1
            else ""
        )
        yield "read", f"{rate}one alone {format_size(one)}/s"
        yield "decode", f"cores: {stages.cores}"
        if many.spent.transform_s:
            yield "transform", f"sampling processes: {stages.workers}"
        yield "pack", f"sampling processes: {stages.workers}"
        yield "write", f"{format_size(stages.write_bytes_per_s)}/s, synced"
        onto = "no accelerator" if stages.device == "cpu" else f"onto {stages.device}"
        yield "transfer", f"{format_size(stages.delivered.bytes_per_s)}/s, {onto}"


def bullets(sentences: Iterable[str]) -> Iterator[str]:
    """The lines of a list of `sentences`."""
    for one in sentences:
        yield from textwrap.wrap(one, _WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False)


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def diagnose(
    shown: str,
    open_it: Callable[[], Source],
    transform: Callable[..., Any] | None = None,
    *,
    seconds: float = 5.0,
    workers: int | None = None,
    folder: str | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Fill from the source `shown`, which `open_it` opens, for about `seconds`; find the stage that holds it
    up.

    `workers`: the sampling processes (default: one a core, at most 4). `folder`: the place of the temporary
    folder, best on the disk of the cache to be. `on_progress` gets a line before each step.

    Raises what `open_it` raises, SourceError if nothing can be read or used, ConfigError for a missing
    folder, and CacheFullError if the samples do not fit there.
    """
    cores = len(os.sched_getaffinity(0))
    workers = min(4, cores) if workers is None else workers
    place, device = existing_folder(folder or tempfile.gettempdir()), accelerator() or "cpu"
    on_progress("listing")
    begun_s = time.perf_counter()
    source = open_it()
    list_s = time.perf_counter() - begun_s
    with (
        translated_disk_errors(place),
        tempfile.TemporaryDirectory(prefix="cachestream-diagnose-", dir=place) as work,
    ):
        on_progress(f"reading one unit after another, for {seconds / 2:.3g} s")
        with Cache(os.path.join(work, "alone"), "1GB", min_free="200MB") as cache:
            # A lambda, which is sent as it is: a function of this module would load torch in the worker.
            one = {"num_workers": 1, "concurrency": 1, "transform": lambda _: None}
            alone = _fill(shown, cache, source, seconds / 2, **one)
        on_progress(
            f"writing into a temporary folder in {place} by {workers} processes, for {seconds / 2:.3g} s"
        )
        with Cache(os.path.join(work, "cache"), "1GB", min_free="200MB") as cache:
            together = _fill(
                shown, cache, source, seconds / 2, num_workers=workers, transform=transform, seed=1
            )
            status, read = cache.status(), cache.filling.state().positions_done
            if not status.num_samples:
                raise _nothing(shown, cache, together)
            num_samples = (
                None
                if status.num_units is None or status.is_listing or read < _LEAST_UNITS
                else (max(1, round(status.num_units * status.num_samples / read)))
            )
            written = Board(cache.directory.worker_file("board"), read_only=True).totals()
            each_bytes = written.written_bytes / written.samples
            batch_size = min(
                status.num_samples, _BATCHES[1], max(_BATCHES[0], int(_BATCH_BYTES / each_bytes))
            )
            epoch = {"epoch_size": max(status.num_samples, _BATCHES[0] * batch_size), "device": device}
            delivered = measure_loader(cache, batch_size, _TRANSFER_S, **epoch)
        stages = Stages(
            list_s,
            status.num_units,
            status.is_listing,
            num_samples,
            _fetched_each(alone, status.num_units, num_samples),
            alone,
            together,
            each_bytes,
            synced_bytes_per_s(work),
            delivered,
            device,
            cores,
            workers,
            not isinstance(source, CallableSource | DatasetSource | IterableSource),
        )
    failure = next(iter(_reasons(status)), "")
    return Findings(shown, stages, judge(stages, shown), status.skipped, failure)


def _fetched_each(alone: MeasuredRun, num_units: int | None, num_samples: int | None) -> float:
    """Bytes fetched for a sample: of units that were read to the end, if there are any."""
    spent = alone.spent
    if spent.units and num_units and num_samples:
        return spent.unit_bytes / spent.units * num_units / num_samples
    return alone.each(spent.unit_bytes if spent.units else spent.fetched_bytes)


def _fill(shown: str, cache: Cache, source: Source, seconds: float, **options: Any) -> MeasuredRun:
    """Fill `cache` for `seconds` after the first sample, and longer where hardly any came: 30 s at most.

    Objects that share a slow network, or are far away, arrive together and late.
    """
    looks: list[tuple[float, int, int, Totals]] = []  # time, samples so far, reads, counters
    with start_worker(cache, source, **options):
        begun_s = now_s = time.monotonic()
        is_done = False
        while not is_done and now_s - begun_s < _PATIENCE_S + seconds:
            time.sleep(_LOOK_S)
            is_done = cache.fill_state() not in ("none", "filling")  # asked first: then all is counted
            board, now_s = Board(cache.directory.worker_file("board"), read_only=True), time.monotonic()
            samples = (totals := board.totals()).samples + totals.dropped + totals.failures
            if samples:
                looks.append((now_s, samples, board.reading, totals))
                came = samples - looks[0][1]
                is_done |= now_s - looks[0][0] >= seconds and came >= 2 * board.reading
    if not looks:
        raise _nothing(shown, cache, None)
    (first_s, before, _, first), (last_s, samples, _, last) = looks[0], looks[-1]
    reads = sum(look[2] for look in looks) / len(looks)
    if samples == before or last_s - first_s < _TOO_SHORT_S:
        return MeasuredRun(samples, 0.0, reads, last)
    return MeasuredRun(samples - before, last_s - first_s, reads, last.since(first))


def _reasons(status: CacheStatus) -> list[str]:
    """The reasons for skipped samples, the most frequent first, each with its first sample."""
    return [f"{one.reason}{f' (first: {one.example})' * bool(one.example)}" for one in status.failures]


def _nothing(shown: str, cache: Cache, run: MeasuredRun | None) -> SourceError | CacheFullError:
    """The error for a source of which no sample could be used."""
    status = cache.status()
    if status.disk_message:
        return CacheFullError(f"{status.disk_message}; try --folder")
    if run is not None and run.spent.dropped and not status.failures:
        return SourceError(f"{shown}: the transform dropped all {run.samples} samples that were read")
    reasons = [*_reasons(status), status.fill_message, status.remote_message]
    unknown = "check the path, --format, that the remote answers and the transform ends"
    return SourceError(f"{shown}: no usable sample; {next(filter(None, reasons), unknown)}")
