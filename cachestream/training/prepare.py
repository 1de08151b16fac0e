"""Preparing what comes next: a snapshot that all ranks agree on, its maps, its order, its plan."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import xxhash

from cachestream.errors import CacheStreamError, ConfigError, NotEnoughSamplesError, RankMismatchError
from cachestream.model import IntArray
from cachestream.permutation import mix_key
from cachestream.storage.skipping import warn_of_loss, warn_of_skipped
from cachestream.training.awaiting import ColdStart
from cachestream.training.dataset import EpochDataset
from cachestream.training.drawing import draw_order, exchange_updates, rounds_of
from cachestream.training.epoch import Request, Segment
from cachestream.training.holding import Held, Holder, Watch
from cachestream.training.options import EpochSettings
from cachestream.training.plan import Plan, count_batches
from cachestream.training.ranks import Cancelled, Job, Payload, Ranks
from cachestream.training.resume import Record, rebuild, translate

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

__all__ = ["LOOK_S", "Preparer"]

LOOK_S: Final = 2.0  # between two looks after the filling

logger = logging.getLogger("cachestream")


@dataclass(frozen=True, slots=True, eq=False)
class _Membership:
    """The job that this rank is in, since `generation`: ranks that have come to it from different pasts count from there."""

    job: Job | None
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
        find: Callable[[Job | None], Ranks],
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

    def join(self, job: Job, generation: int) -> None:
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
                watch = Watch(time.monotonic() + budget_s, cancelled)
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
        with self._cache.catalogue.reading() as tables:
            return all(tables.shard(shard_id) is None for shard_id in record.shard_ids.tolist())

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
            answer["cache"]: (Record.from_state(answer["record"]), answer["ranks"])
            for answer in answers
            if "record" in answer
        }
        taken_up = segment.others.keys() & (request.records or {}).keys()
        if taken_up and self._cache.cache_id not in taken_up:
            segment.missing = 0  # it came after the checkpoint: others go on with the samples that this names
