"""From a prepared segment to the schedule's shelf: its batches gathered, transformed, and sent on their way."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from cachestream.config import with_generator
from cachestream.errors import CorruptShardError
from cachestream.permutation import mix_key
from cachestream.training.batches import packed
from cachestream.training.copying import Copier
from cachestream.training.crew import Crew
from cachestream.training.epoch import Segment
from cachestream.training.feed import Feed
from cachestream.training.flow import Flow, can_flow
from cachestream.training.gather import LARGE_BYTES
from cachestream.training.parcels import Delivery, Parcel
from cachestream.training.prepare import Preparer
from cachestream.training.ranks import Cancelled
from cachestream.training.reading import Gathered, read_batches
from cachestream.training.schedule import Schedule
from cachestream.training.transfer import BatchTransform, Transfer

__all__ = ["Gathering"]

_MOST_THREADS: Final = 2  # two copy as fast as the memory goes here


class _Work(NamedTuple):
    """Batches to be completed, of `segment`: it keeps their maps."""

    segment: Segment
    gathered: Gathered | Flow


class Gathering:
    """The work of the gathering thread; where batches are transformed, a second one shares it."""

    def __init__(
        self,
        schedule: Schedule,
        preparer: Preparer,
        transfer: Transfer,
        transform: BatchTransform | None,
        quarantine: Callable[[int, str], None],
        feed: Feed | None,
    ) -> None:
        self._schedule = schedule
        self._preparer = preparer
        self._transfer = transfer
        self._transform = None if transform is None else with_generator(transform)
        self._quarantine = quarantine
        self.feed = feed
        self._copier = Copier(schedule.was_hurried)

    def run(self, segment: Segment) -> None:
        """Put all batches of `segment` into the queue, as they are gathered: a few small ones or a large one at a time."""
        threads = self._threads(segment)
        # Large copies are shared by torch's own threads, which need no GIL; transforms are shared by ours.
        hands = 1 if self._transform is None else threads
        self._copier.use(threads if hands == 1 and segment.batch_bytes >= LARGE_BYTES else 1)
        crew = Crew(hands, self._finish, self._deliver)
        assert segment.places is not None
        batches = read_batches(
            segment,
            segment.places,
            self._transfer.pool,
            lambda *damage: self._on_damage(segment, *damage),
            crew.settle,
            self.feed if can_flow(segment) else None,
        )
        # By `map`, which does not keep what it gave: each batch kept is one more buffer, and a slower cache.
        if crew.run(map(functools.partial(_Work, segment), batches)) and segment.last:
            self._schedule.put(Parcel(segment, is_end=True))

    def _finish(self, work: _Work) -> tuple[Parcel, BaseException | None]:
        """Complete batches, up to the first that fails, and send them where they are trained on."""
        segment, gathered = work
        if isinstance(gathered, Flow):
            return gathered, None
        parcel = Parcel(segment)
        try:
            for copy in gathered.copies:
                self._copier.run(copy)
            self._send(parcel, gathered)
        except BaseException as error:  # noqa: BLE001 - raised by `_deliver`, after what came before it
            return parcel, error
        return parcel, None

    def _send(self, parcel: Parcel, gathered: Gathered) -> None:
        segment, send = parcel.segment, self._transfer.send
        schema, done = segment.snapshot.schema, segment.request.done + gathered.first
        for columns, size, skipped in zip(gathered.batches, gathered.sizes, gathered.skipped, strict=True):
            done += 1
            if size:
                staged = send(packed(columns, schema), self._transform_of(segment, done))
                parcel.batches.append(Delivery(staged, done, size, skipped))
            elif not self._preparer.alone:
                raise CorruptShardError(
                    f"all samples of a batch of epoch {segment.request.epoch} lie in damaged shards, and the "
                    "ranks must make the same steps; run 'cachestream verify CACHE --repair' and start again"
                )

    def _transform_of(self, segment: Segment, number: int) -> Callable[[Any], Any] | None:
        """The transform for batch `number` of an epoch on this rank: it draws the same in any thread, and after a resume."""
        if self._transform is None:
            return None
        transform, device = self._transform, self._transfer.device
        seed = mix_key(segment.transform_key, number) & (2**63 - 1)
        return lambda batch: transform(batch, lambda: torch.Generator(device).manual_seed(seed))

    def _deliver(self, finished: tuple[Parcel, BaseException | None]) -> bool:
        parcel, error = finished
        if isinstance(parcel, Flow):
            return self._follow(parcel)
        wanted = not len(parcel) or self._schedule.put(parcel)
        if error is None:
            return wanted
        try:
            raise error
        finally:
            del error, finished  # its traceback has this frame

    def _follow(self, flow: Flow) -> bool:
        """Have `flow` gathered, until the trainer has had most of it; False when nobody wants it any more."""
        flow.begin(self._threads(flow.segment))
        if self._schedule.put(flow):
            while self._schedule.follow(flow):
                flow.ask_ahead()
        wanted = self._schedule.wanted(flow)
        if not wanted:
            flow.discard()
        return wanted

    @staticmethod
    def _threads(segment: Segment) -> int:
        return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // segment.plan.ranks))

    def _on_damage(self, segment: Segment, shard_id: int, error: CorruptShardError) -> None:
        if self._schedule.stale(segment.request):
            raise Cancelled  # its lease has ended: the shard may be gone by right
        self._quarantine(shard_id, str(error))
