"""`cachestream diagnose`: the stage that holds up filling from a source, or training on it.

Two workers fill for some seconds, and their counters are read, those that `cachestream status` shows. The
first is a worker as it will be. The second reads one unit at a time and drops it: it tells the processor's
time of decoding alone, and a narrow link, which reads at once share, from a remote that takes long to answer.
`write` is at least what a synced file of 64 MiB takes: for some seconds, the kernel takes more than the disk.
`transfer` is the loader, onto the accelerator if there is one.

Not measured: the model, and the remote at other times. Data that was read before comes from memory.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import format_number, format_size
from cachestream.errors import SourceError
from cachestream.storage.cache import Cache
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.status import describe_skipped, hindrance
from cachestream.storage.telemetry import Board, Totals
from cachestream.tools.bench import measure_loader
from cachestream.tools.machine import existing_folder, synced_bytes_per_s
from cachestream.training.batches.transfer import accelerator
from cachestream.worker.worker import start_worker

if TYPE_CHECKING:
    from cachestream.sources.base import Source

_LOOK_S: Final = 0.02
_PATIENCE_S: Final = 30.0  # for the first samples
_EPOCH_SIZE: Final = 4096  # samples, drawn more than once from fewer: to begin an epoch takes time, too
_LEAST_UNITS: Final = 3  # by which the samples of all are estimated
_LEAST_GAIN: Final = 2.0  # of many reads at once over one, if latency holds them up
_PROCESSES: Final = "more processes, where cores are free: --workers above {workers}, 16 reads at once each"
_UNITS: Final = "larger units (tars, Parquet, MDS) instead of many small files, but several for each process"
_FEWER: Final = "fetch fewer bytes: smaller files, only the columns or windows that are needed"
_LINK: Final = "look for a limit on the way: other programs, the link, the bucket; or run nearer to the data"
_JPEG: Final = "images: --resize unpacks large JPEGs at a part of their size, cachestream[jpeg] faster"
_LATER: Final = "move random augmentation to batch_transform, which works on whole batches while training"
_SMALLER: Final = "make samples smaller before they are cached: --resize, --crop, uint8 instead of floats"
_ADVICE: Final = {  # by verdict: the reason, and what to do next
    "remote": ("Reads wait for answers, and many at once bring more", _PROCESSES, _UNITS),
    "network": ("Many reads at once hardly bring more than one: the bandwidth is used up", _FEWER, _LINK),
    "decode": ("Requests and decoding keep the processor busy", _JPEG, _PROCESSES, _UNITS),
    "transform": ("The transform calculates, or waits and holds up its process", _LATER, _PROCESSES),
    "pack": ("Packing samples into columns keeps the processor busy", _SMALLER, _PROCESSES),
    "disk": ("The disk takes samples more slowly than they come", _SMALLER, "try a faster disk by --folder"),
    "transfer": ("The loader delivers samples more slowly than they come", _SMALLER),
}


@dataclass(frozen=True, slots=True)
class Stages:
    """The measurements of `source` (redacted), filled by `workers` processes.

    `num_units`: None for an endless source; `is_listing` while the listing is incomplete. `num_samples`: None
    where units are too few to estimate it. `fetched_bytes` of the remote make a sample, and `cached_bytes` of
    the disk hold it. `seconds`: the time of one process for a sample in each stage; for "transfer", that of
    the loader, onto `device`. `bytes_per_s` came, and `alone_bytes_per_s` by one read at a time.
    `skipped` samples or units could not be used, as `failure` says.
    """

    source: str
    list_s: float
    num_units: int | None
    is_listing: bool
    num_samples: int | None
    fetched_bytes: float
    cached_bytes: float
    fill_per_s: float
    seconds: dict[str, float]
    bytes_per_s: float
    alone_bytes_per_s: float
    device: str
    cores: int
    workers: int
    skipped: int = 0
    failure: str = ""

    @property
    def rates(self) -> dict[str, float]:
        """Samples a second that each stage that takes time would let through if the others took none."""
        processes = {name: 1 if name == "transfer" else self.workers for name in self.seconds}
        return {name: processes[name] / each_s for name, each_s in self.seconds.items() if each_s}

    @property
    def binds(self) -> str:
        """The verdict on the stage that lets the fewest samples through: a key of `_ADVICE`."""
        slowest = min(self.rates, key=self.rates.__getitem__)
        reads = "remote" if self.bytes_per_s >= _LEAST_GAIN * self.alone_bytes_per_s else "network"
        return {"read": reads, "write": "disk"}.get(slowest, slowest)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; None for what has no limit."""
        because, *steps = _ADVICE[self.binds]
        verdict = {"binds": self.binds, "samples_per_s": min(self.rates.values()), "because": because}
        verdict["what_next"] = [step.format(workers=self.workers) for step in steps]
        told = {"source": self.source, "verdict": verdict, "skipped": self.skipped, "failure": self.failure}
        return {**told, "samples_per_s": dict.fromkeys(self.seconds) | self.rates, "stages": asdict(self)}

    def __str__(self) -> str:
        """A table of 80 columns, and sentences."""
        units = "endless" if self.num_units is None else f"{self.num_units:,} units"
        fetched, cached = format_size(self.fetched_bytes), format_size(self.cached_bytes)
        filling = f"{format_number(self.fill_per_s)} samples/s by {self.workers} processes"
        notes = {
            "read": f"{format_size(self.bytes_per_s)}/s; one read alone {format_size(self.alone_bytes_per_s)}/s",
            "transfer": "no accelerator" if self.device == "cpu" else f"onto {self.device}",
        }
        lines = [
            f"{self.source}: {units}{' and more' if self.is_listing else ''}",
            f"{filling}; {fetched} fetched for each, {cached} cached",
            f"\n{'':10}{'ms a sample':>11}{'samples/s':>12}",
            f"{'list':10}{format_number(1000 * self.list_s):>11}{'':12}  once, before the first sample",
        ]
        for name, each_s in self.seconds.items():
            if each_s or name != "transform":
                rate = format_number(self.rates[name]) if each_s else ""
                row = f"{name:10}{format_number(1000 * each_s):>11}{rate:>12}  {notes.get(name, '')}"
                lines.append(row.rstrip())
        verdict = self.to_dict()["verdict"]
        lines += ["", *textwrap.wrap(f"Verdict: {self.binds}. {verdict['because']}.", 80)]
        return "\n".join([*lines, *bullets(verdict["what_next"]), *textwrap.wrap(self.failure, 80)])


def bullets(sentences: Iterable[str]) -> Iterator[str]:
    """The lines of a list of `sentences`."""
    for one in sentences:
        yield from textwrap.wrap(one, 80, initial_indent="  - ", subsequent_indent="    ")


def diagnose(
    shown: str,
    open_it: Callable[[], Source],
    transform: Callable[..., Any] | None = None,
    *,
    seconds: float = 5.0,
    workers: int | None = None,
    folder: str | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Stages:
    """Fill from the source `shown`, which `open_it` opens, for about `seconds`, and measure every stage.

    `workers`: the sampling processes (default: one a core, at most 4). `folder`: the place of the temporary
    folder, best on the disk of the cache to be. `on_progress` gets a line before each step. Raises what
    `open_it` raises, SourceError if nothing can be used, and ConfigError for a missing folder.
    """
    cores, half_s = len(os.sched_getaffinity(0)), seconds / 2
    workers = min(4, cores) if workers is None else workers
    place, device = existing_folder(folder or tempfile.gettempdir()), accelerator() or "cpu"
    on_progress("listing")
    begun_s = time.perf_counter()
    source = open_it()
    list_s = time.perf_counter() - begun_s
    with translated_disk_errors(place), tempfile.TemporaryDirectory(prefix="cachestream-", dir=place) as work:
        on_progress(f"writing into a temporary folder in {place} by {workers} processes, for {half_s:.3g} s")
        with Cache(os.path.join(work, "cache"), "1GB", min_free="200MB") as cache:
            many, many_s, hindered = _fill(cache, source, half_s, num_workers=workers, transform=transform)
            status, units_done = cache.status(), cache.filling.state().positions_done
            failure = describe_skipped(status.failures)
            if not status.num_samples:
                why = failure or hindered or status.fill_message or "does the remote answer?"
                raise SourceError(f"{shown}: no usable sample; {why}")
            whole = _look(cache)[1]
            size = min(64, status.num_samples)  # of a batch
            delivered = measure_loader(cache, size, 1.0, epoch_size=_EPOCH_SIZE, device=device)
        on_progress(f"reading one unit after another, for {half_s:.3g} s")
        with Cache(os.path.join(work, "alone"), "1GB", min_free="200MB") as cache:
            # A lambda, which is sent as it is: a function of this module would load torch in the worker.
            one = {"num_workers": 1, "concurrency": 1, "seed": 1, "transform": lambda _: None}
            alone, alone_s, _ = _fill(cache, source, half_s, **one)
        disk_bytes_per_s = synced_bytes_per_s(work)
    num_samples = None
    if status.num_units is not None and not status.is_listing and units_done >= _LEAST_UNITS:
        num_samples = max(1, round(status.num_units * status.num_samples / units_done))
    fetched_bytes = whole.fetched_bytes / whole.samples
    if whole.units and units_done:  # without what was fetched of units that are not read to the end
        fetched_bytes = whole.unit_bytes / whole.units * units_done / status.num_samples
    cached_bytes = whole.written_bytes / whole.samples
    each_s = _each_s(many, alone, workers / cores)
    each_s["write"] = max(each_s["write"], workers * cached_bytes / disk_bytes_per_s)
    return Stages(
        shown,
        list_s,
        status.num_units,
        status.is_listing,
        num_samples,
        fetched_bytes,
        cached_bytes,
        max(1, many.samples) / many_s,
        {**each_s, "transfer": 1 / delivered.samples_per_s},
        many.fetched_bytes / many_s,
        alone.fetched_bytes / alone_s,
        device,
        cores,
        workers,
        status.skipped,
        failure,
    )


def _each_s(many: Totals, alone: Totals, processes_a_core: float) -> dict[str, float]:
    """The time that one process takes for a sample in each stage of `many` reads at once.

    Packing only calculates. Threads that decode may have had the processor meanwhile: where both were counted
    for more than the processor's time, it is divided between them.
    """
    spent_s = {stage: spent_s / max(1, many.samples) for stage, spent_s in many.spent_s.items()}
    cpu_s, decode_s = many.cpu_s / max(1, many.samples), alone.read_cpu_s / max(1, alone.done)
    pack_s = min(spent_s["packing"], cpu_s)
    return {
        "read": spent_s["remote"],
        "decode": max(spent_s["decoding"], decode_s * processes_a_core),
        "transform": spent_s["transform"],
        "pack": pack_s * min(1.0, cpu_s / (pack_s + decode_s or 1.0)),
        "write": spent_s["disk"],
    }


def _fill(cache: Cache, source: Source, seconds: float, **options: Any) -> tuple[Totals, float, str]:
    """Fill `cache` for `seconds` after the first samples, and until as many came again; 30 s longer at most.

    Returns what was counted after the first samples, or of all where they came at once; the time that it
    took; and why no more come, if that is known.
    """
    with start_worker(cache, source, **options):
        before = first = last = _look(cache)
        until_s, is_done = last[0] + _PATIENCE_S + seconds, False
        while not is_done and last[0] < until_s:
            time.sleep(_LOOK_S)
            is_done = cache.fill_state() not in ("none", "filling")  # asked first: then all is counted
            last = _look(cache)
            if not first[1].done:
                before, first = first, last
            is_done |= last[0] - first[0] >= seconds and last[1].done >= 2 * first[1].done
        hindered = hindrance(cache.directory, cache.filling.state())
    since_s, since = first if last[1].done > first[1].done else before
    return last[1].since(since), last[0] - since_s, hindered


def _look(cache: Cache) -> tuple[float, Totals]:
    """The time, and the counters of the worker."""
    return time.monotonic(), Board(cache.directory.worker_file("board"), read_only=True).totals()
