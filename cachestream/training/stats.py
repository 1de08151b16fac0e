"""Statistics of a loader: samples delivered, time waited, reuse of samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cachestream.schema import IntArray, Snapshot


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


class Reuse:
    """The numbers of samples and of distinct samples drawn, in O(shards) memory.

    It keeps a share of each shard and not the samples, so the number of distinct ones is the expected one if
    an epoch draws a part of a snapshot.
    """

    def __init__(self) -> None:
        self._ids: IntArray = np.empty(0, np.int64)
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
class _EpochTotals:
    """Counters of one epoch, which began at `began_s`: the batches delivered, and the distinct shards of the
    snapshots that its passes are drawn from.
    """

    began_s: float = 0.0
    samples: int = 0
    batches: int = 0
    wait_s: float = 0.0
    shard_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    shard_samples: int = 0

    def add(self, snapshot: Snapshot) -> None:
        new = np.isin(snapshot.shard_ids, self.shard_ids, invert=True, assume_unique=True)
        self.shard_ids = np.concatenate([self.shard_ids, snapshot.shard_ids[new]])
        self.shard_samples += int(snapshot.counts[new].sum())


class Meter:
    """Counters and times of the training thread. Used by that thread alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.samples = 0
        self.batches = 0
        self.skipped = 0
        self.wait_s = 0.0
        self.gap_s = 0.0
        self.last_s = 0.0
        self._began_s: float | None = None
        self._epoch = _EpochTotals()
        self._pending_gap_s = 0.0
        self._reuse = Reuse()

    def begin_epoch(self) -> None:
        now = self.clock()
        self._began_s = now if self._began_s is None else self._began_s
        self.last_s = now
        self._epoch = _EpochTotals(now)

    def enter_snapshot(self, snapshot: Snapshot) -> None:
        """Begin a pass of the epoch over `snapshot`."""
        self._epoch.add(snapshot)

    def add_gap(self, seconds: float) -> None:
        """Add `seconds` spent in the loader between two epochs."""
        self._pending_gap_s += seconds

    def add_batch(self, samples: int, skipped: int, wait_s: float) -> None:
        """Add a batch of `samples`, delivered after a wait of `wait_s`."""
        epoch = self._epoch
        if not epoch.batches:
            self.gap_s, self._pending_gap_s = self._pending_gap_s + wait_s, 0.0
        self.samples += samples
        epoch.samples += samples
        self.skipped += skipped
        self.batches += 1
        epoch.batches += 1
        self.wait_s += wait_s
        epoch.wait_s += wait_s
        self.last_s = self.clock()

    def add_drawn(self, snapshot: Snapshot, share: float) -> None:
        """Add a draw of the `share` of `snapshot`."""
        self._reuse.add(snapshot, share)

    def stats(self, epoch: int, prepare_s: float) -> LoaderStats:
        """The statistics of a loader in `epoch`."""
        totals = self._epoch
        passed_s = 0.0 if self._began_s is None else self.last_s - self._began_s
        epoch_s = self.last_s - totals.began_s
        return LoaderStats(
            epoch=epoch,
            epoch_samples=totals.shard_samples,
            shards=len(totals.shard_ids),
            samples=self.samples,
            batches=self.batches,
            skipped=self.skipped,
            wait_s=self.wait_s,
            wait_share=min(1.0, self.wait_s / passed_s) if passed_s > 0 else 0.0,
            epoch_wait_share=min(1.0, totals.wait_s / epoch_s) if epoch_s > 0 else 0.0,
            gap_s=self.gap_s,
            samples_per_s=totals.samples / epoch_s if totals.samples and epoch_s > 0 else 0.0,
            reuse_factor=self._reuse.factor,
            prepare_s=prepare_s,
        )
