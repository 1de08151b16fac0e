"""Statistics of the training side: samples delivered, time waited, how often samples were reused."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachestream.schema import IntArray, Snapshot

_PENDING: Final = 16


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """A look at an `EpochLoader`. Counts are of this rank, but for `epoch_samples` and `reuse_factor`.

    `samples`, `batches`, `skipped` (samples of damaged shards) and `wait_s` (time the trainer waited for data)
    are since the loader was made; `wait_share` is the share of the time since the first batch was asked for,
    `epoch_wait_share` that of this epoch. `gap_s` is what the loader took between the last batch of the epoch
    before and the first of this one, `samples_per_s` this epoch's rate, training included. `epoch_samples` is what
    the epoch is drawn from, in `shards` shards; an epoch of several passes, from what any pass so far was drawn
    from. `reuse_factor` is samples drawn over (expected) distinct samples drawn, so far.
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
    """Counts how many samples were drawn, and how many different ones: by shard, so in O(shards) memory.

    Where an epoch draws a part of a snapshot, which samples of a shard it were is not kept: the number of
    different ones is then the expected one.
    """

    def __init__(self) -> None:
        self._ids: IntArray = np.empty(0, np.int64)
        self._unseen = np.empty(0)  # for each shard the share of its samples that was never drawn
        self._pending: list[tuple[Snapshot, float]] = []
        self._drawn = 0.0
        self._distinct = 0.0

    def add(self, snapshot: Snapshot, share: float) -> None:
        """The `share` of `snapshot` (above 1 where samples come several times) was drawn."""
        if share > 0:
            self._pending.append((snapshot, share))
        if len(self._pending) > _PENDING:
            self._count()

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        for snapshot, share in pending:
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
        self._count()
        return self._drawn / self._distinct if self._distinct else 1.0


class _Drawn:
    """The shards of the snapshots that an epoch's passes are drawn from, each of them once."""

    def __init__(self) -> None:
        self._ids: IntArray = np.empty(0, np.int64)
        self.shards = 0
        self.samples = 0

    def add(self, snapshot: Snapshot) -> None:
        new = np.isin(snapshot.shard_ids, self._ids, invert=True, assume_unique=True)
        self._ids = np.concatenate([self._ids, snapshot.shard_ids[new]])
        self.shards += int(new.sum())
        self.samples += int(snapshot.counts[new].sum())


class Meter:
    """Adds up what the training thread sees. Used by that thread alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.samples = 0
        self.batches = 0
        self.skipped = 0
        self.wait_s = 0.0
        self.gap_s = 0.0
        self._began_s: float | None = None
        self._epoch_began_s = 0.0
        self.last_s = 0.0
        self._epoch_samples = 0
        self._epoch_wait_s = 0.0
        self._epoch_drawn = _Drawn()
        self._pending_gap_s = 0.0
        self._first = True
        self._reuse = Reuse()

    def begin_epoch(self) -> None:
        now = self.clock()
        self._began_s = now if self._began_s is None else self._began_s
        self._epoch_began_s = self.last_s = now
        self._epoch_samples = 0
        self._epoch_wait_s = 0.0
        self._epoch_drawn = _Drawn()
        self._first = True

    def enter_snapshot(self, snapshot: Snapshot) -> None:
        """The epoch's next pass is drawn from `snapshot`."""
        self._epoch_drawn.add(snapshot)

    def add_gap(self, seconds: float) -> None:
        """The loader spent `seconds` between two epochs, outside of a batch."""
        self._pending_gap_s += seconds

    def add_batch(self, samples: int, skipped: int, wait_s: float) -> None:
        """A batch was handed over after `wait_s`."""
        if self._first:
            self.gap_s, self._pending_gap_s, self._first = self._pending_gap_s + wait_s, 0.0, False
        self.samples += samples
        self._epoch_samples += samples
        self.skipped += skipped
        self.batches += 1
        self.wait_s += wait_s
        self._epoch_wait_s += wait_s
        self.last_s = self.clock()

    def add_drawn(self, snapshot: Snapshot, share: float) -> None:
        """The `share` of `snapshot` has been drawn."""
        self._reuse.add(snapshot, share)

    def stats(self, epoch: int, prepare_s: float) -> LoaderStats:
        """All of it, for a loader in `epoch`."""
        passed_s = 0.0 if self._began_s is None else self.last_s - self._began_s
        epoch_s = self.last_s - self._epoch_began_s
        return LoaderStats(
            epoch=epoch,
            epoch_samples=self._epoch_drawn.samples,
            shards=self._epoch_drawn.shards,
            samples=self.samples,
            batches=self.batches,
            skipped=self.skipped,
            wait_s=self.wait_s,
            wait_share=min(1.0, self.wait_s / passed_s) if passed_s > 0 else 0.0,
            epoch_wait_share=min(1.0, self._epoch_wait_s / epoch_s) if epoch_s > 0 else 0.0,
            gap_s=self.gap_s,
            samples_per_s=self._epoch_samples / epoch_s if self._epoch_samples and epoch_s > 0 else 0.0,
            reuse_factor=self._reuse.factor,
            prepare_s=prepare_s,
        )
