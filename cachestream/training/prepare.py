"""The preparation of segments: the wait for samples at cold start, then a snapshot that all ranks agree on,
its maps, its order and its plan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from cachestream import tracing
from cachestream.errors import (
    CacheError,
    CacheStreamError,
    CacheVersionError,
    ConfigError,
    NotEnoughSamplesError,
    RankMismatchError,
    SchemaMismatchError,
)
from cachestream.permutation import mix_key
from cachestream.storage.snapshots import sample_counts, weigh_shards
from cachestream.storage.status import wait_for_samples, warn_of_loss, warn_of_skipped
from cachestream.storage.view import row_hashes
from cachestream.training.dataset import EpochDataset
from cachestream.training.epoch_snapshots import EpochSnapshot, EpochSnapshots
from cachestream.training.plan import OrderRecord, Plan, count_batches, rebuild, run_length, translate
from cachestream.training.ranks import pack_numbers, unpack_numbers
from cachestream.training.rendezvous import Cancelled
from cachestream.training.samplers import (
    Selection,
    evaluate,
    join_selections,
    may_draw_globally,
    seeded_globally,
)
from cachestream.training.segment import Segment
from cachestream.training.token_batches import token_batches
from cachestream.training.weights import draw

if TYPE_CHECKING:
    from cachestream.schema import IntArray, Snapshot
    from cachestream.storage.cache import Cache
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.ranks import Payload, Ranks
    from cachestream.training.rendezvous import ProcessGroup
    from cachestream.training.samplers import SamplerLike
    from cachestream.training.segment import Request

logger = logging.getLogger("cachestream")

# Has the trainer's thread call a function, for a request, and returns its result.
InTrainer = Callable[["Request", Callable[[], "Selection"]], "Selection"]


class Preparer:
    """The preparation of a loader's segments, one after the other, in one background thread.

    A segment takes up to three rounds between the ranks: the snapshot and the plan are settled in one, and
    before it the updates of weights or the lists of samplers, and the drawn order, may be exchanged.
    """

    def __init__(
        self,
        cache: Cache,
        options: LoaderOptions,
        find: Callable[[ProcessGroup | None], Ranks],
        closed: threading.Event,
        in_trainer: InTrainer,
    ) -> None:
        self._cache = cache
        self._in_trainer = in_trainer
        self._options = options
        self._find = find
        self._found: Ranks | None = None
        # The job of this rank, and the generation at which the rank joined it.
        self._wanted: tuple[ProcessGroup | None, int] = (None, 0)
        self._joined: tuple[ProcessGroup | None, int] = self._wanted
        self._closed = closed
        self._snapshots = EpochSnapshots(cache, options)
        self.last_s = 0.0

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
    def num_ranks(self) -> int:
        """The number of ranks that were found; 0 before that."""
        return 0 if self._found is None else self._found.size

    def requested(self, request: Request) -> bool:
        """Return whether another rank waits for this one to prepare `request`."""
        return self._found is not None and self._found.requested(self._rounds(request)[0])

    def prepare(
        self, request: Request, cancelled: Callable[[], bool], budget_s: Callable[[], float]
    ) -> Segment:
        """Prepare the segment for `request`, in agreement with all ranks.

        Shards are opened and verified ahead until about `budget_s()` seconds have passed, which is asked
        anew after each few shards; the others are opened when needed. Raises the same CacheStreamError on all
        ranks, or Cancelled; `finish` is to be called then.
        """
        began_s = time.monotonic()
        ranks, rounds = self._find_ranks(), self._rounds(request)
        ranks.request(rounds[0], cancelled)
        with self._cache.catalogue.hurried(self._can_go_on(request)), ExitStack() as undo:
            try:
                self._await_samples(request, len(ranks.group), cancelled)
                if ranks.leads:
                    with suppress(CacheError):
                        warn_of_skipped(self._cache)
                taking_s, size = time.monotonic(), self._remaining(request)
                with tracing.span("snapshot"):
                    taken = self._snapshots.take(
                        ranks,
                        rounds[0],
                        request,
                        size,
                        lambda: time.monotonic() - taking_s > budget_s(),
                        cancelled,
                    )
                undo.callback(taken.lease.release)
                segment = self._make_segment(request, taken)
            except Cancelled:
                raise
            except Exception as error:
                for name in rounds:
                    ranks.report(name, error)
                raise
            self._agree(segment)
            undo.pop_all()
        if self._options.weights is not None:
            self._options.weights.confirm()
        self._snapshots.maps = taken.maps
        self.last_s = time.monotonic() - began_s
        return segment

    def finish(self) -> None:
        """Release the last snapshot, and write the uses of its shards. Called by the preparing thread."""
        try:
            self._snapshots.finish()
        except CacheStreamError as error:
            logger.warning(
                "%s: the last epochs were not counted as uses of its shards: %s", self._cache.path, error
            )

    def check_filling(self) -> None:
        """Warn if the supervisor was killed: all further epochs would have the same samples."""
        with suppress(CacheStreamError):
            warn_of_loss(self._cache)

    def forget(self) -> None:
        """Drop the maps kept for the next preparation."""
        self._snapshots.maps = None

    def _starts_cold(self, request: Request) -> bool:
        """Return whether to wait for samples: no recorded shard is cached, or nothing is recorded."""
        if self._options.replay is not None:
            return False
        record = (request.records or {}).get(self._cache.cache_id)
        return record is None or sample_counts(self._cache.catalogue).keys().isdisjoint(
            record.shard_ids.tolist()
        )

    def _can_go_on(self, request: Request) -> bool:
        """Return whether the last snapshot does for `request` where the cache cannot be read."""
        return self._snapshots.maps is not None and self._options.replay is None and not request.records

    def _await_samples(self, request: Request, num_ranks: int, cancelled: Callable[[], bool]) -> None:
        """Wait for samples if the epoch starts cold."""
        try:
            if self._starts_cold(request):
                self._wait_for_samples(num_ranks, cancelled)
        except (SchemaMismatchError, CacheVersionError):
            raise
        except CacheError:
            if not self._can_go_on(request):
                raise

    def _wait_for_samples(self, num_ranks: int, cancelled: Callable[[], bool]) -> None:
        """Wait until `min_samples` are cached, or a batch for each of the `num_ranks` ranks of the cache."""

        def pause(seconds: float) -> None:
            if cancelled() or self._closed.wait(seconds):
                raise Cancelled

        options, whole = self._options, self._options.batch_size * num_ranks
        least = options.min_samples or (whole if options.drop_last else num_ranks)
        give_up_s = 0.9 * options.timeout_s  # before the trainer's own timeout, because this error says more
        wait_for_samples(
            self._cache, options.min_samples or whole, give_up_s, least, options.split, pause, options.view
        )

    # --- order and plan

    def _remaining(self, request: Request) -> int | None:
        """The samples that the epoch still takes from the order of this cache's ranks; None: all."""
        if self._options.epoch_size is None:
            return None
        group_size = len(self.ranks.group)
        return max(0, (self._options.epoch_size - request.drawn) * group_size // self.ranks.size)

    def _make_segment(self, request: Request, taken: EpochSnapshot) -> Segment:
        options, ranks = self._options, self.ranks
        dataset = EpochDataset(taken.snapshot, taken.lease, maps=taken.maps)
        limit, rounds = self._remaining(request), self._rounds(request)[1:]
        drawing = Drawing(self._cache, options, ranks, request, limit, rounds, self._in_trainer)
        drawing.settle(taken.snapshot, taken.record)
        record = taken.record or drawing.draw(dataset)
        order, bounds = rebuild(record)
        missing = 0
        if request.records:
            given = request.records.get(self._cache.cache_id) or next(iter(request.records.values()))
            missing = rebuild(given)[0].size - (0 if taken.record is None else order.size)
        plan, total = self._plan(request, order.size, bounds)
        order = translate(order, record, taken.snapshot)
        return Segment(
            request,
            dataset,
            taken.maps,
            order,
            plan,
            ranks.group.index(ranks.rank),
            total + taken.later_batches,
            record,
            missing,
            transform_key=mix_key(options.seed, request.epoch, ranks.rank),
            sources=None if options.mixture is None else options.mixture.sources_in(order, taken.snapshot),
        )

    def _plan(self, request: Request, size: int, bounds: IntArray | None) -> tuple[Plan, int]:
        """The plan of this rank, and the epoch's batches, before the ranks agree on the smallest number."""
        options, group_size = self._options, len(self.ranks.group)
        batch_size, drop_last, remaining = options.batch_size, options.drop_last, self._remaining(request)
        if bounds is not None:
            batches = (len(bounds) - 1) // group_size
            if not batches and request.records is None and options.replay is None:
                raise NotEnoughSamplesError(
                    f"{self._cache.path}: each of {group_size} ranks takes a batch, and {size} samples make only "
                    f"{len(bounds) - 1}; wait for more (min_samples=), or make smaller batches"
                )
            return Plan(size, batch_size, group_size, batches, bounds), request.done + batches
        ends = remaining is None or size >= remaining
        if remaining is not None:
            size = min(size, remaining)
        # A pass that does not end the epoch gives whole batches only; the next one gives the other samples.
        batches = count_batches(size, batch_size, group_size, drop_last or not ends)
        if not batches and request.records is None:
            if remaining is not None and remaining < batch_size * group_size:
                raise ConfigError(
                    f"epoch_size={options.epoch_size} makes no batch of {batch_size} for each of "
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

    def _agree(self, segment: Segment) -> None:
        """Settle on the number of batches that every rank can give."""
        ranks, plan, request = self.ranks, segment.plan, segment.request
        mine: Payload = {"batches": plan.num_batches, "total": segment.total}
        if segment.record.listed is not None and plan.ranks > 1:
            mine["order"] = xxhash.xxh3_64_hexdigest(segment.record.listed.tobytes())
        if ranks.leads and len(ranks.group) < ranks.size:
            mine["record"] = segment.record.to_state()
            mine["cache"], mine["ranks"] = self._cache.cache_id, len(ranks.group)
        answers = ranks.agree(self._rounds(request)[0], mine)
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
        segment.caches = {
            answer["cache"]: (OrderRecord.from_state(answer["record"]), answer["ranks"])
            for answer in answers
            if "record" in answer
        }
        resumed = segment.caches.keys() & (request.records or {}).keys()
        if resumed and self._cache.cache_id not in resumed:
            segment.missing = 0  # this cache joined after the checkpoint; other caches have its samples


@dataclass(frozen=True, slots=True)
class Drawing:
    """The drawing of the order of one segment: one list that all ranks of a cache split.

    `limit`: the samples that the epoch still takes; None: all. `rounds`: the names of the rounds in which the
    ranks exchange lists, and the order. `in_trainer` calls a sampler that may use the global generators.
    """

    cache: Cache
    options: LoaderOptions
    ranks: Ranks
    request: Request
    limit: int | None
    rounds: tuple[str, str]
    in_trainer: InTrainer

    def settle(self, snapshot: Snapshot, record: OrderRecord | None) -> None:
        """Exchange the weights, or agree on the mixture. With a `record`, which says what was drawn on this
        cache, the ranks of other caches may still draw by them.
        """
        options, ranks, request = self.options, self.ranks, self.request
        if options.weights is not None:
            options.weights.exchange(ranks, self.rounds[0])
        if options.mixture is not None:
            size = self._at_most(snapshot.num_samples if record is None else rebuild(record)[0].size)
            batches = count_batches(size, options.batch_size, len(ranks.group), options.drop_last)
            first = request.first_step + request.done
            steps = range(first, first + batches)
            options.mixture.agree(self.cache, request.epoch, steps, ranks, self.rounds[0])

    def draw(self, dataset: EpochDataset) -> OrderRecord:
        """Draw the order of the samples of `dataset`.

        Raises the sampler's errors, ConfigError for unknown samples, and those of `StoreRanks.agree`.
        """
        options, snapshot = self.options, dataset.snapshot
        size = self._at_most(snapshot.num_samples)
        record = OrderRecord(
            *(snapshot.shard_ids, snapshot.counts, "shuffled", size, self._key),
            split=None if options.split is None else options.split.name,
            selected=row_hashes(snapshot),
        )
        if (chosen := self._select(dataset, size)) is not None:
            listed, bounds = chosen.indices, chosen.bounds
            return replace(record, kind="listed", drawn=len(listed), listed=listed, bounds=bounds)
        if options.locality is not None:
            return replace(record, kind="local", local=(options.locality, run_length(snapshot.counts)))
        return record if options.shuffle else replace(record, kind="sequential")

    @property
    def _key(self) -> int:
        return mix_key(self.options.seed, self.request.epoch, self.request.index)

    def _at_most(self, size: int) -> int:
        return size if self.limit is None else min(size, self.limit)

    def _select(self, dataset: EpochDataset, size: int) -> Selection | None:
        """The samples that weights, a mixture, a sampler or a token budget choose; None without these."""
        options, ranks, ranks_here = self.options, self.ranks, len(self.ranks.group)
        if options.weights is not None or options.mixture is not None:
            mine = (
                {"drawn": pack_numbers(self._draw_for_all(dataset.snapshot, size))} if ranks.leads else None
            )
            drawn = ranks.share(self.rounds[1], mine)["drawn"]
            return Selection(unpack_numbers(drawn), None, shared=True)
        if options.sampler is not None:
            chosen = self._evaluate(options.sampler, dataset)
            if not chosen.shared and ranks_here > 1:
                chosen = join_selections(chosen, options.batch_size, ranks, self.rounds[0])
            return chosen
        if options.max_tokens is not None:
            field, budget = next(iter(options.max_tokens.items()))
            return token_batches(dataset, field, budget, options, size, self._key, ranks_here)
        return None

    def _evaluate(self, sampler: SamplerLike, dataset: EpochDataset) -> Selection:
        """The samples of a sampler. A single rank's trainer calls one that may use the global generators, while
        it draws nothing itself. Those of several ranks would wait for each other; their samplers must agree
        anyway, which needs generators of their own.
        """

        def draw() -> Selection:
            epoch, ranks_here = self.request.epoch, len(self.ranks.group)
            return evaluate(sampler, dataset, epoch, self._key, self.limit, ranks_here)

        def draw_seeded() -> Selection:
            with seeded_globally(self._key):
                return draw()

        if self.ranks.size > 1 or not may_draw_globally(sampler):
            return draw()
        return self.in_trainer(self.request, draw_seeded)

    def _draw_for_all(self, snapshot: Snapshot, size: int) -> IntArray:
        """Draw by the weights or the mixture, for all ranks of the cache."""
        options = self.options
        if (weights := options.weights) is not None:
            drawn = draw(weights.of_snapshot(snapshot), size, self._key)
            with suppress(CacheError):  # the next epoch records them
                weigh_shards(self.cache, weights.of_shards())
            return drawn
        assert options.mixture is not None
        with suppress(CacheError):
            self.cache.filling.record_mixture(options.mixture.shares)
        batch = options.batch_size * len(self.ranks.group)
        return options.mixture.draw(snapshot, batch, size, self._key)
