"""The preparation of segments: a snapshot that all ranks agree on, its maps, its order, its plan."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import xxhash

from cachestream.errors import CacheStreamError, ConfigError, NotEnoughSamplesError, RankMismatchError
from cachestream.permutation import mix_key
from cachestream.storage.snapshots import any_cached
from cachestream.storage.status import warn_of_loss, warn_of_skipped
from cachestream.training.checkpoint import SegmentRecord, rebuild, translate
from cachestream.training.cold_start import wait_for_samples
from cachestream.training.dataset import EpochDataset
from cachestream.training.plan import Plan, count_batches, run_length
from cachestream.training.ranks import pack_numbers, unpack_numbers
from cachestream.training.rendezvous import Cancelled
from cachestream.training.samplers import evaluate, join_selections
from cachestream.training.segment import Segment
from cachestream.training.shared_snapshot import HeldSnapshot, SnapshotHolder
from cachestream.training.weights import draw

if TYPE_CHECKING:
    from cachestream.schema import IntArray
    from cachestream.storage.cache import Cache
    from cachestream.training.epoch_settings import EpochSettings
    from cachestream.training.ranks import Payload, Ranks
    from cachestream.training.rendezvous import ProcessGroup
    from cachestream.training.segment import Request


logger = logging.getLogger("cachestream")
_CHECK_FILLING_S: Final = 2.0  # between two checks of the workers that fill the cache


class Preparer:
    """The preparation of a loader's segments, one after the other, in one background thread.

    A segment takes up to three rounds between the ranks: the snapshot and the plan are settled in one, and
    before it the updates of weights or the lists of samplers, and the drawn order, may be exchanged.
    """

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
        # The job of this rank, and the generation at which the rank joined it.
        self._wanted: tuple[ProcessGroup | None, int] = (None, 0)
        self._joined: tuple[ProcessGroup | None, int] = self._wanted
        self._closed = closed
        self._holder = SnapshotHolder(cache, settings)
        self.last_s = 0.0
        self._checked_s = 0.0

    @property
    def ranks(self) -> Ranks:
        """The ranks that the last segment was agreed with."""
        assert self._found is not None
        return self._found

    def join(self, job: ProcessGroup, generation: int) -> None:
        """Agree with the ranks of `job` from `generation` on. Called by the training thread."""
        self._wanted = job, generation

    def _find_ranks(self) -> Ranks:
        """The ranks of the job, connected at the first use, because some may still start up."""
        if self._joined is not (wanted := self._wanted):
            self.finish()
            self._found, self._joined = None, wanted
        if self._found is None:
            self._found = self._find(self._joined[0])
        return self._found

    def _rounds(self, request: Request) -> tuple[str, str, str]:
        """The names of the rounds for `request`: the last one, and before it those for lists and the order.

        Ranks may have joined at different generations, so rounds are named by the generations since then.
        """
        name = f"{request.generation - self._joined[1]}.{request.epoch}.{request.index}"
        return name, f"{name}.lists", f"{name}.order"

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
        return self._found is not None and self._found.requested(self._rounds(request)[0])

    def prepare(self, request: Request, cancelled: Callable[[], bool], budget_s: float) -> Segment:
        """Prepare the segment for `request`, in agreement with all ranks.

        Shards are opened and verified ahead for about `budget_s`; the others are opened when needed. Raises
        the same CacheStreamError on all ranks, or Cancelled; `finish` is to be called then.
        """
        began_s = time.monotonic()
        ranks, rounds = self._find_ranks(), self._rounds(request)
        ranks.request(rounds[0])
        held: HeldSnapshot | None = None
        try:
            try:
                if self._starts_cold(request):
                    num_ranks = len(ranks.group)
                    wait_for_samples(self._cache, self._settings, num_ranks, cancelled, self._closed)
                if ranks.leads:
                    warn_of_skipped(self._cache)
                until_s = time.monotonic() + budget_s
                size = self._remaining(request)
                held = self._holder.hold(ranks, rounds[0], request, size, until_s, cancelled)
                segment = self._make_segment(request, held, cancelled)
            except Exception as error:
                if not isinstance(error, Cancelled):
                    for name in rounds:
                        ranks.report(name, error)
                raise
            self._agree(segment, cancelled)
        except BaseException:
            if held is not None:
                held.lease.release()
            raise
        if self._settings.weights is not None:
            self._settings.weights.confirm()
        self._holder.maps = held.maps
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
        if now_s - self._checked_s >= _CHECK_FILLING_S:
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
        settings, ranks = self._settings, self.ranks
        dataset = EpochDataset(held.snapshot, held.lease, maps=held.maps)
        if settings.weights is not None:  # also where nothing is drawn: other ranks may have to draw
            settings.weights.exchange(ranks, self._rounds(request)[1], cancelled)
        record = held.record or self._draw(request, dataset, cancelled)
        order, bounds = rebuild(record)
        missing = 0
        if request.records:
            given = request.records.get(self._cache.cache_id) or next(iter(request.records.values()))
            missing = rebuild(given)[0].size - (0 if held.record is None else order.size)
        plan, total = self._plan(request, order.size, bounds)
        return Segment(
            request,
            dataset,
            held.maps,
            translate(order, record, held.snapshot),
            plan,
            ranks.group.index(ranks.rank),
            total + held.later_batches,
            record,
            missing,
            with_keys=settings.with_keys,
            ragged=settings.ragged,
            transform_key=mix_key(settings.seed, request.epoch, ranks.rank),
        )

    def _draw(self, request: Request, dataset: EpochDataset, cancelled: Callable[[], bool]) -> SegmentRecord:
        """Draw the order of a new snapshot's samples: one list that all ranks of a cache split.

        Raises the errors of the sampler, ConfigError for samples that do not exist, and as `StoreRanks.agree`
        does.
        """
        settings, ranks, snapshot = self._settings, self.ranks, dataset.snapshot
        _, lists, order = self._rounds(request)
        key, limit = mix_key(settings.seed, request.epoch, request.index), self._remaining(request)
        size = snapshot.num_samples if limit is None else min(snapshot.num_samples, limit)
        split = None if settings.split is None else settings.split.name
        record = SegmentRecord(snapshot.shard_ids, snapshot.counts, "shuffled", size, key, split=split)
        if (weights := settings.weights) is not None:

            def make() -> Payload:
                of_samples = weights.of_snapshot(snapshot)
                return {"drawn": pack_numbers(draw(of_samples, size, key))}

            listed = unpack_numbers(ranks.share(order, make, cancelled)["drawn"])
            return replace(record, kind="listed", drawn=len(listed), listed=listed)
        if settings.sampler is not None:
            chosen = evaluate(settings.sampler, dataset, request.epoch, key, limit, len(ranks.group))
            if not chosen.shared and len(ranks.group) > 1:
                chosen = join_selections(chosen, settings.batch_size, ranks, lists, cancelled)
            listed, bounds = chosen.indices, chosen.bounds
            return replace(record, kind="listed", drawn=len(listed), listed=listed, bounds=bounds)
        if settings.locality is not None:
            return replace(record, kind="local", local=(settings.locality, run_length(snapshot.counts)))
        return record if settings.shuffle else replace(record, kind="sequential")

    def _plan(self, request: Request, size: int, bounds: IntArray | None) -> tuple[Plan, int]:
        """The plan of this rank, and the number of batches in the epoch before the ranks agree on the
        smallest.
        """
        settings, group_size = self._settings, len(self.ranks.group)
        batch_size, drop_last, remaining = settings.batch_size, settings.drop_last, self._remaining(request)
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
                    f"epoch_size={settings.epoch_size} makes no batch of {batch_size} for each of "
                    f"{self.ranks.size} ranks: give at least {batch_size * self.ranks.size}"
                )
            raise NotEnoughSamplesError(
                f"{self._cache.path}: {size} samples make no batch of {batch_size} for each of {group_size} ranks; "
                "wait for more (min_samples=), or use a smaller batch_size or drop_last=False"
            )
        rest = batches
        if remaining is not None and not ends:
            rest = count_batches(remaining, batch_size, group_size, drop_last)
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
        answers = ranks.agree(self._rounds(request)[0], mine, cancelled)
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
