"""The actors of a cluster that read units for a cache: started, asked until they are ready, and replaced."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from cachestream.errors import SourceUnavailableError, WorkerError
from cachestream.worker.cluster.connection import ClusterOptions, check_port
from cachestream.worker.cluster.read_actor import CALLS, ReadActor, installed_version
from cachestream.worker.job import Job
from cachestream.worker.units import Stall, UnitRead

MOST_DEATHS: Final = 3  # of actors that start, or that read the same unit alone
GET_S: Final = 10.0
_UNIT_S: Final = 0.25  # assumed of the first unit
_AGAIN_S: Final = 0.5
_ABSENT_S: Final = 5.0
_RECONNECT_S: Final = 60.0


@dataclass(slots=True, eq=False)
class PooledActor:
    """An actor; it gets units while it is `ready`: its `ping` was answered. The next comes at `ping_at_s`.

    `unit_s`: the time that it takes for a unit.
    """

    handle: Any
    ping: Any = None
    ping_at_s: float = 0.0
    ready: bool = False
    calls: list[ActorCall] = field(default_factory=list)
    unit_s: float = _UNIT_S


@dataclass(slots=True, eq=False)
class ActorCall:
    """A group of units that an actor reads; `alone`: nothing else is read by the actor meanwhile.

    The unit at `index` is read now, since `unit_since_s`. The last result came at `heard_s`. `work_s`: the
    time that the actor has spent on it.
    """

    actor: PooledActor
    stream: Any
    units: list[UnitRead]
    alone: bool
    heard_s: float
    unit_since_s: float
    index: int = 0
    work_s: float = 0.0
    bytes: int = 0
    was_killed: bool = False

    @property
    def left(self) -> list[UnitRead]:
        """The units that have not been read to their end."""
        return [unit_read for unit_read in self.units[self.index :] if not unit_read.finished]


class ActorPool:
    """As many `actors` as `options` tell, set up for `job`."""

    def __init__(self, ray: Any, job: Job, options: ClusterOptions) -> None:
        self._ray, self._options = ray, options
        self._address = ray.get_runtime_context().gcs_address
        self._class = ray.remote(ReadActor).options(
            **{"num_cpus": 1, "max_restarts": -1, **options.actor_options, "max_concurrency": CALLS}
        )
        self._job_ref = ray.put(_for_travel(job))
        self.actors = [PooledActor(self._class.remote()) for _ in range(options.num_actors)]
        self._failed_starts = 0
        self._absent_s, self._check_at_s, self._was_ready = time.monotonic(), 0.0, False

    def close(self) -> None:
        """Kill all actors."""
        for actor in self.actors:
            self._ray.kill(actor.handle)

    def tick(self, now_s: float) -> Stall | None:
        """Ask the actors that are not ready; returns a stall if none has been ready for some time."""
        for actor in self.actors:
            if not actor.ready and actor.ping is None and now_s >= actor.ping_at_s:
                actor.ping = actor.handle.ready.remote(
                    installed_version(), self._job_ref, self._options.num_actors
                )
        if any(actor.ready for actor in self.actors):
            self._absent_s, self._was_ready = now_s, True
        if now_s - self._absent_s <= _ABSENT_S:
            return None
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + _ABSENT_S
            self._check_cluster(now_s)
        options = {"num_cpus": 1, **self._options.actor_options}
        reason = f"no actor runs yet: the Ray cluster at {self._address} has no room for {options}"
        return Stall(self._absent_s, reason)

    def _check_cluster(self, now_s: float) -> None:
        """Raise SourceUnavailableError if the cluster is gone."""
        try:
            check_port(self._address)
        except OSError as error:
            raise SourceUnavailableError(
                f"the Ray cluster at {self._address} does not answer: {error}"
            ) from error
        if self._was_ready and now_s - self._absent_s > _RECONNECT_S:  # a new one may have the same address
            raise SourceUnavailableError(f"the Ray cluster at {self._address} has lost all actors")

    def take_answer(self, actor: PooledActor) -> None:
        """Take the answer of an actor that was asked whether it is ready."""
        ping, actor.ping = actor.ping, None
        errors = self._ray.exceptions
        try:
            self._ray.get(ping, timeout=GET_S)
        except errors.RayTaskError as error:
            raise worker_error(error) from error
        except errors.ActorDiedError as error:
            self._failed_starts += 1
            if self._failed_starts >= MOST_DEATHS:
                raise WorkerError(f"the actors of engine='ray' die when they start: {error}") from error
            self.replace(actor)
        except errors.RayError:
            actor.ping_at_s = time.monotonic() + _AGAIN_S
        else:
            actor.ready, self._failed_starts = True, 0

    def replace(self, actor: PooledActor) -> None:
        """Make another actor in place of one that is dead, or that does not answer."""
        self._ray.kill(actor.handle)
        actor.handle, actor.ready, actor.ping = self._class.remote(), False, None
        actor.ping_at_s = time.monotonic() + _AGAIN_S

    @staticmethod
    def set_up_again(actor: PooledActor) -> None:
        """Use an actor that was restarted once it is ready."""
        if actor.ready:
            actor.ready, actor.ping_at_s = False, time.monotonic() + _AGAIN_S


def worker_error(error: Any) -> WorkerError:
    """The error of an actor's own code, which would come again."""
    cause = getattr(error, "cause", None)
    message = str(cause.args[0]) if isinstance(cause, WorkerError) else f"{type(cause).__name__}: {cause}"
    return WorkerError(f"an actor of engine='ray' failed: {message}", str(error))


def _for_travel(job: Job) -> Job:
    """The job with its large buffers as arrays, which the object store hands over without a copy."""
    buffers: Any = tuple(np.frombuffer(buffer, np.uint8) for buffer in job.payload.buffers)
    return replace(job, payload=replace(job.payload, buffers=buffers), sampler=None)
