"""Statistics of a loader: its reports to other processes, and one flat dict for loggers."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.errors import ConfigError, EpochError
from cachestream.schema import IntArray, Snapshot
from cachestream.storage.telemetry import EPOCHS_REPORTED, LoaderFile, LoaderReport, LoaderStats
from cachestream.training.mixture import SourceCounts
from cachestream.training.threads import Threads

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.layout import Directory
    from cachestream.storage.status import CacheStatus
    from cachestream.training.loader import EpochLoader
    from cachestream.training.position import Segment

_REPORT_S: Final = 0.25  # between two reports, at least
_CLOSE_S: Final = 2.0  # for the last report to be written
_NONE: Final = np.empty(0, np.int64)


class Reuse:
    """The numbers of samples and of distinct samples drawn, in O(shards) memory.

    It keeps a share of each shard and not the samples, so the number of distinct ones is the expected one if
    an epoch draws a part of a snapshot.
    """

    def __init__(self) -> None:
        self._ids: IntArray = _NONE
        self._unseen = np.empty(0)  # for each shard the share of its samples that was never drawn
        self._drawn = 0.0
        self._distinct = 0.0

    def add(self, snapshot: Snapshot, share: float) -> None:
        """Add a draw of the `share` of `snapshot` (above 1 if samples come several times)."""
        if share <= 0:
            return
        drawn = self._indices(snapshot.shard_ids)
        first_seen = self._unseen[drawn] * min(share, 1.0)
        self._unseen[drawn] -= first_seen
        self._drawn += share * snapshot.num_samples
        self._distinct += float((first_seen * snapshot.counts).sum())

    def _indices(self, shard_ids: IntArray) -> IntArray | slice:
        """The indices of `shard_ids` in `_ids`, to which unknown ones are added.

        This is in the gap between epochs: for 7,000 shards np.union1d takes 1 ms, np.isin 0.3.
        """
        if np.array_equal(shard_ids, self._ids):
            return slice(None)
        new = np.isin(shard_ids, self._ids, invert=True, assume_unique=True)
        if new.any():
            ids = np.concatenate([self._ids, shard_ids[new]])
            unseen = np.concatenate([self._unseen, np.ones(len(ids) - len(self._ids))])
            order = np.argsort(ids, kind="stable")
            self._ids, self._unseen = ids[order], unseen[order]
        return np.searchsorted(self._ids, shard_ids)

    @property
    def factor(self) -> float:
        return self._drawn / self._distinct if self._distinct else 1.0


@dataclass(slots=True)
class Counts:
    """The batches and samples delivered so far, and the seconds of waiting for them."""

    samples: int = 0
    batches: int = 0
    skipped: int = 0
    wait_s: float = 0.0


@dataclass(slots=True)
class _Epoch:
    """The running epoch: its beginning, also since 1970, the counts then, and the shards that it is drawn
    from.
    """

    number: int = 0
    began_at_s: float = 0.0
    began_s: float = 0.0
    before: Counts = field(default_factory=Counts)
    shard_ids: IntArray = field(default_factory=lambda: _NONE)
    samples: int = 0


class Meter:
    """Counters and times of the training thread, which alone uses them, and their reports to others, which a
    thread of their own writes: a disk may block, and a preparation may take long.

    The trainer adds each batch to `counts` itself, and sets `last_s`, the time of the last batch or of the
    beginning of its epoch. `prepare_s`, `rank` and `ranks` are of the last preparation.
    """

    def __init__(self, directory: Directory) -> None:
        self.clock = time.perf_counter
        self.counts = Counts()
        self.last_s = 0.0
        self.prepare_s = 0.0
        self.rank, self.ranks = 0, 1
        self.reuse = Reuse()
        self._file = LoaderFile(directory)
        self._writing = Threads("report")
        self._report: LoaderReport | None = None  # to be written
        self._epoch = _Epoch()
        self._epochs: deque[tuple[int, int, float]] = deque(maxlen=EPOCHS_REPORTED)
        self._began_s: float | None = None
        self._gap_s = self._pending_gap_s = 0.0
        self.report_at_s = 0.0
        self._sources = SourceCounts()

    def begin_epoch(self, number: int) -> None:
        """Begin epoch `number`."""
        self._note_epoch()
        self.last_s = self.clock()
        if self._began_s is None:
            self._began_s = self.last_s
        self._epoch = _Epoch(number, time.time(), self.last_s, replace(self.counts))

    def enter_segment(self, segment: Segment) -> None:
        """Begin a pass of the epoch."""
        if segment.sources is not None:
            self._sources.enter(segment.sources, segment.plan, self.counts.batches)
        epoch, snapshot = self._epoch, segment.snapshot
        ids, counts = snapshot.shard_ids, snapshot.counts
        if len(epoch.shard_ids):
            new = np.isin(ids, epoch.shard_ids, invert=True, assume_unique=True)
            ids, counts = np.concatenate([epoch.shard_ids, ids[new]]), counts[new]
        epoch.shard_ids = ids
        epoch.samples += int(counts.sum())

    def add_gap(self, seconds: float) -> None:
        """Add `seconds` spent in the loader between two epochs."""
        self._pending_gap_s += seconds

    def end_gap(self, wait_s: float) -> None:
        """Note the first batch of an epoch, which came after a wait of `wait_s`."""
        self._gap_s, self._pending_gap_s = self._pending_gap_s + wait_s, 0.0

    def report(self) -> None:
        """Have the figures so far written. Called at most every quarter of a second, once `report_at_s` is
        past.
        """
        self.report_at_s = self.last_s + _REPORT_S
        self._note_epoch()
        self._report = LoaderReport(
            **asdict(self.stats(self._epoch.number)),
            pid=os.getpid(),
            rank=self.rank,
            ranks=self.ranks,
            reported_s=time.time(),
            epochs=tuple(self._epochs),
        )
        with suppress(EpochError):  # no thread can be started: the training goes on without reports
            self._writing.submit(self._write)

    def _write(self) -> None:
        """Write the last report, if it is new."""
        report, self._report = self._report, None
        if report is not None:
            self._file.write(report)

    def stats(self, epoch: int) -> LoaderStats:
        """The statistics of a loader in `epoch`."""
        counts, before = self.counts, self._epoch.before
        passed_s = 0.0 if self._began_s is None else self.last_s - self._began_s
        epoch_s, samples = self.last_s - self._epoch.began_s, counts.samples - before.samples
        epoch_wait_s = counts.wait_s - before.wait_s
        return LoaderStats(
            epoch=epoch,
            epoch_samples=self._epoch.samples,
            shards=len(self._epoch.shard_ids),
            samples=counts.samples,
            batches=counts.batches,
            skipped=counts.skipped,
            wait_s=counts.wait_s,
            wait_share=min(1.0, counts.wait_s / passed_s) if passed_s > 0 else 0.0,
            epoch_wait_share=min(1.0, epoch_wait_s / epoch_s) if epoch_s > 0 else 0.0,
            gap_s=self._gap_s,
            samples_per_s=samples / epoch_s if samples and epoch_s > 0 else 0.0,
            reuse_factor=self.reuse.factor,
            prepare_s=self.prepare_s,
            mixture=self._sources.stats(counts.batches),
        )

    def _note_epoch(self) -> None:
        """Note the samples of the running epoch so far, for the reports."""
        epoch = self._epoch
        if not epoch.samples:
            return
        if self._epochs and self._epochs[-1][0] == epoch.number:
            self._epochs.pop()
        self._epochs.append((epoch.number, epoch.samples, epoch.began_at_s))

    # --- the preparing thread

    def report_first(self) -> None:
        """Report once, so that a loader is there for others before its first batch."""
        if self._began_s is None or not self.counts.batches:
            self.report()
            self.report_at_s = 0.0  # the first batch makes another one

    def close(self) -> None:
        """End the reports."""
        self._writing.stop()
        self._writing.join(_CLOSE_S)
        self._file.close()


def metrics(
    loader: EpochLoader | None = None, cache: Cache | None = None, *, prefix: str = "cachestream/"
) -> dict[str, float]:
    """Counters and rates of a loader and its cache: names such as "cachestream/data_wait_share" to numbers.

    Args:
        loader: an EpochLoader; its numbers are of this rank. Its cache is included.
        cache: a cache, without a loader, or instead of the loader's.
        prefix: the beginning of every name.

    Of the loader: `epoch`, `epoch_samples` and `epoch_shards` (what the epoch is drawn from), `batches`,
    `samples` and `skipped_samples` (since the loader was made), `samples_per_s` and `data_wait_share` (of
    this epoch: 0.1 is a tenth of the time spent waiting for data), `data_wait_s`, `epoch_gap_s`, `prepare_s`,
    `reuse_factor` (samples drawn over distinct ones), `share_of_NAME` of each source of a mixture.
    Of the cache: `cache_samples`, `cache_shards`,
    `cache_bytes`, `cache_limit_bytes`, `cache_used_share`, `cache_leased_bytes`, `evicted_samples`,
    `evicted_unused_samples` (before an epoch used them), `failed_samples`, `quarantined_shards`,
    `epoch_waits` (how often a full cache waited for the next epoch), `fill_pass` and `fill_pass_done` (the
    share; not there for a source without an end). Of the running worker, zeros without one:
    `fill_samples_per_s`, `fill_bytes_per_s`, `fill_space_wait_s`, `fill_restarts`, `fill_processes`.

    A call reads the cache's catalogue: milliseconds, so every few steps rather than every step.
    Raises ConfigError without either of them, CacheError when the cache cannot be read.
    """
    if loader is None and cache is None:
        raise ConfigError("metrics(): give a loader, or cache=, to look at")
    if loader is not None and not hasattr(loader, "stats"):
        raise ConfigError(
            f"metrics({loader!r}): give an EpochLoader; a cache goes by its name, metrics(cache=…)"
        )
    found: dict[str, float] = {}
    if loader is not None:
        found |= _of_loader(loader.stats)
        cache = loader.cache if cache is None else cache
    if cache is not None:
        found |= _of_cache(cache.status())
    return {f"{prefix}{name}": value for name, value in found.items()}


def _of_loader(stats: LoaderStats) -> dict[str, float]:
    return {
        "epoch": stats.epoch,
        "epoch_samples": stats.epoch_samples,
        "epoch_shards": stats.shards,
        "batches": stats.batches,
        "samples": stats.samples,
        "skipped_samples": stats.skipped,
        "samples_per_s": stats.samples_per_s,
        "data_wait_share": stats.epoch_wait_share,
        "data_wait_s": stats.wait_s,
        "epoch_gap_s": stats.gap_s,
        "prepare_s": stats.prepare_s,
        "reuse_factor": stats.reuse_factor,
        **{f"share_of_{name}": figures.share for name, figures in stats.mixture.items()},
    }


def _of_cache(status: CacheStatus) -> dict[str, float]:
    worker = status.worker
    found: dict[str, float] = {
        "cache_samples": status.num_samples,
        "cache_shards": status.num_shards,
        "cache_bytes": status.size_bytes,
        "cache_limit_bytes": status.size_limit,
        "cache_used_share": status.size_bytes / max(1, status.size_limit),
        "cache_leased_bytes": status.leased_bytes,
        "evicted_samples": status.evicted_samples,
        "evicted_unused_samples": status.evicted_unused_samples,
        "failed_samples": status.skipped,
        "quarantined_shards": status.quarantined,
        "epoch_waits": status.epoch_waits,
        "fill_pass": status.pass_number,
        "fill_samples_per_s": 0.0 if worker is None else worker.samples_per_s,
        "fill_bytes_per_s": 0.0 if worker is None else worker.fetched_bytes_per_s,
        "fill_space_wait_s": 0.0 if worker is None else worker.totals.space_wait_s,
        "fill_restarts": 0 if worker is None else worker.restarts,
        "fill_processes": 0 if worker is None else len(worker.states),
    }
    if status.pass_done is not None:
        found["fill_pass_done"] = status.pass_done
    return found
