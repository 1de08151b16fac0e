"""`cachestream demo`: makes the remote, starts the ranks, watches the limit, shows, draws, and cleans up."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachestream.config import format_size
from cachestream.demo.data import PLACES, SIDE, DemoData, make_remote
from cachestream.demo.messages import Begun, EpochDone, EpochProgress, Settings
from cachestream.demo.plot import draw
from cachestream.demo.progress import LimitWatch
from cachestream.demo.show import Screen
from cachestream.demo.torchrun import TorchrunJob
from cachestream.errors import ConfigError, WorkerError
from cachestream.storage.cache import Cache
from cachestream.storage.layout import Directory
from cachestream.storage.status import CacheStatus, VerifyReport
from cachestream.storage.telemetry import read_history

RANKS: Final = 2
PLOT: Final = "demo.png"
LOG: Final = "ranks.log"
_SAMPLE_BYTES: Final = 3 * SIDE * SIDE + 64
_LOOK_S: Final = 0.25
_WORKER_END_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much the demo does: the remote is slow enough to take `fetch_s`, the cache holds `cached_share` of it."""

    num_samples: int = 6000
    num_held_out: int = 4 * PLACES
    epochs: int = 10
    epoch_s: float = 4.0
    fetch_s: float = 32.0
    cached_share: float = 0.55
    min_samples: int = 2 * PLACES

    @property
    def limit_bytes(self) -> int:
        return int(self.num_samples * self.cached_share * _SAMPLE_BYTES)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What there is to tell at the end."""

    remote: DemoData
    epochs: list[EpochDone]
    status: CacheStatus
    report: VerifyReport
    watch: LimitWatch
    plot: Path

    def problems(self, size: Size) -> list[str]:
        found = []
        if self.watch.exceeded:
            limit = self.watch.limit_bytes
            found.append(
                f"the cache took {self.watch.peak_bytes - limit:,} bytes more than its limit of {limit:,}"
            )
        if len(self.epochs) < size.epochs:
            found.append(f"only {len(self.epochs)} of {size.epochs} epochs were trained")
        if self.status.skipped:
            reasons = ", ".join(sorted({failure.reason for failure in self.status.failures}))
            found.append(f"{self.status.skipped} samples were skipped: {reasons}")
        if not self.report.ok:
            found.append(f"the cache is not sound: {self.report}")
        return found

    def summary(self) -> str:
        last, status = self.epochs[-1], self.status
        seconds = sum(event.seconds for event in self.epochs)
        waited = sum(event.wait * event.seconds for event in self.epochs) / seconds
        return (
            f"{last.accuracy:.0%} accuracy after {last.epoch} epochs: {last.seen:.0%} of the remote went through a "
            f"cache of {format_size(self.watch.peak_bytes)} at most (limit {format_size(status.size_limit)}), "
            f"{status.evicted_samples:,} samples were evicted, training waited {waited:.1%} of its time."
        )


def run(
    output: str | os.PathLike[str] = "demo-output", *, keep: bool = False, size: Size | None = None
) -> int:
    """Train two ranks on a growing cache of a slow remote, and show it; 0 if all went well, else 1.

    The plot and the ranks' log go to the folder `output`; the remote and the cache to a temporary folder, which is
    removed at the end unless `keep`. Raises ConfigError for what is missing, EpochError if the ranks fail.
    """
    size = size or Size()
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder for the plot cannot be made: {error}; give another with --output"
        ) from error
    began_s = time.monotonic()
    with Screen() as screen, _workplace(keep) as work:
        remote = _prepare(work, size, screen)
        outcome = _train(work, folder, remote, size, screen)
    problems = outcome.problems(size)
    screen.say("")
    screen.say(outcome.summary(), "bold")
    kept = f"; remote and cache are kept in {work}" if keep else ""
    screen.say(
        f"Plot of growth and accuracy: {outcome.plot} (took {time.monotonic() - began_s:.0f} s{kept})", "bold"
    )
    for problem in problems:
        sys.stderr.write(f"cachestream demo: {problem}; see {folder / LOG}\n")
    return 1 if problems else 0


@contextmanager
def _workplace(keep: bool) -> Iterator[Path]:
    """A folder on a local disk for remote and cache."""
    work = Path(tempfile.mkdtemp(prefix="cachestream-demo-"))
    try:
        yield work
    finally:
        if not keep:
            shutil.rmtree(work)


def _prepare(work: Path, size: Size, screen: Screen) -> DemoData:
    remote = make_remote(
        work,
        size.num_samples,
        size.num_held_out,
        lambda done, total: screen.doing("preparing", done, total) if done % 100 == 0 else None,
    )
    speed = f"{format_size(remote.size_bytes / size.fetch_s)}/s"
    screen.say(
        f"remote   {remote.num_samples:,} JPEG views of {PLACES} places in photographs, "
        f"{format_size(remote.size_bytes)}, limited to {speed}"
    )
    whole = format_size(remote.num_samples * _SAMPLE_BYTES)
    screen.say(f"cache    limited to {format_size(size.limit_bytes)}; all of it, decoded, would take {whole}")
    return remote


def _train(work: Path, folder: Path, remote: DemoData, size: Size, screen: Screen) -> Outcome:
    settings = Settings(
        remote=remote.url,
        held_out=remote.held_out,
        num_samples=remote.num_samples,
        cache=str(work / "cache"),
        shard_bytes=size.limit_bytes // 24,
        bandwidth_bytes_per_s=int(remote.size_bytes / size.fetch_s),
        ranks=RANKS,
        epochs=size.epochs,
        epoch_s=size.epoch_s,
        min_samples=size.min_samples,
    )
    screen.doing(f"starting {RANKS} ranks")
    with Cache(settings.cache, size.limit_bytes, min_free="100MB") as cache:
        try:
            with (
                LimitWatch(cache.path, size.limit_bytes) as watch,
                TorchrunJob(settings, folder / LOG, work / "torchrun") as ranks,
            ):
                epochs = _follow(ranks, cache, screen)
        finally:
            _wait_for_worker(cache)
        screen.doing("checking and drawing")
        history = read_history(Directory(cache.path).worker_file("history"))
        plot = folder / PLOT
        draw(history, epochs, remote.num_samples, plot)
        return Outcome(remote, epochs, cache.status(), cache.verify(), watch, plot)


def _follow(ranks: TorchrunJob, cache: Cache, screen: Screen) -> list[EpochDone]:
    """Show what the ranks report until they end."""
    epochs: list[EpochDone] = []
    while (events := ranks.events(_LOOK_S)) is not None:
        for event in events:
            if isinstance(event, EpochProgress):
                screen.progress(event)
            elif isinstance(event, Begun):
                screen.say(
                    f"training {RANKS} ranks on {event.device} over {event.backend}, {event.samples_per_s:,.0f} "
                    f"samples/s if data is there; an epoch draws {event.epoch_samples:,}\n"
                )
                screen.heading()
            elif isinstance(event, EpochDone):
                epochs.append(event)
                screen.epoch(event)
        screen.status(cache.status())
    return epochs


def _wait_for_worker(cache: Cache) -> None:
    """The worker ends when the ranks have: before its cache is removed."""
    deadline = time.monotonic() + _WORKER_END_S
    while cache.has_worker():
        if time.monotonic() > deadline:
            raise WorkerError(f"the worker of {cache.path} has not ended within {_WORKER_END_S:.0f} s")
        time.sleep(0.05)
