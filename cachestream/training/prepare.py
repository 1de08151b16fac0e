"""Preparing what comes next: a snapshot that all ranks agree on, its maps, its order, its plan."""

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
    replayed: SegmentRecord | None = None
    rest: Rest | None = None


@dataclass(frozen=True, slots=True)
class OpeningDeadline:
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
        self._standing = StandingSnapshots(cache, split=split)
        self._turnover = turnover
        self._least = least
        self._replay = replay
        self._last: tuple[Snapshot, Lease] | None = None
        self._is_told = False  # why it was taken again

    def hold(self, ranks: Ranks, request: Request, epoch_size: int | None, watch: OpeningDeadline) -> Held:
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

    def _take(
        self, request: Request, epoch_size: int | None, group: Sequence[int], watch: OpeningDeadline
    ) -> Held:
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

    def _open(self, maps: EpochMaps, watch: OpeningDeadline) -> list[tuple[int, CorruptShardError]]:
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


LOOK_S: Final = 2.0  # between two looks after the filling


@dataclass(frozen=True, slots=True, eq=False)
class _Membership:
    """The job that this rank is in, since `generation`: ranks that have come to it from different pasts count from there."""

    job: ProcessGroup | None
    generation: int

    def named(self, request: Request) -> Request:
        """`request` as all ranks of the job call it."""
        return replace(request, generation=request.generation - self.generation)


class Preparer:
    """Prepares segments, one after the other, in one background thread."""

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
        self._holder = Holder(cache, settings.turnover, least, settings.replay, settings.split)
        self.last_s = 0.0
        self._looked_s = 0.0

    @property
    def ranks(self) -> Ranks:
        """The ranks that the last segment was agreed with."""
        assert self._found is not None
        return self._found

    def join(self, job: ProcessGroup, generation: int) -> None:
        """Agree with the ranks of `job` from `generation` on, in place of those before. By the training thread."""
        self._wanted = _Membership(job, generation)

    def _find_ranks(self) -> Ranks:
        """The ranks of the job, found when they are first needed: some may still start up."""
        if self._joined is not (wanted := self._wanted):
            self.finish()
            self._found, self._joined = None, wanted
        if self._found is None:
            self._found = self._find(self._joined.job)
        return self._found

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with, as far as is known."""
        return self._found is None or self._found.size == 1

    @property
    def was_alone(self) -> bool:
        """Whether epochs were prepared for one process."""
        return self._found is not None and self._found.size == 1

    def requested(self, request: Request) -> bool:
        """Whether another rank waits for this one to prepare `request`."""
        return self._found is not None and self._found.requested(self._joined.named(request).name)

    def prepare(self, request: Request, cancelled: Callable[[], bool], budget_s: float) -> Segment:
        """The segment that `request` asks for, agreed by all ranks.

        Opening and verifying shards ahead takes about `budget_s` at most; the rest is opened when needed.
        Raises the same CacheStreamError on all ranks, or Cancelled.
        """
        began_s = time.monotonic()
        ranks, asked = self._find_ranks(), request
        request = self._joined.named(asked)
        ranks.request(request.name)
        held: Held | None = None
        try:
            try:
                if self._begins_anew(request):
                    self._cold_start.wait(len(ranks.group), cancelled)
                if ranks.group[0] == ranks.rank:
                    warn_of_skipped(self._cache)
                watch = OpeningDeadline(time.monotonic() + budget_s, cancelled)
                held = self._holder.hold(ranks, request, self._remaining(request), watch)
                segment = self._lay_out(request, held, cancelled)
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
        """Hold nothing for the next preparation, and write down how often the shards were used. By the thread that prepares."""
        try:
            self._holder.finish()
        except CacheStreamError as error:
            logger.warning(
                "%s: the last epochs were not counted as uses of its shards: %s", self._cache.path, error
            )

    def look_after_filling(self) -> None:
        """Warn if what fills the cache was killed: the epochs would be the same for ever."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            with suppress(CacheStreamError):
                warn_of_loss(self._cache)

    def forget(self) -> None:
        """Let go of the maps kept for the next preparation."""
        self._holder.maps = None

    def _begins_anew(self, request: Request) -> bool:
        """Whether nothing is cached of what the segment was drawn from before, if it was."""
        record = (request.records or {}).get(self._cache.cache_id)
        if record is None or self._settings.replay is not None:
            return self._settings.replay is None
        return not any_cached(self._cache.catalogue, record.shard_ids.tolist())

    # --- order and plan

    def _remaining(self, request: Request) -> int | None:
        """How many samples the epoch still takes from the order that a cache's ranks split; None: all it has."""
        if self._settings.epoch_size is None:
            return None
        share = len(self.ranks.group)
        return max(0, (self._settings.epoch_size - request.drawn) * share // self.ranks.size)

    def _lay_out(self, request: Request, held: Held, cancelled: Callable[[], bool]) -> Segment:
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

    def _plan(self, request: Request, size: int, bounds: IntArray | None, share: int) -> tuple[Plan, int]:
        """The plan of this rank, and how many batches the epoch would have if it were for this rank alone."""
        batch_size, drop_last = self._settings.batch_size, self._settings.drop_last
        remaining = self._remaining(request)
        if bounds is not None:
            batches = (len(bounds) - 1) // share
            return Plan(size, batch_size, share, batches, bounds), request.done + batches
        ends = remaining is None or size >= remaining
        if remaining is not None:
            size = min(size, remaining)
        # A pass that does not end the epoch gives whole batches only: what remains is drawn from the next one.
        batches = count_batches(size, batch_size, share, drop_last or not ends)
        if not batches and request.records is None:
            if remaining is not None and remaining < batch_size * share:
                raise ConfigError(
                    f"epoch_size={self._settings.epoch_size} makes no batch of {batch_size} for each of "
                    f"{self.ranks.size} ranks: give at least {batch_size * self.ranks.size}"
                )
            raise NotEnoughSamplesError(
                f"{self._cache.path}: {size} samples make no batch of {batch_size} for each of {share} ranks; "
                "wait for more (min_samples=), or use a smaller batch_size or drop_last=False"
            )
        rest = (
            batches if remaining is None or ends else count_batches(remaining, batch_size, share, drop_last)
        )
        return Plan(size, batch_size, share, batches), request.done + rest

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
        taken_up = segment.others.keys() & (request.records or {}).keys()
        if taken_up and self._cache.cache_id not in taken_up:
            segment.missing = 0  # it came after the checkpoint: others go on with the samples that this names
