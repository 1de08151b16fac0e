"""Getting hold of an epoch's shards: the group's leader takes and leases a snapshot of them, the others join."""

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
from cachestream.model import Schema, Snapshot
from cachestream.split import Split
from cachestream.storage.leases import Lease, join_lease
from cachestream.storage.standing import Standing
from cachestream.training.epoch import Request
from cachestream.training.maps import EpochMaps
from cachestream.training.ranks import Cancelled, Payload, Ranks
from cachestream.training.replay import Replay, Rest
from cachestream.training.resume import Record

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

__all__ = ["Held", "Holder", "Watch"]

logger = logging.getLogger("cachestream")
_SLICE: Final = 16  # shards opened between two looks at the clock, and at whether it is still wanted
_RETAKES: Final = 10


@dataclass(slots=True, eq=False)
class Held:
    """A leased snapshot; `gone` names the shards of a record that it lacks, None when it is not of the record.

    `replayed` is the recorded order that it was taken for, and `rest` what comes after that in the epoch.
    """

    snapshot: Snapshot
    lease: Lease
    maps: EpochMaps
    gone: tuple[int, ...] | None
    replayed: Record | None = None
    rest: Rest | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """When to stop opening shards ahead, and whether the whole preparation is still wanted."""

    until_s: float
    cancelled: Callable[[], bool]

    def check(self) -> None:
        if self.cancelled():
            raise Cancelled

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until_s


class Holder:
    """Takes the snapshots of one loader, of `least` samples or more for each rank as far as there are so many; `maps` are the
    last ones, whose open shards the next ones take over. Where no other snapshot can be taken, the last one is given again.
    """

    def __init__(
        self,
        cache: Cache,
        turnover: float,
        least: int,
        replay: Replay | None = None,
        split: Split | None = None,
    ) -> None:
        self.maps: EpochMaps | None = None
        self._cache = cache
        self._split = split
        self._standing = Standing(cache, split=split)
        self._turnover = turnover
        self._least = least
        self._replay = replay
        self._last: tuple[Snapshot, Lease] | None = None
        self._is_told = False  # why it was taken again

    def hold(self, ranks: Ranks, request: Request, epoch_size: int | None, watch: Watch) -> Held:
        """The snapshot of this rank's group, leased by this process, with what is mapped of it so far.

        The group's leader takes it, of shards that cover `epoch_size` samples; the others join its lease.
        Raises CacheStreamError and Cancelled.
        """
        led: list[Held] = []

        def lead() -> Payload:
            led.append(self._take(request, epoch_size, ranks.group, watch))
            return _to_payload(led[0])

        try:
            shared = ranks.share(request.name, lead, watch.cancelled)
            if led:
                return led[0]
            snapshot = _from_payload(shared, self._split)
            lease = join_lease(snapshot.lease)
            gone = None if shared["gone"] is None else tuple(shared["gone"])
            replayed, rest = _replayed_from(shared)
            led.append(Held(snapshot, lease, EpochMaps(snapshot, self.maps), gone, replayed, rest))
            damaged = self._open(led[0].maps, watch)
            if damaged:
                raise damaged[0][1]
        except BaseException:
            for held in led:
                held.lease.release()
            raise
        return led[0]

    def finish(self) -> None:
        """Hold nothing for the next snapshot, and count how often the last one was used."""
        self._let_go()
        self._standing.close()

    def _take(self, request: Request, epoch_size: int | None, group: Sequence[int], watch: Watch) -> Held:
        """A snapshot of sound shards: damaged ones are put aside, and it is taken again."""
        for _ in range(_RETAKES):
            if self._replay is not None:
                held = self._take_recorded(self._replay, request, group[0])
            else:
                held = self._take_once(request, epoch_size, self._least * len(group))
            try:
                damaged = self._open(held.maps, watch)
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

    def _take_once(self, request: Request, epoch_size: int | None, least: int) -> Held:
        record = (request.records or {}).get(self._cache.cache_id)
        if record is not None:
            try:
                snapshot, lease, gone = self._cache.retake_snapshot(
                    record.shard_ids, record.counts, split=self._split
                )
                new = tuple(shard_id for shard_id in gone if shard_id not in record.gone)
                return Held(snapshot, lease, EpochMaps(snapshot, self.maps), new)
            except NotEnoughSamplesError:
                pass  # all of them are gone: what is left of the epoch is drawn from what there is
        # Of an epoch that ends with this resume nothing may be left for this cache: its ranks give no batch, as all.
        size = None if epoch_size is None else max(1, epoch_size)
        try:
            snapshot, lease = self._standing.take(size, self._turnover, least)
        except (SchemaMismatchError, CacheVersionError):
            raise
        except CacheError as error:  # the disk is full, or fails, or the catalogue is locked
            snapshot, lease = self._last_again(error)
        else:
            self._keep(snapshot, lease)
        return Held(snapshot, lease, self._maps_of(snapshot), None)

    def _keep(self, snapshot: Snapshot, lease: Lease) -> None:
        """Hold the last snapshot, too, until there is another one."""
        self._let_go()
        mine = lease.again()
        self._last = None if mine is None else (snapshot, mine)
        self._is_told = False

    def _let_go(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last[1].release()

    def _last_again(self, error: CacheError) -> tuple[Snapshot, Lease]:
        """The last snapshot once more: training goes on from it while none can be taken. Raises `error` where there is none."""
        lease = None if self._last is None else self._last[1].again()
        if self._last is None or lease is None:
            raise error
        if not self._is_told:
            logger.warning(
                "%s: no new snapshot can be taken (%s); until one can, epochs are drawn from the last one",
                *(self._cache.path, str(error)),  # not the error, whose frames hold maps
            )
            self._is_told = True
        return self._last[0], lease

    def _maps_of(self, snapshot: Snapshot) -> EpochMaps:
        # Of a snapshot that was given out again nothing is left to open, and so nothing to drop.
        if self.maps is not None and self.maps.snapshot is snapshot and self.maps.all_mapped:
            return self.maps
        return EpochMaps(snapshot, self.maps)

    def _take_recorded(self, replay: Replay, request: Request, leader: int) -> Held:
        """The shards of a recorded epoch: all that are needed, or an error."""
        given = (request.records or {}).get(self._cache.cache_id)
        record = given or replay.stretch(self._cache, request.epoch, request.index, leader)
        record.check_split(self._split)
        snapshot, lease, gone = self._cache.retake_snapshot(
            record.shard_ids, record.counts, split=self._split
        )
        if set(gone) - record.gone - {shard_id for shard_id in gone if shard_id < 0}:
            lease.release()
            raise EpochError(
                f"{self._cache.path}: {len(gone)} shards of epoch {request.epoch} were just evicted; bring them back "
                "with 'cachestream refetch', with no worker running"
            )
        rest = replay.rest(request.epoch, request.index, leader)
        return Held(snapshot, lease, EpochMaps(snapshot, self.maps), (), record, rest)

    def _open(self, maps: EpochMaps, watch: Watch) -> list[tuple[int, CorruptShardError]]:
        """Map and verify shards until the time is up; returns the damaged ones."""
        damaged: list[tuple[int, CorruptShardError]] = []
        missing = np.flatnonzero(~maps.mapped)[: max(0, maps.max_open - maps.num_mapped)]
        for start in range(0, len(missing), _SLICE):
            watch.check()
            damaged += maps.open(missing[start : start + _SLICE], ahead=True)
            if watch.over:
                break
        return damaged


def _to_payload(held: Held) -> Payload:
    snapshot = held.snapshot
    return {
        "cache_id": snapshot.cache_id,
        "root": snapshot.root,
        "lease": snapshot.lease,
        "schema": snapshot.schema.to_json(),
        "shards": snapshot.shard_ids.tolist(),
        "counts": snapshot.counts.tolist(),
        "sizes": None if snapshot.sizes is None else snapshot.sizes.tolist(),
        "gone": held.gone,
        "replayed": None if held.replayed is None else held.replayed.to_state(),
        "rest": None if held.rest is None else held.rest.stretches,
    }


def _replayed_from(payload: Payload) -> tuple[Record | None, Rest | None]:
    if payload["replayed"] is None:
        return None, None
    return Record.from_state(payload["replayed"]), Rest(tuple((a, b) for a, b in payload["rest"]))


def _from_payload(payload: Payload, split: Split | None) -> Snapshot:
    return Snapshot(
        payload["cache_id"],
        payload["root"],
        payload["lease"],
        Schema.from_json(payload["schema"]),
        np.array(payload["shards"], np.int64),
        np.array(payload["counts"], np.int64),
        split=split,
        sizes=None if payload["sizes"] is None else np.array(payload["sizes"], np.int64),
    )
