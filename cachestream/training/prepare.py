"""The preparation of segments: a snapshot that all ranks agree on, its maps, its order, its plan."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from cachestream.errors import (
    CacheError,
    CacheStreamError,
    CacheVersionError,
    ConfigError,
    CorruptShardError,
    EpochError,
    NotEnoughSamplesError,
    RankMismatchError,
    SchemaMismatchError,
)
from cachestream.permutation import mix_key
from cachestream.schema import IntArray, Schema, Snapshot, Split
from cachestream.storage.leases import Lease, join_lease
from cachestream.storage.snapshots import StandingSnapshots, any_cached
from cachestream.storage.status import warn_of_loss, warn_of_skipped
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.checkpoint import SegmentRecord, rebuild, translate
from cachestream.training.cold_start import ColdStart
from cachestream.training.dataset import EpochDataset
from cachestream.training.drawing import draw_order, exchange_updates, rounds_of
from cachestream.training.epoch_record import Replay, Rest
from cachestream.training.loader_options import EpochSettings
from cachestream.training.plan import Plan, count_batches
from cachestream.training.ranks import Payload, Ranks
from cachestream.training.rendezvous import Cancelled, ProcessGroup
from cachestream.training.segment import Request, Segment

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache


logger = logging.getLogger("cachestream")
_SLICE: Final = 16  # shards opened between two checks of the deadline and of cancellation
_RETAKES: Final = 10


@dataclass(slots=True, eq=False)
class HeldSnapshot:
    """A leased snapshot. `gone`: the shards of the resumed record that are not cached any more; None for a
    snapshot that resumes no record.

    `replayed`: the recorded order that it was taken for; `rest`: the later stretches of that epoch.
    """

    snapshot: Snapshot
    lease: Lease
    maps: EpochMaps
    gone: tuple[int, ...] | None
    replayed: SegmentRecord | None = None
    rest: Rest | None = None


@dataclass(frozen=True, slots=True)
class OpeningDeadline:
    """The time to stop opening shards ahead, and the cancellation of the whole preparation."""

    until_s: float
    cancelled: Callable[[], bool]

    def check(self) -> None:
        if self.cancelled():
            raise Cancelled

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until_s


class SnapshotHolder:
    """The snapshots of one loader, of at least `least` samples for each rank if there are so many.

    `maps` are those of the last snapshot; the next one takes over the shards that they have mapped. If no new
    snapshot can be taken, the last one is used again.
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
        self._standing = StandingSnapshots(cache, split=split)
        self._turnover = turnover
        self._least = least
        self._replay = replay
        self._last: tuple[Snapshot, Lease] | None = None
        self._warned = False  # that the last snapshot is used again

    def hold(
        self, ranks: Ranks, request: Request, epoch_size: int | None, deadline: OpeningDeadline
    ) -> HeldSnapshot:
        """The snapshot of this rank's group, leased by this process, with its shards mapped until `deadline`.

        The group's leader takes it, of shards that cover `epoch_size` samples; the others join its lease.
        Raises CacheStreamError and Cancelled.
        """
        taken: list[HeldSnapshot] = []

        def lead() -> Payload:
            taken.append(self._take(request, epoch_size, ranks.group, deadline))
            return _to_payload(taken[0])

        try:
            shared = ranks.share(request.name, lead, deadline.cancelled)
            if taken:
                return taken[0]
            snapshot = _from_payload(shared, self._split)
            lease = join_lease(snapshot.lease)
            gone = None if shared["gone"] is None else tuple(shared["gone"])
            replayed, rest = _replayed_from(shared)
            taken.append(HeldSnapshot(snapshot, lease, EpochMaps(snapshot, self.maps), gone, replayed, rest))
            damaged = self._open(taken[0].maps, deadline)
            if damaged:
                raise damaged[0][1]
        except BaseException:
            for held in taken:
                held.lease.release()
            raise
        return taken[0]

    def finish(self) -> None:
        """Release the last snapshot, and write the counts of its uses."""
        self._release_last()
        self._standing.close()

    def _take(
        self, request: Request, epoch_size: int | None, group: Sequence[int], deadline: OpeningDeadline
    ) -> HeldSnapshot:
        """Take a snapshot of sound shards: damaged ones are quarantined, and the snapshot is taken again."""
        for _ in range(_RETAKES):
            if self._replay is not None:
                held = self._take_recorded(self._replay, request, group[0])
            else:
                held = self._take_once(request, epoch_size, self._least * len(group))
            try:
                damaged = self._open(held.maps, deadline)
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

    def _take_once(self, request: Request, epoch_size: int | None, least: int) -> HeldSnapshot:
        record = (request.records or {}).get(self._cache.cache_id)
        if record is not None:
            try:
                snapshot, lease, gone = self._cache.retake_snapshot(
                    record.shard_ids, record.counts, split=self._split
                )
                new = tuple(shard_id for shard_id in gone if shard_id not in record.gone)
                return HeldSnapshot(snapshot, lease, EpochMaps(snapshot, self.maps), new)
            except NotEnoughSamplesError:
                pass  # all of its shards are gone: the rest of the epoch is drawn from the cached ones
        # The epoch may have no samples left for this cache; its ranks then give no batch, as all ranks do.
        size = None if epoch_size is None else max(1, epoch_size)
        try:
            snapshot, lease = self._standing.take(size, self._turnover, least)
        except (SchemaMismatchError, CacheVersionError):
            raise
        except CacheError as error:  # the disk is full, or fails, or the catalogue is locked
            snapshot, lease = self._reuse_last(error)
        else:
            self._keep(snapshot, lease)
        return HeldSnapshot(snapshot, lease, self._maps_of(snapshot), None)

    def _keep(self, snapshot: Snapshot, lease: Lease) -> None:
        """Hold another lease on this snapshot until the next one is taken."""
        self._release_last()
        mine = lease.again()
        self._last = None if mine is None else (snapshot, mine)
        self._warned = False

    def _release_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last[1].release()

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

    def _maps_of(self, snapshot: Snapshot) -> EpochMaps:
        # The maps of a snapshot that is used again are complete, so that none is ever opened or dropped.
        if self.maps is not None and self.maps.snapshot is snapshot and self.maps.all_mapped:
            return self.maps
        return EpochMaps(snapshot, self.maps)

    def _take_recorded(self, replay: Replay, request: Request, leader: int) -> HeldSnapshot:
        """Take a snapshot of the shards of a recorded epoch. Raises EpochError if one is missing."""
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
        return HeldSnapshot(snapshot, lease, EpochMaps(snapshot, self.maps), (), record, rest)

    def _open(self, maps: EpochMaps, deadline: OpeningDeadline) -> list[tuple[int, CorruptShardError]]:
        """Map and verify shards until `deadline` is over; return the damaged ones."""
        damaged: list[tuple[int, CorruptShardError]] = []
        missing = np.flatnonzero(~maps.mapped)[: max(0, maps.max_open - maps.num_mapped)]
        for start in range(0, len(missing), _SLICE):
            deadline.check()
            damaged += maps.open(missing[start : start + _SLICE], ahead=True)
            if deadline.over:
                break
        return damaged


def _to_payload(held: HeldSnapshot) -> Payload:
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


def _replayed_from(payload: Payload) -> tuple[SegmentRecord | None, Rest | None]:
    if payload["replayed"] is None:
        return None, None
    return SegmentRecord.from_state(payload["replayed"]), Rest(tuple((a, b) for a, b in payload["rest"]))


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


CHECK_FILLING_S: Final = 2.0  # between two checks of the workers that fill the cache


@dataclass(frozen=True, slots=True, eq=False)
class _Membership:
    """The job of this rank, and the generation at which the rank joined it.

    Ranks may have joined at different generations, so rounds are named by the generations since then.
    """

    job: ProcessGroup | None
    generation: int

    def named(self, request: Request) -> Request:
        """Return `request` with the generation that all ranks of the job use."""
        return replace(request, generation=request.generation - self.generation)


class Preparer:
    """The preparation of a loader's segments, one after the other, in one background thread."""

    def __init__(
        self,
        cache: Cache,
        settings: EpochSettings,
        find: Callable[[ProcessGroup | None], Ranks],
        closed: threading.Event,
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._find = find
        self._found: Ranks | None = None
        self._wanted: _Membership = _Membership(None, 0)
        self._joined = self._wanted
        self._cold_start = ColdStart(cache, settings, closed)
        least = settings.batch_size if settings.drop_last else 1
        self._holder = SnapshotHolder(cache, settings.turnover, least, settings.replay, settings.split)
        self.last_s = 0.0
        self._checked_s = 0.0

    @property
    def ranks(self) -> Ranks:
        """The ranks that the last segment was agreed with."""
        assert self._found is not None
        return self._found

    def join(self, job: ProcessGroup, generation: int) -> None:
        """Agree with the ranks of `job` from `generation` on. Called by the training thread."""
        self._wanted = _Membership(job, generation)

    def _find_ranks(self) -> Ranks:
        """The ranks of the job, connected at the first use, because some may still start up."""
        if self._joined is not (wanted := self._wanted):
            self.finish()
            self._found, self._joined = None, wanted
        if self._found is None:
            self._found = self._find(self._joined.job)
        return self._found

    @property
    def alone(self) -> bool:
        """True if this rank is the only one, or no other has been found yet."""
        return self._found is None or self._found.size == 1

    @property
    def was_alone(self) -> bool:
        """True if epochs were prepared for a single process."""
        return self._found is not None and self._found.size == 1

    def requested(self, request: Request) -> bool:
        """Return whether another rank waits for this one to prepare `request`."""
        return self._found is not None and self._found.requested(self._joined.named(request).name)

    def prepare(self, request: Request, cancelled: Callable[[], bool], budget_s: float) -> Segment:
        """Prepare the segment for `request`, in agreement with all ranks.

        Shards are opened and verified ahead for about `budget_s`; the others are opened when needed. Raises
        the same CacheStreamError on all ranks, or Cancelled.
        """
        began_s = time.monotonic()
        ranks, asked = self._find_ranks(), request
        request = self._joined.named(asked)
        ranks.request(request.name)
        held: HeldSnapshot | None = None
        try:
            try:
                if self._starts_cold(request):
                    self._cold_start.wait(len(ranks.group), cancelled)
                if ranks.group[0] == ranks.rank:
                    warn_of_skipped(self._cache)
                deadline = OpeningDeadline(time.monotonic() + budget_s, cancelled)
                held = self._holder.hold(ranks, request, self._remaining(request), deadline)
                segment = self._make_segment(request, held, cancelled)
            except Exception as error:
                if not isinstance(error, Cancelled):
                    for name in (request.name, *rounds_of(request)):
                        ranks.report(name, error)
                raise
            self._agree(segment, cancelled)
        except BaseException:
            if held is not None:
                held.lease.release()
            self.finish()
            raise
        weights = self._settings.drawing.weights
        if weights is not None:
            weights.confirm()
        self._holder.maps = held.maps
        segment.request = asked
        self.last_s = time.monotonic() - began_s
        return segment

    def finish(self) -> None:
        """Release the last snapshot, and write the uses of its shards. Called by the preparing thread."""
        try:
            self._holder.finish()
        except CacheStreamError as error:
            logger.warning(
                "%s: the last epochs were not counted as uses of its shards: %s", self._cache.path, error
            )

    def check_filling(self) -> None:
        """Warn if the supervisor that fills the cache was killed: all further epochs would have the same
        samples.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_FILLING_S:
            self._checked_s = now_s
            with suppress(CacheStreamError):
                warn_of_loss(self._cache)

    def forget(self) -> None:
        """Drop the maps kept for the next preparation."""
        self._holder.maps = None

    def _starts_cold(self, request: Request) -> bool:
        """Return whether to wait for samples: no recorded shard of the segment is cached, or nothing is
        recorded.
        """
        if self._settings.replay is not None:
            return False
        record = (request.records or {}).get(self._cache.cache_id)
        return record is None or not any_cached(self._cache.catalogue, record.shard_ids.tolist())

    # --- order and plan

    def _remaining(self, request: Request) -> int | None:
        """The number of samples that the epoch still takes from the order of this cache's ranks;
        None: all.
        """
        if self._settings.epoch_size is None:
            return None
        group_size = len(self.ranks.group)
        return max(0, (self._settings.epoch_size - request.drawn) * group_size // self.ranks.size)

    def _make_segment(self, request: Request, held: HeldSnapshot, cancelled: Callable[[], bool]) -> Segment:
        dataset = EpochDataset(held.snapshot, held.lease, maps=held.maps)
        group, missing = self.ranks.group, 0
        if (weights := self._settings.drawing.weights) is not None:
            exchange_updates(weights, request, self.ranks, cancelled)
        given = held.replayed or (request.records or {}).get(self._cache.cache_id)
        if given is not None and held.gone is not None:
            record = given.cut(0, held.gone)
        else:
            remaining = self._remaining(request)
            record = draw_order(self._settings, request, dataset, self.ranks, remaining, cancelled)
            if self._settings.split is not None:
                record = replace(record, split=self._settings.split.name)
        order, bounds = rebuild(record)
        if request.records and held.gone != ():
            expected = rebuild(given or next(iter(request.records.values())))[0].size
            missing = expected if held.gone is None else expected - order.size
        plan, total = self._plan(request, order.size, bounds, len(group))
        if held.rest is not None:
            total += held.rest.batches(plan.batch_size, len(group))
        return Segment(
            request,
            dataset,
            held.maps,
            translate(order, record, held.snapshot),
            plan,
            group.index(self.ranks.rank),
            total,
            record,
            missing,
            with_keys=self._settings.with_keys,
            ragged=self._settings.ragged,
            transform_key=mix_key(self._settings.drawing.seed, request.epoch, self.ranks.rank),
        )

    def _plan(
        self, request: Request, size: int, bounds: IntArray | None, group_size: int
    ) -> tuple[Plan, int]:
        """The plan of this rank, and the number of batches in the epoch before the ranks agree on the
        smallest.
        """
        batch_size, drop_last = self._settings.batch_size, self._settings.drop_last
        remaining = self._remaining(request)
        if bounds is not None:
            batches = (len(bounds) - 1) // group_size
            return Plan(size, batch_size, group_size, batches, bounds), request.done + batches
        ends = remaining is None or size >= remaining
        if remaining is not None:
            size = min(size, remaining)
        # A pass that does not end the epoch gives whole batches only; the next pass gives the remaining
        # samples.
        batches = count_batches(size, batch_size, group_size, drop_last or not ends)
        if not batches and request.records is None:
            if remaining is not None and remaining < batch_size * group_size:
                raise ConfigError(
                    f"epoch_size={self._settings.epoch_size} makes no batch of {batch_size} for each of "
                    f"{self.ranks.size} ranks: give at least {batch_size * self.ranks.size}"
                )
            raise NotEnoughSamplesError(
                f"{self._cache.path}: {size} samples make no batch of {batch_size} for each of {group_size} ranks; "
                "wait for more (min_samples=), or use a smaller batch_size or drop_last=False"
            )
        rest = (
            batches
            if remaining is None or ends
            else count_batches(remaining, batch_size, group_size, drop_last)
        )
        return Plan(size, batch_size, group_size, batches), request.done + rest

    def _agree(self, segment: Segment, cancelled: Callable[[], bool]) -> None:
        """Settle on the number of batches that every rank can give."""
        ranks, plan, request = self.ranks, segment.plan, segment.request
        mine: Payload = {"batches": plan.num_batches, "total": segment.total}
        if segment.record.listed is not None and plan.ranks > 1:
            mine["order"] = xxhash.xxh3_64_hexdigest(segment.record.listed.tobytes())
        if ranks.leads and len(ranks.group) < ranks.size:
            mine["record"] = segment.record.to_state()
            mine["cache"], mine["ranks"] = self._cache.cache_id, len(ranks.group)
        answers = ranks.agree(request.name, mine, cancelled)
        for rank in ranks.group:
            if answers[rank].get("order") != mine.get("order"):
                raise RankMismatchError(
                    f"rank {rank}'s sampler gave another order than rank {ranks.rank}'s: seed it the same on all "
                    "ranks (a sampler with a `generator` attribute is seeded here), or use a DistributedSampler"
                )
        total = min(answer["total"] for answer in answers) if request.total is None else request.total
        batches = min(answer["batches"] for answer in answers)
        segment.total = total
        segment.plan = replace(plan, num_batches=max(0, min(batches, total - request.done)))
        segment.others = {
            answer["cache"]: (SegmentRecord.from_state(answer["record"]), answer["ranks"])
            for answer in answers
            if "record" in answer
        }
        resumed = segment.others.keys() & (request.records or {}).keys()
        if resumed and self._cache.cache_id not in resumed:
            segment.missing = 0  # this cache joined after the checkpoint; other caches have its samples
