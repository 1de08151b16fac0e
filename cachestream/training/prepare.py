"""The preparation of segments, in one thread: the wait for samples at cold start, then a snapshot that all
ranks agree on, its maps, its order and its plan.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

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
from cachestream.storage.snapshots import sample_counts
from cachestream.storage.status import wait_for_samples, warn_of_loss, warn_of_skipped
from cachestream.storage.view import row_hashes
from cachestream.training.dataset import EpochDataset
from cachestream.training.draw import DrawContext, make_draw
from cachestream.training.epoch_snapshots import EpochSnapshot, EpochSnapshots, open_shards
from cachestream.training.plan import OrderRecord, Plan, count_batches, rebuild, translate
from cachestream.training.position import Segment
from cachestream.training.ranks import Deadlines, find_ranks
from cachestream.training.rendezvous import Cancelled
from cachestream.training.threads import Flag

if TYPE_CHECKING:
    from cachestream.schema import IntArray
    from cachestream.storage.cache import Cache
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.ranks import Payload, Ranks
    from cachestream.training.rendezvous import ProcessGroup
    from cachestream.training.stats import Meter
    from cachestream.training.window import Wanted, Window

logger = logging.getLogger("cachestream")

_POLL_S: Final = 0.25  # between two looks at other ranks' requests and the trainer's pace
_CHECK_FILLING_S: Final = 2.0  # between two checks of the workers that fill the cache
_URGENT_OPEN_S: Final = 0.1  # opening shards ahead while the trainer waits
_AHEAD_OPEN_S: Final = 15.0  # well below the deadline at which other ranks give this one up
_PACE_STEPS: Final = 8

# At most half of the trainer's timeout, so that the error that names the late rank comes first: also after a
# wait for a lock that this rank holds, if LOCK_TIMEOUT_S of the catalogue is below the other half.
_RANKS_DEADLINE_S: Final = 60.0

_instances = itertools.count()


class Pace:
    """The mean time that the trainer takes for a batch, between the last few looks at which it had taken
    some.

    So a pause, as of a first step that compiles, is forgotten soon.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS)

    def note(self, now_s: float, batches: int) -> None:
        """Note that the trainer has taken `batches` in all by `now_s`."""
        if not self._marks or self._marks[-1][1] != batches:
            self._marks.append((now_s, batches))

    @property
    def step_s(self) -> float | None:
        """The seconds for a batch; None before it is known."""
        if len(self._marks) < 2:
            return None
        (began_s, first), (ended_s, last) = self._marks[0], self._marks[-1]
        return (ended_s - began_s) / (last - first)


class Preparer:
    """The preparation of a loader's segments, one after the other, in the thread that calls `run`.

    A segment takes up to three rounds between the ranks: the snapshot and the plan are settled in one, and
    before it the updates of weights or the lists of samplers, and the drawn order, may be exchanged.
    """

    def __init__(self, cache: Cache, options: LoaderOptions, window: Window, meter: Meter) -> None:
        self.instance = next(_instances)
        self.last_s = 0.0
        self._cache = cache
        self._options = options
        self._window = window
        self._meter = meter
        self._draw = make_draw(options)
        self._closed = Flag()
        self._found: Ranks | None = None
        self._job: ProcessGroup | None = None  # of the ranks that were found
        self._snapshots = EpochSnapshots(cache, options)

    # --- the thread

    def run(self) -> None:
        """Prepare what is wanted when it is due, until the window is closed."""
        window, pace, checked_s, pause_s = self._window, Pace(), 0.0, _POLL_S
        while True:
            now_s = time.monotonic()
            if now_s - checked_s >= _CHECK_FILLING_S:
                checked_s = now_s
                with suppress(CacheStreamError):
                    warn_of_loss(self._cache)  # all further epochs would have the same samples
            pace.note(now_s, self._meter.counts.batches)
            asked = window.wait_due(2 * self.last_s, pace.step_s, pause_s)
            if asked is None:
                self.finish()
                self._snapshots.maps = None
                self._meter.close()
                return
            pause_s = _POLL_S
            wanted, due = asked
            try:
                if due or (window.may_prepare_early() and self._is_requested(wanted)):
                    self._add(wanted)
                elif not self._open_some():
                    continue
                pause_s = 0.0  # there may be more to open
            except Cancelled:
                self.finish()
            except BaseException as error:  # noqa: BLE001 - a thread's main: the trainer gets it
                # The frames would keep the lease and maps of the failed segment as long as the error lives.
                traceback.clear_frames(error.__traceback__)
                window.fail(wanted, error)
                # Afterwards: a rank that was stopped may have locked the catalogue, and the error names it.
                self.finish()

    def stop(self) -> None:
        """End the wait for ranks that have not met yet; that for an epoch ends with the window."""
        self._closed.set()

    def _add(self, wanted: Wanted) -> None:
        window, added = self._window, False
        with tracing.span("prepare", epoch=wanted.position.epoch):
            segment = self.prepare(wanted)
        try:
            added = window.add(wanted, segment)
        finally:
            if not added:
                segment.close()

    def _open_some(self) -> bool:
        """Open a few more shards before the window reaches them; True if more are left."""
        reader = self._window.unopened()
        if reader is None:
            return False
        # Damaged shards are handled when the window reaches them.
        return not open_shards(reader.segment.maps, lambda: True, self._closed)

    # --- the ranks

    @property
    def ranks(self) -> Ranks:
        """The ranks that the last segment was agreed with."""
        assert self._found is not None
        return self._found

    def _find_ranks(self, job: ProcessGroup | None) -> Ranks:
        """The ranks of `job`, connected at the first use, because some may still start up."""
        if job != self._job:
            self.finish()
            self._found, self._job = None, job
        if self._found is None:
            options, cache_id = self._options, self._cache.cache_id
            timeout_s = options.timeout_s
            deadlines = Deadlines(_shorter(timeout_s), min(_RANKS_DEADLINE_S, 0.5 * timeout_s))
            common = options.to_compare()
            self._found = find_ranks(
                self.instance,
                common,
                cache_id,
                deadlines,
                self._closed,
                job,
                options.replication,
            )
        return self._found

    @property
    def num_ranks(self) -> int:
        """The number of ranks that were found; 0 before that."""
        return 0 if self._found is None else self._found.size

    def _is_requested(self, wanted: Wanted) -> bool:
        """Return whether another rank waits for this one to prepare `wanted`."""
        return self._found is not None and self._found.requested(wanted.round)

    # --- a segment

    def prepare(self, wanted: Wanted) -> Segment:
        """Prepare the segment that is `wanted`, in agreement with all ranks.

        Some shards are opened and verified ahead, more where the trainer has batches to go on with; the
        others are opened when needed. Raises the same CacheStreamError on all ranks, or Cancelled; `finish`
        is to be called then.
        """
        began_s, ranks = time.monotonic(), self._find_ranks(wanted.job)
        in_trainer = functools.partial(self._window.in_trainer, wanted)
        context = DrawContext(self._cache, self._options, ranks, wanted, in_trainer)
        ranks.request(wanted.round, wanted.cancelled)
        # The last snapshot does where the cache cannot be read.
        can_go_on = self._snapshots.maps is not None and self._options.replay is None
        can_go_on = can_go_on and not wanted.position.records
        with self._cache.catalogue.hurried(can_go_on), ExitStack() as undo:
            try:
                self._await_samples(context, can_go_on)
                if ranks.leads:
                    with suppress(CacheError):
                        warn_of_skipped(self._cache)
                with tracing.span("snapshot"):
                    taken = self._snapshots.take(context, self._opened_enough(time.monotonic()))
                undo.callback(taken.lease.release)
                segment = self._make_segment(context, taken)
            except Cancelled:
                raise
            except Exception as error:
                for name in (wanted.round, context.lists, context.order):
                    ranks.report(name, error)
                raise
            self._agree(segment, wanted.round)
            undo.pop_all()
        self._draw.confirm()
        self._snapshots.maps = taken.maps
        self._meter.prepare_s = self.last_s = time.monotonic() - began_s
        self._meter.rank, self._meter.ranks = ranks.rank, ranks.size
        self._meter.report_first()
        return segment

    def _opened_enough(self, began_s: float) -> Callable[[], bool]:
        def enough() -> bool:
            most_s = _URGENT_OPEN_S if self._window.is_urgent() else _AHEAD_OPEN_S
            return time.monotonic() - began_s > most_s

        return enough

    def finish(self) -> None:
        """Release the last snapshot, and write the uses of its shards. Called by the preparing thread."""
        try:
            self._snapshots.finish()
        except CacheStreamError as error:
            logger.warning(
                "%s: the last epochs were not counted as uses of its shards: %s", self._cache.path, error
            )

    def _await_samples(self, context: DrawContext, can_go_on: bool) -> None:
        """Wait for samples if the epoch starts cold: nothing is recorded of it, or no recorded shard is
        cached.
        """
        record = (context.position.records or {}).get(self._cache.cache_id)
        try:
            if self._options.replay is None and (record is None or not self._has_shards_of(record)):
                self._wait_for_samples(len(context.ranks.sharers), context.wanted.cancelled)
        except (SchemaMismatchError, CacheVersionError):
            raise
        except CacheError:
            if not can_go_on:
                raise

    def _has_shards_of(self, record: OrderRecord) -> bool:
        return not sample_counts(self._cache.catalogue).keys().isdisjoint(record.shard_ids.tolist())

    def _wait_for_samples(self, num_ranks: int, cancelled: Flag) -> None:
        """Wait until `min_samples` are cached, or a batch for each of the `num_ranks` ranks of the cache."""

        def pause(seconds: float) -> None:
            if cancelled.wait(seconds):
                raise Cancelled

        options, whole = self._options, self._options.batch_size * num_ranks
        least = options.min_samples or (whole if options.drop_last else num_ranks)
        give_up_s = _shorter(options.timeout_s)
        wait_for_samples(
            self._cache, options.min_samples or whole, give_up_s, least, options.split, pause, options.view
        )

    # --- order and plan

    def _make_segment(self, context: DrawContext, taken: EpochSnapshot) -> Segment:
        options, ranks, position, snapshot = self._options, self.ranks, context.position, taken.snapshot
        dataset = EpochDataset(snapshot, taken.lease, maps=taken.maps)
        rebuilt = None if taken.record is None else rebuild(taken.record)
        size = snapshot.num_samples if rebuilt is None else rebuilt[0].size
        if (limit := context.remaining) is not None:
            size = min(size, limit)
        self._draw.settle(context, size)  # also where a record says what was drawn here: others may draw
        record = taken.record or self._draw.draw(context, dataset, self._record_of(context, taken, size))
        order, bounds = rebuilt or rebuild(record)
        plan, total = self._plan(context, order.size, bounds)
        order = translate(order, record, snapshot)
        return Segment(
            position,
            dataset,
            taken.maps,
            order,
            plan,
            ranks.place,
            total + taken.later_batches,
            record,
            is_resumed=taken.record is not None,
            transform_key=mix_key(options.seed, position.epoch, ranks.data_rank),
            has_others=ranks.size > 1,
            sources=self._draw.sources_in(order, snapshot),
        )

    def _record_of(self, context: DrawContext, taken: EpochSnapshot, size: int) -> OrderRecord:
        """The record of `size` samples of a snapshot in a random order."""
        snapshot, split = taken.snapshot, self._options.split
        return OrderRecord(
            *(snapshot.shard_ids, snapshot.counts, "shuffled", size, context.key),
            split=None if split is None else split.name,
            selected=row_hashes(snapshot),
        )

    def _plan(self, context: DrawContext, size: int, bounds: IntArray | None) -> tuple[Plan, int]:
        """The plan of this rank, and the epoch's batches, before the ranks agree on the smallest number."""
        options, group_size, position = self._options, len(self.ranks.sharers), context.position
        batch_size, drop_last, remaining = options.batch_size, options.drop_last, context.remaining
        if bounds is not None:
            batches = (len(bounds) - 1) // group_size
            if not batches and position.records is None and options.replay is None:
                raise NotEnoughSamplesError(
                    f"{self._cache.path}: each of {group_size} ranks takes a batch, and {size} samples make "
                    f"only {len(bounds) - 1}; wait for more (min_samples=), or make smaller batches"
                )
            return Plan(size, batch_size, group_size, batches, bounds), position.done + batches
        ends = remaining is None or size >= remaining
        if remaining is not None:
            size = min(size, remaining)
        # A pass that does not end the epoch gives whole batches only; the next one gives the other samples.
        batches = count_batches(size, batch_size, group_size, drop_last or not ends)
        if not batches and position.records is None:
            if remaining is not None and remaining < batch_size * group_size:
                raise ConfigError(
                    f"epoch_size={options.epoch_size} makes no batch of {batch_size} for each of "
                    f"{self.ranks.num_data_ranks} ranks: give at least "
                    f"{batch_size * self.ranks.num_data_ranks}"
                )
            raise NotEnoughSamplesError(
                f"{self._cache.path}: {size} samples make no batch of {batch_size} for each of {group_size} "
                "ranks; wait for more (min_samples=), or use a smaller batch_size or drop_last=False"
            )
        rest = batches
        if remaining is not None and not ends:
            rest = count_batches(remaining, batch_size, group_size, drop_last)
        return Plan(size, batch_size, group_size, batches), position.done + rest

    def _agree(self, segment: Segment, name: str) -> None:
        """Settle on the number of batches that every rank can give."""
        ranks, plan, position = self.ranks, segment.plan, segment.position
        mine: Payload = {"batches": plan.num_batches, "total": segment.total}
        if segment.record.listed is not None and plan.ranks > 1:
            mine["order"] = xxhash.xxh3_64_hexdigest(segment.record.listed.values.tobytes())
        if ranks.leads and len(ranks.group) < ranks.size:
            mine["record"] = segment.record.to_state()
            mine["cache"], mine["ranks"] = self._cache.cache_id, len(ranks.sharers)
        answers = ranks.agree(name, mine)
        for rank in ranks.group:
            if answers[rank].get("order") != mine.get("order"):
                raise RankMismatchError(
                    f"rank {rank}'s sampler gave another order than rank {ranks.rank}'s: seed it the same on "
                    "all ranks (a sampler with a `generator` attribute is seeded here), or use a "
                    "DistributedSampler"
                )
        total = min(answer["total"] for answer in answers) if position.total is None else position.total
        batches = min(answer["batches"] for answer in answers)
        segment.total = total
        segment.plan = replace(plan, num_batches=max(0, min(batches, total - position.done)))
        segment.caches = {
            answer["cache"]: (OrderRecord.from_state(answer["record"]), answer["ranks"])
            for answer in answers
            if "record" in answer
        }
        segment.missing = self._count_missing(segment)

    def _count_missing(self, segment: Segment) -> int:
        """The samples of a checkpoint that are not cached any more, here or by ranks that are not there."""
        records, mine = segment.position.records or {}, self._cache.cache_id
        present = segment.caches.keys() or {mine}
        left = [record for cache_id, record in records.items() if cache_id not in present]
        missing = sum(rebuild(record)[0].size for record in left)
        if mine in records:
            missing += rebuild(records[mine])[0].size
            missing -= segment.order.size if segment.is_resumed else 0
        return missing


def _shorter(timeout_s: float) -> float:
    """A deadline before the trainer's own `timeout_s`, because the error of the preparation says more."""
    return min(0.9 * timeout_s, max(0.5 * timeout_s, timeout_s - 1.0))
