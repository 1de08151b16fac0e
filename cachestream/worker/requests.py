"""The requests of a supervisor's processes: units, space, and the publication of what they have written."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cachestream.errors import (
    CacheError,
    CacheFullError,
    CacheLockedError,
    CacheStreamError,
    ConfigError,
    WorkerError,
)
from cachestream.storage.os_errors import CatalogueDamagedError, DiskFailedError
from cachestream.storage.publish import CatalogueReplacedError, Progress, Publisher, Reserved
from cachestream.storage.reservations import Owner
from cachestream.storage.settings import held_out_share
from cachestream.storage.telemetry import NO_SPACE, Board, board_text
from cachestream.worker.channel import Channel, Message
from cachestream.worker.health import GiveUpError
from cachestream.worker.job import Job
from cachestream.worker.passes import block_size
from cachestream.worker.planner import Planner
from cachestream.worker.sampling.messages import FillStatus, Publication
from cachestream.worker.sampling.packer import Election, Votes

if TYPE_CHECKING:
    from cachestream.schema import Schema
    from cachestream.storage.cache import Cache
    from cachestream.storage.progress import Suspect

logger = logging.getLogger("cachestream.worker")

_SPACE_WAITS_S: Final = (0.02, 1.0)  # the first and the longest pause before space is looked for again
_STATUS_S: Final = 1.0
_RECORD_S: Final = 0.5
_MISFITS: Final = 20  # new samples with other fields than the outdated ones: then all have them
_PASSING: Final = (CacheFullError, DiskFailedError, CacheLockedError)  # errors that may be over soon
_FATAL: Final = (
    CatalogueDamagedError,
    CatalogueReplacedError,
    ConfigError,
    WorkerError,
)  # of no process alone


@dataclass(frozen=True, slots=True)
class _SpaceRequest:
    """A process that waits for space for files of these sizes, to answer the question `number`."""

    process: int
    channel: Channel
    number: int
    sizes: tuple[int, ...]


class Requests:
    """Answers the processes of one supervisor, which are known by their numbers.

    Errors of the catalogue that is damaged, or was replaced, are for the caller: then all that was handed out
    is void.
    """

    def __init__(
        self,
        job: Job,
        cache: Cache,
        planner: Planner,
        board: Board,
        must_wait: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._must_wait = must_wait  # for the names of the units, by which cached ones are known
        self._clock = clock
        self._job, self._cache, self._planner, self._board = job, cache, planner, board
        self._owner = Owner.temporary(cache.directory, "supervisor")
        self._channels: dict[int, Channel] = {}  # of the sampling processes
        self._wanting: dict[int, int] = {}  # process → the number of units that it wants
        self._flushing: set[int] = set()  # processes that were told to publish what they have
        self._waiting: deque[_SpaceRequest] = deque()
        self._space_at_s, self._pause_s, self._leases_ns = 0.0, _SPACE_WAITS_S[0], 0
        self._reserved: dict[int, dict[int, Reserved]] = {}
        self._status_at_s = self._recorded_s = 0.0
        self.is_closed = False
        self.begin()

    def begin(self) -> None:
        """Begin with what the catalogue holds now; no sampling process may run."""
        cache = self._cache
        self._publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, self._owner.name)
        self._election = Election()
        self.schema: Schema | None = cache.schema
        self.status = self._read_status()
        self._planner.begin()
        self._replace(self._planner.outdated_twice())
        self._misfits = 0

    def close(self) -> None:
        """Hand out nothing any more: the processes are to end."""
        self.is_closed = True

    def release(self) -> None:
        """Cancel what is reserved: all processes have ended."""
        for process in list(self._reserved):
            self._cancel_all(process)
        self._owner.release()

    @property
    def is_pressed(self) -> bool:
        """True if a process waits for space, which is looked for again soon."""
        return bool(self._waiting)

    # --- processes come and go

    def has_started(self, process: int, channel: Channel) -> None:
        """Note the channel of a sampling process that has begun."""
        self._channels[process] = channel

    def has_ended(self, process: int, suspects: Iterable[Suspect] = ()) -> None:
        """Free what a process had: its units and its reservations."""
        self._channels.pop(process, None)
        self._wanting.pop(process, None)
        self._flushing.discard(process)
        self._waiting = deque(one for one in self._waiting if one.process != process)
        self._election.votes.pop(process, None)
        self._planner.has_died(process, suspects)
        self._cancel_all(process)

    def _cancel_all(self, process: int) -> None:
        if reserved := self._reserved.pop(process, None):
            self._publisher.cancel(list(reserved.values()))

    # --- messages

    def handle(self, process: int, channel: Channel, message: Message) -> None:
        """Act on a message of a process."""
        kind, number, arguments = message
        if kind == "want":
            (self._wanting[process],) = arguments
        elif kind == "votes":
            self._vote(process, channel, *arguments)
        elif kind == "reserve":
            self._waiting.append(_SpaceRequest(process, channel, number, *arguments))
            self._space_at_s = min(self._space_at_s, self._clock() + _SPACE_WAITS_S[1])
            if len(self._waiting) == 1:
                self._space_at_s = 0.0
        elif kind == "alive":
            pass
        else:
            self.answer(channel, number, lambda: self._do(kind, process, *arguments))

    @staticmethod
    def answer(channel: Channel, number: int, do: Callable[[], Any]) -> None:
        """Answer a question by the result of `do`, or by its error, which is raised too if it is of no
        process alone.
        """
        try:
            channel.answer(number, do())
        except Exception as error:
            known = isinstance(error, CacheStreamError)
            channel.answer(number, error if known else CacheError(f"{type(error).__name__}: {error}"))
            if not known or isinstance(error, _FATAL):
                raise

    def _do(self, kind: str, process: int, *arguments: Any) -> Any:
        if kind == "publish":
            return self.publish(process, *arguments)
        if kind == "cancel":
            return self._cancel(process, *arguments)
        if kind == "reserve_now":
            return self._reserve(process, *arguments)
        raise ValueError(f"a process asks for {kind!r}")

    def _vote(self, process: int, channel: Channel, votes: Votes) -> None:
        if self.schema is None:
            self._election.vote(process, votes, self._clock())
        else:
            channel.tell("schema", self.schema)

    def _reserve(
        self, process: int, sizes: tuple[int, ...], may_evict: bool, spare_unused: bool = True
    ) -> list[Reserved] | None:
        try:
            reserved = self._publisher.reserve(sizes, may_evict=may_evict, spare_unused=spare_unused)
        except _PASSING as error:
            self._show_refusal(process, str(error))
            return None
        if reserved is not None:
            self._reserved.setdefault(process, {}).update((one.id, one) for one in reserved)
        return reserved

    def _show_refusal(self, process: int, refusal: str) -> None:
        """Show on the board why a process gets no space, until it has published; and in the log, once."""
        if process >= 0:
            slot = self._board.slot(process)
            if not slot["refusal"]:
                logger.warning("%s; trying again", refusal)
            slot["refusal"] = board_text(refusal)

    def _cancel(self, process: int, reserved: tuple[Reserved, ...]) -> None:
        for one in reserved:
            self._reserved.get(process, {}).pop(one.id, None)
        self._publisher.cancel(reserved)
        self._space_at_s = 0.0

    def publish(self, process: int, publication: Publication) -> None:
        """Publish what a process has written, with its progress; see `Publisher.commit`."""
        planner = self._planner
        for shard in publication.shards:
            self._reserved.get(process, {}).pop(shard.id, None)
        self._check_fields(publication)
        replaces = planner.replaced_by(publication)
        with planner.noted(process, publication.finished, publication.advanced):
            self._publisher.commit(
                publication.shards,
                publication.pass_id,
                publication.spans,
                Progress(planner.row, publication.failures + tuple(planner.failures)),
                decided=self.schema,
                replaces=replaces,
            )
        self._space_at_s = 0.0
        planner.forget_outdated(replaces, sum(shard.num_samples for shard in publication.shards))
        planner.failures.clear()
        planner.is_dirty, self._recorded_s = False, self._clock()
        if publication.shards and (not self.status.has_samples or self.status.holdout is not None):
            self.look_at_cache()  # before the process begins another shard

    def _check_fields(self, publication: Publication) -> None:
        """Raise GiveUpError if samples cannot replace those of another transform: a cache has one schema."""
        if self._planner.outdated is None or self._misfits < 0:
            return
        if publication.shards:
            self._misfits = -1  # they fit
            return
        failures = [one for one in publication.failures if one.kind == "schema"]
        self._misfits += sum(one.count for one in failures)
        if self._misfits >= _MISFITS:
            raise GiveUpError(
                "",
                "the transform has changed, and makes samples with other fields than those cached "
                f"({failures[0].reason}), which therefore cannot be replaced one by one: empty the cache "
                "('cachestream clear'), or use another directory",
            )

    # --- what is done between messages

    def serve(self, now_s: float) -> bool:
        """Give processes what they wait for, as far as there is any; True if another look is due at once."""
        self._decide(now_s)
        self._give_space(now_s)
        has_passed_over = self._give_units()
        if self._planner.is_dirty and now_s - self._recorded_s >= _RECORD_S:
            self.record()
        if now_s >= self._status_at_s:
            self.look_at_cache()
        return has_passed_over

    def record(self) -> None:
        """Record the progress of the pass, if some is not recorded yet."""
        planner = self._planner
        self._recorded_s = self._clock()
        if planner.is_dirty:
            self._publisher.commit((), 0, (), Progress(planner.row, tuple(planner.failures)))
            planner.failures.clear()
            planner.is_dirty = False

    def look_at_cache(self) -> None:
        """Tell the sampling processes what has changed in the cache."""
        self._status_at_s = self._clock() + _STATUS_S
        if (status := self._read_status()) != self.status:
            self.status = status
            self._tell_all("status", status)

    def _read_status(self) -> FillStatus:
        share, held_out_bytes = held_out_share(self._cache)
        return FillStatus(self._cache.size_limit, self._cache.num_samples > 0, share, held_out_bytes)

    def _tell_all(self, kind: str, *arguments: Any) -> None:
        for channel in self._channels.values():
            channel.tell(kind, *arguments)

    def _decide(self, now_s: float) -> None:
        """Decide on the fields of the cache, once most of the first samples agree."""
        if self.schema is None and (winner := self._election.winner(now_s)) is not None:
            self.schema = winner
            self._tell_all("schema", winner)

    def _give_space(self, now_s: float) -> None:
        """Reserve for those that wait, in turn; look again after a while, or when an epoch begins or ends."""
        if not self._waiting or (now_s < self._space_at_s and not self._have_leases_changed()):
            return
        may_evict = self._job.when_full == "evict"
        while self._waiting:
            one = self._waiting[0]
            try:
                reserved = self._reserve(one.process, one.sizes, may_evict)
                if reserved is None and self._make_room(one):
                    reserved = self._reserve(one.process, one.sizes, may_evict)
            except CacheError as error:
                self._waiting.popleft()
                one.channel.answer(one.number, error)  # which ends the process
                if isinstance(error, _FATAL):
                    raise
                continue
            if reserved is None:
                for waiting in self._waiting:
                    self._board.slot(waiting.process)["state"] = NO_SPACE
                self._space_at_s = now_s + self._pause_s
                self._pause_s = min(_SPACE_WAITS_S[1], 2 * self._pause_s)
                return
            self._waiting.popleft()
            self._pause_s = _SPACE_WAITS_S[0]
            one.channel.answer(one.number, reserved)

    def _make_room(self, wanted: _SpaceRequest) -> bool:
        """Take the fewest outdated shards out of the cache that make room for what is `wanted`, with those
        that were taken before and that epochs still hold; True if there are any.
        """
        try:
            missing_bytes = self._cache.reservations.missing_bytes(wanted.sizes)
            return self._replace(self._planner.outdated_in_hand(missing_bytes))
        except _PASSING as error:
            self._show_refusal(wanted.process, str(error))
            return False

    def _replace(self, shard_ids: Sequence[int]) -> bool:
        """Take outdated shards out of the cache, whose samples are made anew; True if there are any."""
        if shard_ids:
            self._publisher.commit((), 0, (), Progress(), replaces=shard_ids)
            self._planner.forget_outdated(shard_ids)
        return bool(shard_ids)

    def _have_leases_changed(self) -> bool:
        seen_ns = self._leases_ns
        with suppress(OSError):
            self._leases_ns = os.stat(self._cache.directory.leases).st_mtime_ns
        return seen_ns != self._leases_ns

    def _give_units(self) -> bool:
        planner, has_passed_over = self._planner, False
        if self.is_closed or (self.status.has_samples and self._must_wait()):
            return False
        for process, wanted in list(self._wanting.items()):
            channel = self._channels.get(process)
            if channel is None:
                continue
            most = min(
                wanted,
                block_size(None if planner.plan is None else planner.plan.length, self._job.num_workers),
            )
            assignment = planner.take(process, most)
            has_passed_over |= planner.passed_over
            if assignment is not None:
                self._flushing.discard(process)
                del self._wanting[process]
                channel.tell("units", assignment.row, assignment.units, assignment.alone)
            elif planner.is_handed_out and not planner.passed_over:
                del self._wanting[process]
                channel.tell("end")
            elif planner.wants_idle and process not in self._flushing:
                self._flushing.add(process)
                channel.tell("flush")
        return has_passed_over
