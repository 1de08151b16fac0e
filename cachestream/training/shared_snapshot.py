"""The snapshots of a loader: taken by the first of the ranks that share a cache, leased and mapped by all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.errors import (
    CacheError,
    CacheVersionError,
    CorruptShardError,
    EpochError,
    NotEnoughSamplesError,
    SchemaMismatchError,
)
from cachestream.schema import Schema, Snapshot
from cachestream.storage.leases import Lease, join_lease
from cachestream.storage.snapshots import StandingSnapshots
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.checkpoint import SegmentRecord
from cachestream.training.rendezvous import Cancelled

if TYPE_CHECKING:
    from cachestream.schema import Split
    from cachestream.storage.cache import Cache
    from cachestream.training.epoch_settings import EpochSettings
    from cachestream.training.manifests import Replay
    from cachestream.training.ranks import Payload, Ranks
    from cachestream.training.segment import Request


logger = logging.getLogger("cachestream")
_SLICE: Final = 16  # shards opened between two checks of the deadline and of cancellation
_RETAKES: Final = 10


@dataclass(slots=True, eq=False)
class HeldSnapshot:
    """A leased snapshot with its maps.

    `record`: the recorded order that goes on over it, less the shards that are gone; None if the order is to
    be drawn. `later_batches`: the number of batches for each rank in what follows a replayed segment.
    """

    snapshot: Snapshot
    lease: Lease
    maps: EpochMaps
    record: SegmentRecord | None = None
    later_batches: int = 0

    def to_payload(self) -> Payload:
        snapshot = self.snapshot
        return {
            "cache_id": snapshot.cache_id,
            "root": snapshot.root,
            "lease": snapshot.lease,
            "schema": snapshot.schema.to_json(),
            "shards": snapshot.shard_ids.tolist(),
            "counts": snapshot.counts.tolist(),
            "sizes": None if snapshot.sizes is None else snapshot.sizes.tolist(),
            "record": None if self.record is None else self.record.to_state(),
            "later_batches": self.later_batches,
        }

    @classmethod
    def join(cls, payload: Payload, split: Split | None, maps: EpochMaps | None) -> HeldSnapshot:
        """The snapshot of `payload`, also leased by this process; it takes over from `maps`."""
        snapshot = Snapshot(
            payload["cache_id"],
            payload["root"],
            payload["lease"],
            Schema.from_json(payload["schema"]),
            np.array(payload["shards"], np.int64),
            np.array(payload["counts"], np.int64),
            split=split,
            sizes=None if payload["sizes"] is None else np.array(payload["sizes"], np.int64),
        )
        record = None if payload["record"] is None else SegmentRecord.from_state(payload["record"])
        lease = join_lease(snapshot.lease)
        return cls(snapshot, lease, EpochMaps(snapshot, maps), record, payload["later_batches"])


class SnapshotHolder:
    """The snapshots of one loader, of at least a batch for each rank if there are so many samples.

    `maps` are those of the last snapshot; the next one takes over the shards that they have mapped. If no new
    snapshot can be taken, the last one is used again.
    """

    def __init__(self, cache: Cache, settings: EpochSettings) -> None:
        self.maps: EpochMaps | None = None
        self._cache = cache
        self._settings = settings
        self._standing = StandingSnapshots(cache, split=settings.split)
        self._last: tuple[Snapshot, Lease] | None = None
        self._warned = False  # that the last snapshot is used again

    def hold(
        self,
        ranks: Ranks,
        name: str,
        request: Request,
        epoch_size: int | None,
        until_s: float,
        cancelled: Callable[[], bool],
    ) -> HeldSnapshot:
        """The snapshot of this rank's group in round `name`, leased by this process, with its shards mapped
        until the time `until_s`.

        The group's leader takes it, of shards that cover `epoch_size` samples; the others join its lease.
        Raises CacheStreamError and Cancelled.
        """
        taken: list[HeldSnapshot] = []

        def lead() -> Payload:
            taken.append(self._take(request, epoch_size, ranks.group, until_s, cancelled))
            return taken[0].to_payload()

        try:
            shared = ranks.share(name, lead, cancelled)
            if not taken:
                taken.append(HeldSnapshot.join(shared, self._settings.split, self.maps))
                for _, error in _open(taken[0].maps, until_s, cancelled):
                    raise error
        except BaseException:
            for held in taken:
                held.lease.release()
            raise
        return taken[0]

    def finish(self) -> None:
        """Release the last snapshot, and write the counts of its uses."""
        self._keep(None)
        self._standing.close()

    def _take(
        self,
        request: Request,
        epoch_size: int | None,
        group: Sequence[int],
        until_s: float,
        cancelled: Callable[[], bool],
    ) -> HeldSnapshot:
        """Take a snapshot of sound shards: damaged ones are quarantined, and the snapshot is taken again."""
        for _ in range(_RETAKES):
            if self._settings.replay is not None:
                held = self._take_recorded(self._settings.replay, request, group)
            else:
                held = self._take_once(request, epoch_size, len(group))
            try:
                damaged = _open(held.maps, until_s, cancelled)
            except BaseException:
                held.lease.release()
                raise
            if not damaged:
                return held
            held.lease.release()
            for place, error in damaged:
                self._cache.quarantine(int(held.snapshot.shard_ids[place]), str(error))
        raise CorruptShardError(
            f"{self._cache.path}: new damaged shards in each of {_RETAKES} snapshots; check the disk, "
            "then run 'cachestream verify CACHE --repair'"
        )

    def _take_once(self, request: Request, epoch_size: int | None, num_ranks: int) -> HeldSnapshot:
        settings = self._settings
        record = (request.records or {}).get(self._cache.cache_id)
        if record is not None:
            try:
                snapshot, lease, gone = self._cache.retake_snapshot(
                    record.shard_ids, record.counts, split=settings.split
                )
                before = record.gone
                new = tuple(shard_id for shard_id in gone if shard_id not in before)
                return HeldSnapshot(snapshot, lease, EpochMaps(snapshot, self.maps), record.cut(0, new))
            except NotEnoughSamplesError:
                pass  # all of its shards are gone: the rest of the epoch is drawn from the cached ones
        # The epoch may have no samples left for this cache; its ranks then give no batch, as all ranks do.
        size = None if epoch_size is None else max(1, epoch_size)
        least = num_ranks * (settings.batch_size if settings.drop_last else 1)
        try:
            snapshot, lease = self._standing.take(size, settings.turnover, least)
        except (SchemaMismatchError, CacheVersionError):
            raise
        except CacheError as error:  # the disk is full, or fails, or the catalogue is locked
            snapshot, lease = self._reuse_last(error)
        else:
            mine = lease.again()  # another lease, until the next snapshot is taken
            self._keep(None if mine is None else (snapshot, mine))
        maps = self.maps
        # The maps of a snapshot that is used again are complete, so that none is ever opened or dropped.
        if maps is None or maps.snapshot is not snapshot or not maps.all_mapped:
            maps = EpochMaps(snapshot, maps)
        return HeldSnapshot(snapshot, lease, maps)

    def _keep(self, last: tuple[Snapshot, Lease] | None) -> None:
        before, self._last, self._warned = self._last, last, False
        if before is not None:
            before[1].release()

    def _reuse_last(self, error: CacheError) -> tuple[Snapshot, Lease]:
        """Return the last snapshot and another lease on it. Raises `error` if there is none."""
        lease = None if self._last is None else self._last[1].again()
        if self._last is None or lease is None:
            raise error
        if not self._warned:
            logger.warning(
                "%s: no new snapshot can be taken (%s); until one can, epochs are drawn from the last one",
                *(self._cache.path, str(error)),  # not the error, whose frames hold maps
            )
            self._warned = True
        return self._last[0], lease

    def _take_recorded(self, replay: Replay, request: Request, group: Sequence[int]) -> HeldSnapshot:
        """Take a snapshot of the shards of a recorded epoch. Raises EpochError if one is missing."""
        settings, leader = self._settings, group[0]
        given = (request.records or {}).get(self._cache.cache_id)
        record = given or replay.stretch(self._cache, request.epoch, request.index, leader)
        record.check_split(settings.split)
        snapshot, lease, gone = self._cache.retake_snapshot(
            record.shard_ids, record.counts, split=settings.split
        )
        before = record.gone
        if any(shard_id >= 0 and shard_id not in before for shard_id in gone):
            lease.release()
            raise EpochError(
                f"{self._cache.path}: {len(gone)} shards of epoch {request.epoch} were just evicted; bring them back "
                "with 'cachestream refetch', with no worker running"
            )
        later = replay.batches_after(request.epoch, request.index, leader, settings.batch_size, len(group))
        return HeldSnapshot(snapshot, lease, EpochMaps(snapshot, self.maps), record, later)


def _open(
    maps: EpochMaps, until_s: float, cancelled: Callable[[], bool]
) -> list[tuple[int, CorruptShardError]]:
    """Map and verify shards until the time `until_s`; return the damaged ones. Raises Cancelled."""
    damaged: list[tuple[int, CorruptShardError]] = []
    missing = np.flatnonzero(~maps.mapped)[: max(0, maps.max_open - maps.num_mapped)]
    for start in range(0, len(missing), _SLICE):
        if cancelled():
            raise Cancelled
        damaged += maps.open(missing[start : start + _SLICE], ahead=True)
        if time.monotonic() > until_s:
            break
    return damaged
