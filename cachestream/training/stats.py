"""Statistics of a loader: samples delivered, time waited, reuse; and its reports to other processes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.repr_html import table
from cachestream.schema import IntArray, Snapshot
from cachestream.storage.telemetry import EPOCHS_REPORTED, LoaderFile, LoaderReport

if TYPE_CHECKING:
    from cachestream.storage.layout import Directory
    from cachestream.training.prepare import Preparer

_REPORT_S: Final = 0.25  # between two reports, at least
_NONE: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Statistics of an `EpochLoader`. Counts are of this rank, except `epoch_samples` and `reuse_factor`.

    `samples`, `batches`, `skipped` (samples of damaged shards) and `wait_s` (time the trainer waited for
    data) are since the loader was made. `wait_share`: the share of waiting in the time since the first
    iteration; `epoch_wait_share`: the share in this epoch. `gap_s`: the time spent in the loader between the
    last batch of the previous epoch and the first of this one. `samples_per_s`: the rate of this epoch,
    training included. `epoch_samples`: the samples that the passes of the epoch so far were drawn from, in
    `shards` shards. `reuse_factor`: samples drawn over (expected) distinct samples drawn, so far.
    `prepare_s`: the duration of the last preparation.
    """

    epoch: int
    epoch_samples: int
    shards: int
    samples: int
    batches: int
    skipped: int
    wait_s: float
    wait_share: float
    epoch_wait_share: float
    gap_s: float
    samples_per_s: float
    reuse_factor: float
    prepare_s: float

    def _repr_html_(self) -> str:
        rows = {
            "drawn from": f"{self.epoch_samples} samples in {self.shards} shards",
            "delivered": f"{self.samples} samples in {self.batches} batches",
            "skipped": self.skipped,
            "rate": f"{self.samples_per_s:.0f} samples/s",
            "waiting": f"{self.wait_share:.1%}, in this epoch {self.epoch_wait_share:.1%}",
            "reuse": f"{self.reuse_factor:.2f} times",
        }
        return table(f"Loader, epoch {self.epoch}", rows)


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
        ids = np.union1d(self._ids, snapshot.shard_ids)
        unseen = np.ones(len(ids))
        unseen[np.searchsorted(ids, self._ids)] = self._unseen
        drawn = np.searchsorted(ids, snapshot.shard_ids)
        first_seen = unseen[drawn] * min(share, 1.0)
        unseen[drawn] -= first_seen
        self._drawn += share * snapshot.num_samples
        self._distinct += float((first_seen * snapshot.counts).sum())
        self._ids, self._unseen = ids, unseen

    @property
    def factor(self) -> float:
        return self._drawn / self._distinct if self._distinct else 1.0


@dataclass(slots=True)
class _Counts:
    """The batches and samples delivered in some time, and the seconds of waiting for them."""

    samples: int = 0
    batches: int = 0
    skipped: int = 0
    wait_s: float = 0.0

    def __add__(self, other: _Counts) -> _Counts:
        return _Counts(
            self.samples + other.samples,
            self.batches + other.batches,
            self.skipped + other.skipped,
            self.wait_s + other.wait_s,
        )


class Reporter:
    """The reports of a loader to other processes. Used by the training thread alone."""

    def __init__(self, directory: Directory, preparer: Preparer) -> None:
        self._file = LoaderFile(directory)
        self._preparer = preparer
        self._epochs: deque[tuple[int, int, float]] = deque(maxlen=EPOCHS_REPORTED)

    def note_epoch(self, stats: LoaderStats, began_s: float) -> None:
        """Note the samples so far of an epoch that began at `began_s`, in seconds since 1970."""
        if not stats.epoch_samples:
            return
        if self._epochs and self._epochs[-1][0] == stats.epoch:
            self._epochs.pop()
        self._epochs.append((stats.epoch, stats.epoch_samples, began_s))

    def report(self, stats: LoaderStats, began_s: float) -> None:
        """Write the numbers of the running epoch, which began at `began_s`."""
        self.note_epoch(stats, began_s)
        numbers, ranks = asdict(stats), self._preparer.ranks
        del numbers["shards"], numbers["prepare_s"]
        epochs = tuple(self._epochs)
        self._file.write(
            LoaderReport(os.getpid(), ranks.rank, ranks.size, time.time(), epochs=epochs, **numbers)
        )

    def close(self) -> None:
        self._file.close()


class Meter:
    """Counters and times of the training thread. Used by that thread alone."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, reporter: Reporter | None = None
    ) -> None:
        self.clock = clock
        self._reporter = reporter
        self._report_at_s = 0.0
        self._number = 0  # of the running epoch
        self._began_at_s = 0.0  # the time since 1970 at its beginning
        self.last_s = 0.0  # the time of the last batch, or of the beginning of its epoch
        self._began_s: float | None = None
        self._epoch_began_s = 0.0
        self._before = _Counts()  # of the epochs before this one
        self._epoch = _Counts()
        self._gap_s = self._pending_gap_s = 0.0
        self._shard_ids: IntArray = _NONE  # that the epoch is drawn from
        self._epoch_samples = 0  # in these shards
        self.reuse = Reuse()

    def begin_epoch(self, number: int) -> None:
        """Begin epoch `number`."""
        if self._reporter is not None:
            self._reporter.note_epoch(self.stats(self._number, 0.0), self._began_at_s)
        self._number, self._began_at_s = number, time.time()
        self.last_s = self._epoch_began_s = self.clock()
        if self._began_s is None:
            self._began_s = self.last_s
        self._before, self._epoch = self._before + self._epoch, _Counts()
        self._shard_ids, self._epoch_samples = _NONE, 0

    def enter_snapshot(self, snapshot: Snapshot) -> None:
        """Begin a pass of the epoch over `snapshot`."""
        new = np.isin(snapshot.shard_ids, self._shard_ids, invert=True, assume_unique=True)
        self._shard_ids = np.concatenate([self._shard_ids, snapshot.shard_ids[new]])
        self._epoch_samples += int(snapshot.counts[new].sum())

    def add_gap(self, seconds: float) -> None:
        """Add `seconds` spent in the loader between two epochs."""
        self._pending_gap_s += seconds

    def add_batch(self, samples: int, skipped: int, wait_s: float) -> None:
        """Add a batch of `samples`, delivered after a wait of `wait_s`."""
        epoch = self._epoch
        if not epoch.batches:
            self._gap_s, self._pending_gap_s = self._pending_gap_s + wait_s, 0.0
        epoch.samples += samples
        epoch.skipped += skipped
        epoch.batches += 1
        epoch.wait_s += wait_s
        self.last_s = self.clock()
        if self.last_s >= self._report_at_s and self._reporter is not None:
            self._report_at_s = self.last_s + _REPORT_S
            self._reporter.report(self.stats(self._number, 0.0), self._began_at_s)

    def stats(self, epoch: int, prepare_s: float) -> LoaderStats:
        """The statistics of a loader in `epoch`."""
        counts, here = self._before + self._epoch, self._epoch
        passed_s = 0.0 if self._began_s is None else self.last_s - self._began_s
        epoch_s = self.last_s - self._epoch_began_s
        return LoaderStats(
            epoch=epoch,
            epoch_samples=self._epoch_samples,
            shards=len(self._shard_ids),
            samples=counts.samples,
            batches=counts.batches,
            skipped=counts.skipped,
            wait_s=counts.wait_s,
            wait_share=min(1.0, counts.wait_s / passed_s) if passed_s > 0 else 0.0,
            epoch_wait_share=min(1.0, here.wait_s / epoch_s) if epoch_s > 0 else 0.0,
            gap_s=self._gap_s,
            samples_per_s=here.samples / epoch_s if here.samples and epoch_s > 0 else 0.0,
            reuse_factor=self.reuse.factor,
            prepare_s=prepare_s,
        )
