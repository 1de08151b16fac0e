"""A sampling process that has its units read by actors of a Ray cluster.

The process packs and writes shards, as a local one does; reading, transforming and encoding is done by the
actors (`read_actor`), which it starts, watches and kills.

A unit whose actor dies is read again, alone in an actor, so that the next death has one cause. A unit that
takes much longer than others is read by another actor as well, and what comes first counts: backup tasks
(Dean and Ghemawat, "MapReduce: Simplified Data Processing on Large Clusters", OSDI 2004).
"""

from __future__ import annotations

import pickle
import signal
import socket
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from cachestream.errors import SourceUnavailableError, WorkerError
from cachestream.schema import Schema
from cachestream.storage.telemetry import Slot, board_text
from cachestream.transport import object_limit
from cachestream.worker.cluster.actor_pool import (
    GET_S,
    MOST_DEATHS,
    ActorCall,
    ActorPool,
    PooledActor,
    worker_error,
)
from cachestream.worker.cluster.connection import ClusterOptions, connect
from cachestream.worker.cluster.read_actor import (
    CALLS,
    COUNTERS,
    NotSetUpError,
    ReadResult,
    UnitEnd,
    UnitTask,
    arrived,
    chunks_of_units,
    outcome,
)
from cachestream.worker.cluster.remote_fetcher import RemoteFetcher
from cachestream.worker.job import Job, Payload
from cachestream.worker.messages import FillStatus
from cachestream.worker.order import PassPlan
from cachestream.worker.sampling import sampler
from cachestream.worker.sampling.encode import SampleChunk, Table
from cachestream.worker.sampling.engine import BUFFER_BYTES
from cachestream.worker.sampling.shard_writer import QuarantinedError
from cachestream.worker.units import Stall, UnitRead

LANES: Final = CALLS - 1  # calls of an actor besides a backup: one group is read while another is transformed
GROUP_S: Final = 1.0
GROUP_BYTES: Final = 8 << 20
MOST_UNITS: Final = 256  # of a group
BACKUP_S: Final = 2.0
BACKUP_FACTOR: Final = 4.0  # of the median time of a unit
_WINDOW: Final = 2  # units submitted ahead, in multiples of those that are read
_STOP_S: Final = 1.0
_UNIT_BYTES: Final = 1 << 20  # assumed of the first unit
_MEMORY: Final = 0.7  # of the last estimate, in a moving average
_RECENT: Final = 64
_BYTES_PER_ACTOR: Final = 8 << 20
_MOST_BYTES: Final = 512 << 20
_IN_FLIGHT: Final = 2  # results of one call in the object store
_TICK_S: Final = 0.05
_IDLE_S: Final = 0.1


class Dispatcher:
    """Has the units of `fetcher` read by actors; `run` is the target of a thread."""

    def __init__(self, ray: Any, job: Job, options: ClusterOptions, fetcher: RemoteFetcher) -> None:
        self._ray, self._fetcher = ray, fetcher
        self._hang_s = job.hang_timeout_s
        self._pool = ActorPool(ray, job, options)
        self._reading: dict[UnitRead, list[ActorCall]] = {}
        self._suspects: deque[UnitRead] = deque()  # units to be read alone
        self._deaths: Counter[UnitRead] = Counter()  # of actors that read them alone; 0 after others
        self._unit_s: deque[float] = deque(maxlen=_RECENT)
        self._unit_bytes = float(_UNIT_BYTES)
        self._schemas: dict[Schema, Schema] = {}
        self.counters: deque[tuple[float, ...]] = deque()  # the growth of COUNTERS, of each result
        self.plan = ""

    def run(self) -> None:
        """Work until the fetcher is stopped; an error ends the fetcher."""
        try:
            while not self._fetcher.stopped:
                now_s = time.monotonic()
                self._fetcher.absence = self._pool.tick(now_s)
                self._assign(now_s)
                self._back_up(now_s)
                self._kill_hanging(now_s)
                self._receive(now_s)
        except BaseException as error:  # noqa: BLE001  raised again in the main thread
            self._fetcher.fail(error)
        finally:
            self._pool.close()

    @property
    def group_size(self) -> int:
        """The number of units that make a group of an actor of the usual speed."""
        unit_s = statistics.median(actor.unit_s for actor in self._pool.actors)
        return self._size(unit_s)

    def _size(self, unit_s: float) -> int:
        most = min(MOST_UNITS, GROUP_S / max(unit_s, 1e-6), GROUP_BYTES / max(self._unit_bytes, 1.0))
        return max(1, int(most))

    # --- assignment

    def _assign(self, now_s: float) -> None:
        """Give units to actors: suspects alone, else as many as make good groups."""
        ready = [actor for actor in self._pool.actors if actor.ready]
        if self._suspects:
            for actor in ready:
                if self._suspects and not actor.calls:
                    self._call(actor, [self._suspects.popleft()], now_s, alone=True)
            return
        for lane in range(LANES):
            for actor in ready:
                if len(actor.calls) != lane or any(call.alone for call in actor.calls):
                    continue
                share = max(1, self._fetcher.queued // (LANES * len(ready)))
                if not (units := self._fetcher.take(min(self._size(actor.unit_s), share))):
                    return
                self._call(actor, units, now_s)

    def _call(self, actor: PooledActor, units: list[UnitRead], now_s: float, *, alone: bool = False) -> None:
        tasks = [UnitTask.of(unit_read, now_s) for unit_read in units]
        stream = actor.handle.read.options(
            num_returns="streaming", _generator_backpressure_num_objects=_IN_FLIGHT
        ).remote(self.plan, pickle.dumps(tasks), object_limit.limit_bytes(1 << 62))
        call = ActorCall(actor, stream, units, alone, now_s, now_s)
        actor.calls.append(call)
        for unit_read in units:
            self._reading.setdefault(unit_read, []).append(call)

    def _calls(self) -> Iterable[ActorCall]:
        return [call for actor in self._pool.actors for call in actor.calls]

    def _back_up(self, now_s: float) -> None:
        """Have units that take much longer than others read by another actor as well."""
        calls = [call for call in self._calls() if now_s - call.unit_since_s >= BACKUP_S]
        if not calls or not self._unit_s:
            return
        limit_s = max(BACKUP_S, BACKUP_FACTOR * statistics.median(self._unit_s))
        for call in calls:
            left = [u for u in call.left if len(self._reading[u]) == 1 and u not in self._deaths]
            is_due = now_s - call.unit_since_s >= limit_s
            if not left or not is_due:
                continue
            others = [
                actor
                for actor in self._pool.actors
                if actor is not call.actor
                and actor.ready
                and len(actor.calls) < CALLS
                and not any(other.alone for other in actor.calls)
            ]
            if others:
                self._call(min(others, key=lambda actor: (len(actor.calls), actor.unit_s)), left, now_s)

    def _kill_hanging(self, now_s: float) -> None:
        """Kill actors that show no life; one that does not even die is replaced."""
        for call in list(self._calls()):
            if now_s - call.heard_s < self._hang_s:
                continue
            call.heard_s = now_s
            if call.was_killed:
                self._pool.replace(call.actor)
                self._lose(call, "it did not answer", is_death=True)
            else:
                call.was_killed = True
                self._ray.kill(call.actor.handle, no_restart=False)

    # --- results

    def _receive(self, now_s: float) -> None:
        """Take what actors have sent, as far as there is room for it."""
        waiting: dict[Any, PooledActor | ActorCall] = {
            a.ping: a for a in self._pool.actors if a.ping is not None
        }
        for call in self._calls():
            left = call.left
            if left and not self._fetcher.has_room:
                call.unit_since_s += now_s - call.heard_s
                call.heard_s = now_s
            else:
                waiting[call.stream] = call
        if not waiting:
            self._fetcher.wait_for_work(_IDLE_S)
            return
        refs = list(waiting)
        found, _ = self._ray.wait(refs, num_returns=1, timeout=_TICK_S)
        if found and len(refs) > 1:
            found, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in found:
            one = waiting[ref]
            if isinstance(one, PooledActor):
                self._pool.take_answer(one)
            else:
                self._on_result(one)

    def _on_result(self, call: ActorCall) -> None:
        """Take the next result of `call`, or its end."""
        errors = self._ray.exceptions
        deaths = (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.NodeDiedError,
        )
        try:
            result = self._ray.get(next(call.stream), timeout=GET_S)  # it is ready
        except StopIteration:
            self._lose(call, "it ended early", is_death=False)
        except errors.RayTaskError as error:
            if not isinstance(error.cause, NotSetUpError):
                raise worker_error(error) from error
            self._lose(call, "it was restarted", is_death=False)
            self._pool.set_up_again(call.actor)
        except deaths as error:
            self._lose(call, str(error), is_death=True)
        except errors.RayError as error:  # the result was lost on its way
            self._lose(call, str(error), is_death=False)
        else:
            self._on_items(call, result)

    def _on_items(self, call: ActorCall, result: ReadResult) -> None:
        now_s = time.monotonic()
        call.heard_s = now_s
        call.work_s += result.work_s
        self.counters.append(result.counters)
        for indices, chunk in result.chunks:
            for index, part in chunks_of_units(indices, self._arrived(chunk)):
                call.index = max(call.index, index)
                call.bytes += part.nbytes
                self._fetcher.put(call.units[index], part)
        for index, end in result.ends:
            call.index, call.unit_since_s = max(call.index, index + 1), now_s
            self._on_end(call, call.units[index], end, now_s)
        self._learn(call, len(result.ends))

    def _arrived(self, chunk: SampleChunk) -> SampleChunk:
        if not isinstance(chunk.samples, Table):
            return chunk
        schema = self._schemas.setdefault(chunk.samples.schema, chunk.samples.schema)
        if len(self._schemas) > 4 * _RECENT:  # of fields whose shapes vary
            self._schemas.clear()
        return replace(chunk, samples=arrived(chunk.samples, schema))

    def _learn(self, call: ActorCall, units: int) -> None:
        """Learn from `units` that have ended how long a unit takes, and how large it is."""
        if not units:
            return
        actor, unit_s, unit_bytes = call.actor, call.work_s / units, call.bytes / units
        actor.unit_s = _MEMORY * actor.unit_s + (1 - _MEMORY) * unit_s
        self._unit_bytes = _MEMORY * self._unit_bytes + (1 - _MEMORY) * unit_bytes
        self._unit_s.append(unit_s)
        call.work_s, call.bytes = 0.0, 0

    def _on_end(self, call: ActorCall, unit_read: UnitRead, end: UnitEnd, now_s: float) -> None:
        others = self._forget(unit_read, call)
        if unit_read.finished:
            return
        if end.pause_s is None:
            self._deaths.pop(unit_read, None)
            self._fetcher.end(unit_read, None if end.failure is None else end.failure.error())
        elif not others:
            reason = "" if end.failure is None else end.failure.message
            unit_read.stall, unit_read.retries = Stall(now_s - end.stall_age_s, reason), end.retries
            self._fetcher.pause(unit_read, end.pause_s)

    def _forget(self, unit_read: UnitRead, call: ActorCall) -> bool:
        """Note that `call` reads the unit no more; True if another call does."""
        calls = self._reading.get(unit_read, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._reading.pop(unit_read, None)
        return bool(calls)

    def _lose(self, call: ActorCall, reason: str, *, is_death: bool) -> None:
        """End a call, and have the units that it has not read to their end read again."""
        actor, left = call.actor, call.left
        if call in actor.calls:
            actor.calls.remove(call)
        again = [unit_read for unit_read in left if not self._forget(unit_read, call)]
        for unit_read in call.units:
            self._forget(unit_read, call)
        if not is_death:
            self._fetcher.give_back(again)
            return
        self._deaths.update(dict.fromkeys(left, 0))  # they get no backup, which might only die as well
        self._pool.set_up_again(actor)
        for unit_read in again:
            # A hang is not from outside, as a kill may be.
            self._deaths[unit_read] += (2 if call.was_killed else 1) if call.alone else 0
            if self._deaths[unit_read] >= MOST_DEATHS:
                del self._deaths[unit_read]
                error = QuarantinedError(f"reading it ended its actor, again and again: {reason}")
                self._fetcher.end(unit_read, error)
            else:
                self._suspects.append(unit_read)


class RayEngine:
    """Reads units by the actors of a cluster."""

    transform = staticmethod(outcome)

    def __init__(self, job: Job, payload: Payload, slot: Slot, stop: threading.Event) -> None:
        options = job.cluster
        assert options is not None
        self._slot, self._actors = slot, options.num_actors
        self.fetcher = RemoteFetcher(max(BUFFER_BYTES, min(_MOST_BYTES, self._actors * _BYTES_PER_ACTOR)))
        ray = self._connect(options)
        signal.signal(signal.SIGTERM, lambda *_: stop.set())  # Ray has taken it
        self._dispatcher = Dispatcher(ray, job, options, self.fetcher)
        self._thread = threading.Thread(target=self._dispatcher.run, name="dispatch", daemon=True)
        self._thread.start()

    def _connect(self, options: ClusterOptions) -> Any:
        """Connect to the cluster; only a cluster that has been there before may come back."""
        try:
            return connect(options.address)
        except SourceUnavailableError as error:
            self._slot["silence"] = board_text(str(error))
            if self._slot["units"]:
                raise
            raise WorkerError(str(error)) from error

    @property
    def window(self) -> int:
        return _WINDOW * LANES * self._actors * self._dispatcher.group_size

    def use_plan(self, plan: PassPlan) -> None:
        self._dispatcher.plan = plan.to_json()

    def tick(self) -> None:
        """Add what the actors have counted to the counters of this process."""
        while counters := self._dispatcher.counters:
            for name, growth in zip(COUNTERS, counters.popleft(), strict=True):
                self._slot[name] += growth

    def unit_came(self) -> None:
        pass

    def stop(self) -> None:
        """End the reading, and the actors with it: those that are left end with this process."""
        self.fetcher.stop()
        self._thread.join(_STOP_S)


def run(
    end: socket.socket, job: Job, index: int, slot: Slot, status: FillStatus, schema: Schema | None
) -> int:
    """Be the sampling process of `job`; does not return."""
    return sampler.run(end, job, index, slot, status, schema, RayEngine, later=(SourceUnavailableError,))
