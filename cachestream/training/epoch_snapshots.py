"""The snapshots of epochs: one of the ranks that share a cache takes them, all lease and map them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.errors import (
    CacheError,
    CorruptShardError,
    EpochError,
    NotEnoughSamplesError,
)
from cachestream.schema import Schema, Snapshot
from cachestream.storage.leases import Lease, join_lease
from cachestream.storage.snapshots import ReusableSnapshots
from cachestream.storage.view import hash_of
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.plan import OrderRecord
from cachestream.training.rendezvous import Cancelled

if TYPE_CHECKING:
    from cachestream.schema import Split
    from cachestream.storage.cache import Cache
    from cachestream.storage.view import View
    from cachestream.training.draw import DrawContext
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.manifests import Replay
    from cachestream.training.position import Position
    from cachestream.training.ranks import Payload, Ranks
    from cachestream.training.threads import Flag


logger = logging.getLogger("cachestream")
_SLICE: Final = 16  # shards opened between two checks of the deadline and of cancellation
_ATTEMPTS: Final = 10


@dataclass(slots=True, eq=False)
class EpochSnapshot:
    """A leased snapshot with its maps.

    `record`: the recorded order that goes on over it, less the shards that are gone; None if the order is to
    be drawn. `later_batches`: the number of batches for each rank in the segments after a replayed one.
    """

    snapshot: Snapshot
    lease: Lease
    maps: EpochMaps
    record: OrderRecord | None = None
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
            "selected": hash_of(snapshot.rows),
            "record": None if self.record is None else self.record.to_state(),
            "later_batches": self.later_batches,
        }

    @classmethod
    def join(cls, payload: Payload, split: Split | None, view: View, maps: EpochMaps | None) -> EpochSnapshot:
        """The snapshot of `payload`, also leased by this process; it takes over from `maps`. Raises
        RankMismatchError if the `view` selects other samples here.
        """
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
        record = None if payload["record"] is None else OrderRecord.from_state(payload["record"])
        snapshot = view.join(snapshot, payload["selected"])  # the lease of the first rank holds its shards
        return cls(
            snapshot, join_lease(snapshot.lease), EpochMaps(snapshot, maps), record, payload["later_batches"]
        )


class EpochSnapshots:
    """The snapshots of one loader, of at least a batch for each rank if there are so many samples.

    `maps` are those of the last snapshot; the next one takes over the shards that they have mapped.
    """

    def __init__(self, cache: Cache, options: LoaderOptions) -> None:
        self.maps: EpochMaps | None = None
        self._cache = cache
        self._options = options
        self._reusable = ReusableSnapshots(cache, split=options.split, view=options.view)
        self._schema: Schema | None = None

    def take(self, context: DrawContext, opened_enough: Callable[[], bool]) -> EpochSnapshot:
        """The snapshot of this rank's group, leased by this process, with shards mapped until
        `opened_enough()`.

        The group's leader takes it, of shards that cover the samples that the epoch still takes; the others
        join its lease. Raises CacheStreamError and Cancelled.
        """
        ranks, options = context.ranks, self._options
        with ExitStack() as undo:
            if ranks.leads:
                taken = self._take(context, opened_enough)
                undo.callback(taken.lease.release)
                ranks.share(context.wanted.round, taken.to_payload())
            else:
                shared = ranks.share(context.wanted.round, None)
                taken = EpochSnapshot.join(shared, options.split, options.view, self.maps)
                undo.callback(taken.lease.release)
                for _, error in open_shards(taken.maps, opened_enough, context.wanted.cancelled):
                    raise error
            undo.pop_all()
        self._warn_of_floats(taken.snapshot.schema)
        return taken

    def _warn_of_floats(self, schema: Schema) -> None:
        """Warn of fields that hold floats from now on, and held integers in the last snapshot."""
        before, self._schema = self._schema, schema
        if before is None or before.names != schema.names:
            return
        pairs = zip(before.fields, schema.fields, strict=True)
        if changed := [field.name for old, field in pairs if old.is_read_as(field)]:
            logger.warning(
                "%s: the integers of %s are floats from the next epoch on, because a sample holds a float "
                "there; if that is a mistake, clear the cache and give int(…) in transform=",
                self._cache.path,
                " and ".join(map(repr, changed)),
            )

    def finish(self) -> None:
        """Release the last snapshot, and write the counts of its uses."""
        self._reusable.close()

    def _take(self, context: DrawContext, opened_enough: Callable[[], bool]) -> EpochSnapshot:
        """Take a snapshot of sound shards: damaged ones are quarantined, and the snapshot is taken again."""
        for _ in range(_ATTEMPTS):
            with ExitStack() as undo:
                taken = self._take_once(context)
                undo.callback(taken.lease.release)
                damaged = open_shards(taken.maps, opened_enough, context.wanted.cancelled)
                if taken.record is None:
                    for field in self._options.max_tokens or ():  # else drawing fails, in each epoch anew
                        damaged += taken.maps.lengths_of(field)[1]
                if not damaged:
                    undo.pop_all()
                    return taken
                try:
                    for place, error in damaged:
                        self._cache.quarantine(int(taken.snapshot.shard_ids[place]), str(error))
                except (
                    CacheError
                ):  # the catalogue cannot be read now: the damaged shards are skipped as they come
                    undo.pop_all()
                    return taken
        raise CorruptShardError(
            f"{self._cache.path}: new damaged shards in each of {_ATTEMPTS} snapshots; check the disk, "
            "then run 'cachestream verify CACHE --repair'"
        )

    def _take_once(self, context: DrawContext) -> EpochSnapshot:
        """Take a snapshot of the shards of a recorded epoch, of those of an interrupted one, or a new one."""
        options, position, ranks = self._options, context.position, context.ranks
        record = (position.records or {}).get(self._cache.cache_id)
        if options.replay is not None:
            return self._take_recorded(options.replay, record, position, ranks)
        if record is not None:
            # Without any of its shards, the rest of the epoch is drawn from the cached ones.
            with suppress(NotEnoughSamplesError):
                return self._restore(record)[0]
        # The epoch may have no samples left for this cache; its ranks then give no batch, as all ranks do.
        size = None if context.remaining is None else max(1, context.remaining)
        least = len(ranks.sharers) * (options.batch_size if options.drop_last else 1)
        snapshot, lease = self._reusable.take(size, options.turnover, least)
        maps = self.maps
        if maps is None or maps.snapshot is not snapshot:
            maps = EpochMaps(snapshot, maps)
        return EpochSnapshot(snapshot, lease, maps)

    def _take_recorded(
        self, replay: Replay, record: OrderRecord | None, position: Position, ranks: Ranks
    ) -> EpochSnapshot:
        """Take all shards of a recorded epoch, or of `record`, the rest of one; raises EpochError."""
        leader = ranks.group[0]
        record = record or replay.segment(self._cache, position.epoch, position.index, leader)
        taken, gone = self._restore(record)
        evicted = sum(shard_id >= 0 for shard_id in gone)
        if evicted:
            taken.lease.release()
            raise EpochError(
                f"{self._cache.path}: {evicted} shards of epoch {position.epoch} were just evicted; bring "
                "them back with 'cachestream refetch', with no worker running"
            )
        batch_size = self._options.batch_size
        later = replay.batches_after(position.epoch, position.index, leader, batch_size, len(ranks.sharers))
        return replace(taken, record=record, later_batches=later)

    def _restore(self, record: OrderRecord) -> tuple[EpochSnapshot, tuple[int, ...]]:
        """Take the cached shards of `record`; return their snapshot, and the ids that went since."""
        split, view = self._options.split, self._options.view
        record.check_selection(split, selects=view.selects)
        if record.selected is not None:
            view.check(self._cache, split, record.shard_ids, record.selected)
        snapshot, lease, gone = self._cache.restore_snapshot(record.shard_ids, record.counts, split, view)
        before = record.gone
        new = tuple(shard_id for shard_id in gone if shard_id not in before)
        return EpochSnapshot(snapshot, lease, EpochMaps(snapshot, self.maps), record.cut(0, new)), new


def open_shards(
    maps: EpochMaps, opened_enough: Callable[[], bool], cancelled: Flag
) -> list[tuple[int, CorruptShardError]]:
    """Map and verify shards until `opened_enough()`; return the damaged ones. Raises Cancelled."""
    damaged: list[tuple[int, CorruptShardError]] = []
    missing = np.flatnonzero(~maps.mapped)
    for start in range(0, len(missing), _SLICE):
        if cancelled.is_set:
            raise Cancelled
        damaged += maps.open(missing[start : start + _SLICE])
        if opened_enough():
            break
    return damaged
