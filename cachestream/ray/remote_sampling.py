"""A sampling process that has its units read by actors of a Ray cluster.

The process packs and writes shards, as a local one does; reading, transforming and encoding is done by the
actors (`read_actor`). Each actor has some units, and two calls under way, which return what has come of
these. An actor that dies, is cut off or hangs is replaced, and its units are read again, each alone in an
actor, so that the next death has one cause.
"""

from __future__ import annotations

import pickle
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from cachestream.errors import SourceUnavailableError, WorkerError
from cachestream.ray.connection import check_port, connect
from cachestream.ray.read_actor import (
    COUNTERS,
    ReadActor,
    ReadResult,
    arrived,
    chunks_of_units,
    installed_version,
    outcome,
)
from cachestream.schema import Schema
from cachestream.storage.telemetry import Slot, board_text
from cachestream.transport import object_limit
from cachestream.worker.cluster import ClusterOptions
from cachestream.worker.job import Job, Payload
from cachestream.worker.order import PassPlan
from cachestream.worker.sampling import sampler
from cachestream.worker.sampling.encode import SampleChunk
from cachestream.worker.sampling.fetcher import Delivery
from cachestream.worker.sampling.messages import FillStatus
from cachestream.worker.sampling.shard_writer import QuarantinedError
from cachestream.worker.sampling.unit import Stall, UnitRead

CALLS: Final = 2  # of one actor under way: one is on its way while the next one works
AHEAD_S: Final = 2.0  # of an actor's work, and bytes: the units that it has
AHEAD_BYTES: Final = 16 << 20
MOST_UNITS: Final = 512
MOST_DEATHS: Final = 3  # of actors that start, or that read the same unit alone
_WINDOW: Final = 2  # units submitted ahead, in multiples of those that the actors have
_UNIT_S, _UNIT_BYTES = 0.25, 1 << 20  # assumed of the first unit
_MEMORY: Final = 0.7  # of the last estimate, in a moving average
_GET_S: Final = 10.0
_TICK_S: Final = 0.05
_ABSENT_S: Final = 5.0
_RECONNECT_S: Final = 60.0


@dataclass(slots=True, eq=False)
class PooledActor:
    """An actor, which gets units once it `is_ready`: it has answered.

    `units`: those that it has, by their positions. `heard_s`: the time of the last answer. `work_s` and
    `nbytes`: since the last end of a unit. `unit_s`: the time that it takes for a unit.
    """

    handle: Any
    heard_s: float
    is_ready: bool = False
    calls: deque[Any] = field(default_factory=deque)
    units: dict[int, UnitRead] = field(default_factory=dict)
    stalls: list[Stall] = field(default_factory=list)
    all_wait: bool = False
    work_s: float = 0.0
    nbytes: int = 0
    unit_s: float = _UNIT_S


class RemoteFetcher:
    """Units that are read by actors, in any order, and delivered as they come; used from one thread."""

    def __init__(self, ray: Any, job: Job, options: ClusterOptions, slot: Slot) -> None:
        self._ray, self._options, self._slot = ray, options, slot
        self._hang_s = job.hang_timeout_s
        self._address = ray.get_runtime_context().gcs_address
        self._class = ray.remote(ReadActor).options(
            **{"num_cpus": 1, **options.actor_options, "max_concurrency": 1}
        )
        self._arguments = installed_version(), ray.put(_for_travel(job)), options.num_actors
        self._polled_s = self._ready_s = self._checked_s = time.monotonic()
        self._was_ready, self._failed_starts = False, 0
        self._left: dict[UnitRead, None] = {}  # not delivered to their end, in the order of submission
        self._todo: deque[UnitRead] = deque()
        self._ready: dict[UnitRead, list[SampleChunk]] = {}  # what can be delivered
        # Units to be read alone, each with the deaths of actors that had only this one.
        self._suspects: dict[UnitRead, int] = {}
        self._unit_bytes = float(_UNIT_BYTES)
        self._woken = threading.Event()
        self._plan = ""
        self.actors = [self._new_actor() for _ in range(options.num_actors)]

    def use_plan(self, plan: PassPlan) -> None:
        self._plan = plan.to_json()

    @property
    def capacity(self) -> int:
        """The number of units that the actors have when all are busy."""
        return sum(map(self._most, self.actors))

    # --- the interface of a fetcher

    def __len__(self) -> int:
        """Units submitted and not yet delivered to their end."""
        return len(self._left)

    @property
    def awaited(self) -> UnitRead | None:
        """The first unit, if no unit has anything to deliver."""
        return None if self._ready else next(iter(self._left), None)

    def stalls(self) -> tuple[list[Stall], bool]:
        """The stalls of units; and True if nothing can be delivered because of these."""
        if self._ready or not self._left:
            return [], False
        absent_s = time.monotonic() - self._ready_s
        if absent_s > _ABSENT_S:
            wanted = {"num_cpus": 1, **self._options.actor_options}
            reason = f"no actor runs yet: the Ray cluster at {self._address} has no room for {wanted}"
            return [Stall(self._ready_s, reason)], True
        busy = [actor for actor in self.actors if actor.units]
        stalls = [stall for actor in busy for stall in actor.stalls]
        return stalls, bool(stalls) and all(actor.all_wait for actor in busy)

    def submit(self, unit_reads: list[UnitRead]) -> None:
        """Have `unit_reads` read after those submitted before."""
        self._left |= dict.fromkeys(unit_reads)
        self._todo.extend(unit_reads)

    def wake(self) -> None:
        """Have `next` return soon; from any thread."""
        self._woken.set()

    def next(self, timeout_s: float) -> Delivery | None:
        """Samples or the end of a unit; None at the deadline, or after `wake`.

        Raises SourceUnavailableError if the cluster is gone, WorkerError if the actors cannot do the job.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._ready:
            now_s = time.monotonic()
            self._assign()
            has_come = self._poll(min(_TICK_S, max(0.0, deadline_s - now_s)))
            self._look_at_actors(time.monotonic())
            if not has_come and (self._woken.is_set() or time.monotonic() >= deadline_s):
                self._woken.clear()
                return None
        unit_read = next(iter(self._ready))
        chunks = self._ready.pop(unit_read)
        if unit_read.finished:
            del self._left[unit_read]
        return Delivery(unit_read, chunks, unit_read.finished)

    def stop(self) -> None:
        """Kill all actors."""
        for actor in self.actors:
            self._ray.kill(actor.handle)

    # --- actors come and go

    def _new_actor(self) -> PooledActor:
        actor = PooledActor(self._class.remote(*self._arguments), time.monotonic())
        self._call(actor, [])
        return actor

    def _look_at_actors(self, now_s: float) -> None:
        """Replace actors that hang; raises SourceUnavailableError if the cluster is gone."""
        if (pause_s := now_s - self._polled_s) > 1.0:  # this process waited for something else
            self._ready_s += pause_s
            for actor in self.actors:
                actor.heard_s += pause_s
        self._polled_s = now_s
        for actor in list(self.actors):
            if actor.is_ready and actor.calls and now_s - actor.heard_s >= self._hang_s:
                self._lose(actor, "it hung", deaths=2)  # a hang is not from outside, as a kill may be
        if any(actor.is_ready for actor in self.actors):
            self._ready_s, self._was_ready = now_s, True
        elif now_s - max(self._ready_s, self._checked_s) > _ABSENT_S:
            self._checked_s = now_s
            self._check_cluster(now_s - self._ready_s)

    def _check_cluster(self, absent_s: float) -> None:
        where = f"the Ray cluster at {self._address}"
        try:
            check_port(self._address)
        except OSError as error:
            raise SourceUnavailableError(f"{where} does not answer: {error}") from error
        if self._was_ready and absent_s > _RECONNECT_S:  # a new one may have the same address
            raise SourceUnavailableError(f"{where} has lost all actors")

    def _lose(self, actor: PooledActor, reason: str, deaths: int = 1) -> None:
        """Replace an actor, and have the units that it has not read to their end read again, alone."""
        if not actor.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_DEATHS:
                self._check_cluster(0.0)
                raise WorkerError(f"the actors of engine='ray' die when they start: {reason}")
        self._ray.kill(actor.handle)
        self.actors[self.actors.index(actor)] = self._new_actor()
        for unit_read in actor.units.values():
            deaths_alone = deaths if len(actor.units) == 1 else 0
            self._suspects[unit_read] = self._suspects.get(unit_read, 0) + deaths_alone
            if self._suspects[unit_read] >= MOST_DEATHS:
                error = QuarantinedError(f"reading it ended its actor, again and again: {reason}")
                self._end(unit_read, error)
            else:
                self._todo.appendleft(unit_read)

    # --- units are given to actors

    def _most(self, actor: PooledActor) -> int:
        """The number of units that `actor` is to have."""
        most = min(MOST_UNITS, AHEAD_S / max(actor.unit_s, 1e-6), AHEAD_BYTES / max(self._unit_bytes, 1.0))
        return max(CALLS, int(most))

    def _assign(self) -> None:
        """Give units to actors, and call those that have some: suspects alone, others as far as all have
        some.
        """
        ready = [actor for actor in self.actors if actor.is_ready and len(actor.calls) < CALLS]
        for actor in ready:
            units: list[UnitRead] = []
            if any(unit_read in self._suspects for unit_read in actor.units.values()):
                pass  # it is read alone
            elif self._todo and self._todo[0] in self._suspects:
                units = [] if actor.units else [self._todo.popleft()]
            elif self._todo:
                room = self._most(actor) - len(actor.units) + len(actor.stalls)
                count = min(room, max(1, len(self._todo) // len(self.actors)))
                while len(units) < count and self._todo and self._todo[0] not in self._suspects:
                    units.append(self._todo.popleft())
            if units or actor.units:
                self._call(actor, units)

    def _call(self, actor: PooledActor, units: list[UnitRead]) -> None:
        now_s = time.monotonic()
        if not actor.calls:
            actor.heard_s = now_s
        actor.units |= {unit_read.unit.position: unit_read for unit_read in units}
        rest = [replace(one.unit, first=max(one.unit.first, one.next_offset)) for one in units]
        actor.calls.append(
            actor.handle.read.remote(self._plan, pickle.dumps(rest), object_limit.limit_bytes(1 << 62))
        )

    # --- results

    def _poll(self, timeout_s: float) -> bool:
        """Take what actors have sent; waits for that for up to `timeout_s`. False if nothing came."""
        waiting = {actor.calls[0]: actor for actor in self.actors if actor.calls}
        if not waiting:
            self._woken.wait(timeout_s)
            return False
        found, _ = self._ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if found and len(waiting) > 1:
            found, _ = self._ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for ref in found:
            self._take(waiting[ref])
        return bool(found)

    def _take(self, actor: PooledActor) -> None:
        """Take the result of the first call of an actor."""
        errors = self._ray.exceptions
        try:
            result: ReadResult = self._ray.get(actor.calls.popleft(), timeout=_GET_S)  # it is there
        except errors.RayTaskError as error:
            raise _worker_error(error) from error
        except errors.RayError as error:  # it has died, or the network has lost it or its result
            self._lose(actor, str(error))
            return
        actor.heard_s = now_s = time.monotonic()
        actor.is_ready, self._failed_starts = True, 0
        actor.stalls = [Stall(now_s - age_s, reason) for age_s, reason in result.stalls]
        actor.all_wait = result.all_wait
        for name, growth in zip(COUNTERS, result.counters, strict=True):
            self._slot[name] += growth
        for positions, chunk in result.chunks:
            for position, part in chunks_of_units(positions, arrived(chunk)):
                actor.nbytes += part.nbytes
                unit_read = actor.units[position]
                unit_read.received(part)
                self._ready.setdefault(unit_read, []).append(part)
        for position, failure in result.ends:
            self._end(actor.units.pop(position), None if failure is None else failure.error())
        self._learn(actor, result)

    def _learn(self, actor: PooledActor, result: ReadResult) -> None:
        """Learn from the units that have ended how long one takes, and how large it is."""
        actor.work_s += result.work_s
        if units := len(result.ends):
            actor.unit_s = _MEMORY * actor.unit_s + (1 - _MEMORY) * actor.work_s / units
            self._unit_bytes = _MEMORY * self._unit_bytes + (1 - _MEMORY) * actor.nbytes / units
            actor.work_s, actor.nbytes = 0.0, 0

    def _end(self, unit_read: UnitRead, error: BaseException | None) -> None:
        """Note that a unit is read as far as it is wanted, or has failed."""
        self._suspects.pop(unit_read, None)
        unit_read.error, unit_read.finished = error, True
        self._ready.setdefault(unit_read, [])


def _worker_error(error: Any) -> WorkerError:
    """The error of an actor's own code, which would come again."""
    cause = getattr(error, "cause", None)
    message = str(cause.args[0]) if isinstance(cause, WorkerError) else f"{type(cause).__name__}: {cause}"
    return WorkerError(f"an actor of engine='ray' failed: {message}", str(error))


def _for_travel(job: Job) -> Job:
    """The job with its large buffers as arrays, which the object store hands over without a copy."""
    buffers: Any = tuple(np.frombuffer(buffer, np.uint8) for buffer in job.payload.buffers)
    return replace(job, payload=replace(job.payload, buffers=buffers), sampler=None)


class RayEngine:
    """Reads units by the actors of a cluster."""

    transform = staticmethod(outcome)

    def __init__(self, job: Job, payload: Payload, slot: Slot, stop: threading.Event) -> None:
        options = job.cluster
        assert options is not None
        try:
            ray = connect(options.address)
        except SourceUnavailableError as error:
            slot["silence"] = board_text(str(error))
            if slot["units"]:  # a cluster that has been there before may come back
                raise
            raise WorkerError(str(error)) from error
        signal.signal(signal.SIGTERM, lambda *_: stop.set())  # Ray has taken it
        self.fetcher = RemoteFetcher(ray, job, options, slot)

    @property
    def window(self) -> int:
        return _WINDOW * self.fetcher.capacity

    def use_plan(self, plan: PassPlan) -> None:
        self.fetcher.use_plan(plan)

    def tick(self) -> None:
        pass  # the fetcher adapts by what comes

    def unit_came(self) -> None:
        pass

    def stop(self) -> None:
        """End the actors: those that are left end with this process."""
        self.fetcher.stop()


def run(
    end: socket.socket, job: Job, index: int, slot: Slot, status: FillStatus, schema: Schema | None
) -> int:
    """Be the sampling process of `job`; does not return."""
    return sampler.run(end, job, index, slot, status, schema, RayEngine, later=(SourceUnavailableError,))
