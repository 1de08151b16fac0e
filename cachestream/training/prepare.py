"""Preparing what comes next: a snapshot that all ranks agree on, its maps, its order, its plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from cachestream.errors import (
    CacheStreamError,
    ConfigError,
    CorruptShardError,
    NotEnoughSamplesError,
    RankMismatchError,
)
from cachestream.model import IntArray, Schema, Snapshot
from cachestream.permutation import mix_key
from cachestream.storage.leases import Lease, join_lease
from cachestream.training.dataset import EpochDataset
from cachestream.training.epoch import EpochSettings, Request, Segment
from cachestream.training.maps import EpochMaps
from cachestream.training.plan import Plan, count_batches
from cachestream.training.ranks import Cancelled, Payload, Ranks
from cachestream.training.resume import OrderKind, Record, rebuild, translate
from cachestream.training.samplers import evaluate

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

__all__ = ["Preparer"]

_SLICE: Final = 16  # shards opened between two looks at the clock, and at whether it is still wanted
_RETAKES: Final = 10
_WATCH_S: Final = 0.02


@dataclass(slots=True, eq=False)
class _Held:
    """A leased snapshot; `gone` names the shards of a record that it lacks, None when it is not of the record."""

    snapshot: Snapshot
    lease: Lease
    maps: EpochMaps
    gone: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Watch:
    """When to stop opening shards ahead, and whether the whole preparation is still wanted."""

    until_s: float
    cancelled: Callable[[], bool]

    def check(self) -> None:
        if self.cancelled():
            raise Cancelled

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until_s


class Preparer:
    """Prepares segments, one after the other, in one background thread."""

    def __init__(
        self, cache: Cache, settings: EpochSettings, find: Callable[[], Ranks], closed: threading.Event
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._find = find
        self._found: Ranks | None = None
        self._closed = closed
        self._maps: EpochMaps | None = None
        self.last_s = 0.0

    @property
    def ranks(self) -> Ranks:
        """The ranks of the job, found at the first use: by then the process group is there."""
        if self._found is None:
            self._found = self._find()
        return self._found

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with, as far as is known."""
        return self._found is None or self._found.size == 1

    def requested(self, request: Request) -> bool:
        """Whether another rank waits for this one to prepare `request`."""
        return self._found is not None and self._found.requested(request.name)

    def prepare(self, request: Request, cancelled: Callable[[], bool], budget_s: float) -> Segment:
        """The segment that `request` asks for, agreed by all ranks.

        Opening and verifying shards ahead takes about `budget_s` at most; the rest is opened when needed.
        Raises the same CacheStreamError on all ranks, or Cancelled.
        """
        began_s = time.monotonic()
        ranks = self.ranks
        ranks.request(request.name)
        held: _Held | None = None
        try:
            self._await_samples(request, cancelled)
            held = self._hold(request, _Watch(time.monotonic() + budget_s, cancelled))
            segment = self._lay_out(request, held)
        except Exception as error:
            if held is not None:
                held.lease.release()
            if not isinstance(error, Cancelled):
                ranks.report(request.name, error)
            raise
        try:
            self._agree(segment, cancelled)
        except (CacheStreamError, Cancelled):
            held.lease.release()
            raise
        self._maps = held.maps
        self.last_s = time.monotonic() - began_s
        return segment

    def forget(self) -> None:
        """Let go of the maps kept for the next preparation."""
        self._maps = None

    # --- samples

    def _await_samples(self, request: Request, cancelled: Callable[[], bool]) -> None:
        """Wait at cold start; raises NotEnoughSamplesError when there are, and will be, too few."""
        if request.records is not None:
            return
        settings, group = self._settings, len(self.ranks.group)
        whole = settings.batch_size * group
        wanted = settings.min_samples or whole
        least = settings.min_samples or (whole if settings.drop_last else group)
        # A moment before the trainer gives up waiting for its batch: this error says more.
        give_up = time.monotonic() + 0.9 * settings.timeout_s
        while (have := self._cache.num_samples) < wanted:
            state = self._cache.fill_state()
            ended = state in ("complete", "full", "failed")
            late = time.monotonic() > give_up
            if ended or late:
                # Asked again: the last samples may have come between the count and the state.
                have = self._cache.num_samples
                if have >= least:
                    return
                raise NotEnoughSamplesError(self._too_few(have, least, state, ended))
            if cancelled() or self._closed.wait(_WATCH_S):
                raise Cancelled

    def _too_few(self, have: int, wanted: int, state: str, ended: bool) -> str:
        why = (
            f"its filling is '{state}'"
            if ended
            else f"after {self._settings.timeout_s:.0f} s it is '{state}'"
        )
        if state == "none":
            hint = "start a worker (cs.start_worker, or 'cachestream worker')"
        elif ended:
            hint = "use a smaller batch_size or min_samples, drop_last=False, or more data"
        else:
            hint = "does the worker run and the remote answer? See 'cachestream status CACHE', or raise timeout_s"
        return f"{self._cache.path} holds {have} samples, {wanted} are needed for an epoch, and {why}: {hint}"

    # --- the snapshot

    def _hold(self, request: Request, watch: _Watch) -> _Held:
        """The group's snapshot, leased by this process."""
        led: list[_Held] = []

        def lead() -> Payload:
            led.append(self._take(request, watch))
            return _to_payload(led[0])

        try:
            shared = self.ranks.share(request.name, lead, watch.cancelled)
            if led:
                return led[0]
            snapshot = _from_payload(shared)
            lease = join_lease(snapshot.lease)
            gone = None if shared["gone"] is None else tuple(shared["gone"])
            led.append(_Held(snapshot, lease, EpochMaps(snapshot, self._maps), gone))
            damaged = self._open(led[0].maps, watch)
            if damaged:
                raise damaged[0][1]
        except BaseException:
            for held in led:
                held.lease.release()
            raise
        return led[0]

    def _take(self, request: Request, watch: _Watch) -> _Held:
        """A snapshot of sound shards: damaged ones are put aside, and it is taken again."""
        for _ in range(_RETAKES):
            held = self._take_once(request)
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

    def _take_once(self, request: Request) -> _Held:
        record = (request.records or {}).get(self._cache.cache_id)
        if record is not None:
            try:
                snapshot, lease, gone = self._cache.retake_snapshot(record.shard_ids, record.counts)
                known = {shard_id for cut in record.cuts for shard_id in cut.gone}
                new = tuple(shard_id for shard_id in gone if shard_id not in known)
                return _Held(snapshot, lease, EpochMaps(snapshot, self._maps), new)
            except NotEnoughSamplesError:
                pass  # all of them are gone: what is left of the epoch is drawn from what there is
        snapshot, lease = self._cache.take_snapshot(self._remaining(request), self._settings.turnover)
        return _Held(snapshot, lease, EpochMaps(snapshot, self._maps), None)

    def _open(self, maps: EpochMaps, watch: _Watch) -> list[tuple[int, CorruptShardError]]:
        """Map and verify shards until the time is up; returns the damaged ones."""
        damaged: list[tuple[int, CorruptShardError]] = []
        missing = np.flatnonzero(~maps.mapped)[: max(0, maps.max_open - maps.num_mapped)]
        for start in range(0, len(missing), _SLICE):
            watch.check()
            damaged += maps.open(missing[start : start + _SLICE])
            if watch.over:
                break
        return damaged

    # --- order and plan

    def _remaining(self, request: Request, share: int | None = None) -> int | None:
        """How many samples the epoch still takes from an order that `share` ranks split; None: all it has."""
        if self._settings.epoch_size is None:
            return None
        share = len(self.ranks.group) if share is None else share
        return max(0, self._settings.epoch_size * share // self.ranks.size - request.drawn)

    def _lay_out(self, request: Request, held: _Held) -> Segment:
        dataset = EpochDataset(held.snapshot, held.lease, maps=held.maps)
        group, shared, missing = self.ranks.group, True, 0
        given = (request.records or {}).get(self._cache.cache_id)
        if given is not None and held.gone is not None:
            record = given.cut(0, held.gone)
        else:
            record, shared = self._new_record(request, dataset)
        order, bounds = rebuild(record)
        if request.records and held.gone != ():
            expected = rebuild(given or next(iter(request.records.values())))[0].size
            missing = expected if held.gone is None else expected - order.size
        plan, total = self._plan(request, order.size, bounds, len(group) if shared else 1)
        return Segment(
            request,
            dataset,
            held.maps,
            translate(order, record, held.snapshot),
            plan,
            group.index(self.ranks.rank) if shared else 0,
            total,
            record,
            missing,
        )

    def _new_record(self, request: Request, dataset: EpochDataset) -> tuple[Record, bool]:
        """How a new snapshot's samples are ordered, and whether the group's ranks share that order."""
        settings, snapshot = self._settings, dataset.snapshot
        key = mix_key(settings.seed, request.epoch, request.index)
        drawn = snapshot.num_samples
        remaining = self._remaining(request)
        if settings.sampler is None:
            drawn = drawn if remaining is None else min(drawn, remaining)
            kind: OrderKind = "shuffled" if settings.shuffle else "sequential"
            return Record(snapshot.shard_ids, snapshot.counts, kind, drawn, key), True
        chosen = evaluate(settings.sampler, dataset, request.epoch, key)
        listed = Record(
            snapshot.shard_ids,
            snapshot.counts,
            "listed",
            len(chosen.indices),
            key,
            chosen.indices,
            chosen.bounds,
        )
        return listed, chosen.shared

    def _plan(self, request: Request, size: int, bounds: IntArray | None, share: int) -> tuple[Plan, int]:
        """The plan of this rank, and how many batches the epoch would have if it were for this rank alone."""
        batch_size, drop_last = self._settings.batch_size, self._settings.drop_last
        remaining = self._remaining(request, share)
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
            answer["cache"]: (Record.from_state(answer["record"]), answer["ranks"])
            for answer in answers
            if "record" in answer
        }


def _to_payload(held: _Held) -> Payload:
    snapshot = held.snapshot
    return {
        "cache_id": snapshot.cache_id,
        "root": snapshot.root,
        "lease": snapshot.lease,
        "schema": snapshot.schema.to_json(),
        "shards": snapshot.shard_ids.tolist(),
        "counts": snapshot.counts.tolist(),
        "gone": held.gone,
    }


def _from_payload(payload: Payload) -> Snapshot:
    return Snapshot(
        payload["cache_id"],
        payload["root"],
        payload["lease"],
        Schema.from_json(payload["schema"]),
        np.array(payload["shards"], np.int64),
        np.array(payload["counts"], np.int64),
    )
