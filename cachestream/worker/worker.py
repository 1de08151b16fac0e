"""`start_worker`: fill a cache in the background, from scripts, notebooks, and every rank of a job."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import check_seconds, suggests_names
from cachestream.errors import ConfigError, SourceUnavailableError, WorkerError, WorkerTimeoutError
from cachestream.linux import open_private
from cachestream.sources.base import Source
from cachestream.sources.open import SOURCE_OPTIONS, open_source, protocols_of
from cachestream.storage.cache import Cache
from cachestream.storage.locks import HeldFile
from cachestream.storage.os_errors import CatalogueDamagedError
from cachestream.storage.settings import choose_split
from cachestream.storage.status import (
    CacheStatus,
    describe_outdated,
    forget_lost_worker,
    lost_worker,
    warn_of_skipped,
)
from cachestream.worker.attachments import LINGER_AT_MOST_S, Attachments, WorkerMonitor, release
from cachestream.worker.cluster import describe, ray_module
from cachestream.worker.job import Job
from cachestream.worker.launch import (
    CONCURRENCY,
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    Launch,
    WorkerOptions,
    head_start,
)
from cachestream.worker.order import PassPlan
from cachestream.worker.transform_identity import is_same_transform

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_S: Final = 0.05
_OF_THE_SOURCE: Final = {
    name: f"{name}= belongs to the source: start_worker(cache, cs.open_source(…, {name}=…)); cs.stream takes it itself"
    for name in SOURCE_OPTIONS
}
_OPENING_S: Final = 8.0  # after so long a warning says that a source is still being opened
_STARTING_S: Final = 15.0  # after so long a warning says that there is no worker yet
logger = logging.getLogger("cachestream")


class Worker:
    """The background worker of a cache, as seen from one of the processes that use it.

    A context manager that releases the worker at the end: a worker stops when no process needs it. One that
    is killed is replaced within seconds by one of the processes that need it.
    """

    def __init__(
        self,
        cache: Cache,
        attachment: HeldFile | None,
        process: subprocess.Popen[bytes] | None,
        linger_s: float = 0.0,
        job: Job | None = None,
    ) -> None:
        self.cache = cache
        self.linger_s = linger_s
        self._attachment = attachment
        self._attachments = Attachments(cache.directory)
        self.attached = process is None  # the worker was already running
        self._monitor = None if job is None else self._start_monitor(job, process)

    def _start_monitor(self, job: Job, process: subprocess.Popen[bytes] | None) -> WorkerMonitor:
        this, attachment = weakref.ref(self), self._attachment

        def is_needed() -> bool:  # a detached worker is monitored as long as this object exists
            return this() is not None if attachment is None else attachment.held

        return WorkerMonitor(self.cache, process, lambda: Launch(job.protocols).give(job), is_needed)

    def status(self) -> CacheStatus:
        """The contents of the cache and the activity of the worker."""
        return self.cache.status()

    def is_alive(self) -> bool:
        """True if the worker runs (resting after a complete pass counts)."""
        return self.cache.has_worker()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the pass over the remote is complete, or the cache is full and the worker rests.

        A full cache is filled further as epochs use its samples, or if its limit is raised, see `status`. The
        next pass, over evicted samples, may be under way on return. Returns False if the worker ended before
        that. Logs a warning if more than 1 % of the samples were skipped. Raises WorkerTimeoutError at the
        deadline, and WorkerError with the traceback from the background if the worker crashed.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        first = 0
        for _ in _polls(math.inf if timeout_s is None else timeout_s):
            alive = self.is_alive()
            state = self.cache.filling.state()
            if state.phase == "failed":
                raise WorkerError(f"the worker of {self.cache.path} failed: {state.message}", state.traceback)
            # The last pass does not count until the worker knows whether another one has to follow.
            last = 0 if state.last_pass is None or state.is_looking else state.last_pass.id
            first = min(first, last) or max(first, last)  # a catalogue made anew counts from 1 again
            if state.phase in ("complete", "full") or last not in (0, first):
                warn_of_skipped(self.cache)
                return True
            # In this order: a worker that is replaced in between is found alive by the last call.
            if not (alive or (self._monitor is not None and self._monitor.will_replace()) or self.is_alive()):
                break
        else:
            raise WorkerTimeoutError(
                f"{self.status()}: not complete within {timeout_s:g} s; "
                "wait longer, or train on what there is"
            )
        if state.phase == "filling" or lost_worker(self.cache.directory) is not None:
            raise WorkerError(
                f"the worker of {self.cache.path} ended without a word: it was killed, or could not write "
                f"(its last output is in {self.cache.directory.worker_file('log.txt')}); start it again: it "
                "goes on where it stopped"
            )
        return False

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the worker for all processes, and wait until it has ended; the samples stay cached.

        Raises WorkerError if the worker still runs at the deadline.
        """
        check_seconds("timeout_s", timeout_s)
        directory = self.cache.directory
        if self.cache.has_worker() or lost_worker(directory) is not None:
            self._attachments.request_stop()  # keeps others from replacing a worker that was killed
            self._wait_until_gone(timeout_s)
            if lost_worker(directory) is not None:
                with self._attachments.locked():
                    forget_lost_worker(directory)
            if not self.cache.has_worker():
                self._attachments.clear_requests()  # a worker that was ending may not have seen the request
        self._attachments.release_own()

    def close(self, timeout_s: float = 30.0) -> None:
        """Release the worker, which stops unless it is detached or another process needs it.

        Stopping takes up to 5 s, longer on a busy machine. Raises WorkerError if the worker still runs at the
        deadline.
        """
        if self._monitor is not None:
            self._monitor.close()
        if self._attachment is None:
            return
        release(self._attachment)
        self._attachment = None
        self._wait_until_gone(timeout_s, unless_needed=True)

    def _wait_until_gone(self, timeout_s: float, *, unless_needed: bool = False) -> None:
        for _ in _polls(timeout_s):
            if not self.is_alive():
                break
            if unless_needed and self._attachments.is_needed():
                return
        else:
            process = self.cache.status().worker
            raise WorkerError(
                f"the worker of {self.cache.path} (pid {process.pid if process else '?'}) is still there "
                f"after {timeout_s:.0f} s; kill that process: the cache stays sound"
            )
        if self._monitor is not None:
            self._monitor.end(timeout_s)  # the worker has released its lock, and is about to end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        how = "attached" if self.attached else "owner"
        return f"<Worker of {self.cache.path}: {self.cache.fill_state()}, {how}>"


def _polls(timeout_s: float) -> Iterator[None]:
    """Yield at once, every `_POLL_S`, and at last after `timeout_s`: SQLite and file locks cannot notify."""
    deadline_s = time.monotonic() + timeout_s
    yield
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left_s))
        yield


@suggests_names(hints=_OF_THE_SOURCE)
def start_worker(
    cache: Cache | str | os.PathLike[str],
    source: Any,
    *,
    num_workers: int | None = None,
    transform: Callable[..., Any] | None = None,
    shard_size: int | str | None = None,
    order: Any = "shuffle",
    seed: int = 0,
    bandwidth_limit: int | str | None = None,
    when_full: str = "evict",
    detach: bool = False,
    concurrency: int = CONCURRENCY,
    hang_timeout_s: float = HANG_TIMEOUT_S,
    partition: tuple[int, int] | str | None = None,
    linger_s: float = 0.0,
    holdout: float | None = None,
    engine: str = "local",
    ray_options: Mapping[str, Any] | None = None,
    share: str | None = None,
    share_required: bool = False,
    on_change: str = "replace",
) -> Worker:
    """Fill `cache` from `source` in background processes; returns at once.

    One supervisor a cache: when one runs already, started by any process, this attaches to it.

    Args:
        cache: a Cache, or the path of one.
        source: a Source, or anything that `open_source` takes.
        num_workers: sampling processes (default: the number of cores, at most 4), or Ray actors (default: 8).
        transform: `fn(sample) -> sample | None` (None drops it), run before caching; closures work. A list or a
            generator is several samples, with the keys `key/0`, `key/1`, …; a tuple is one. Or `fn(sample,
            rng)`, with a `numpy.random.Generator` seeded by (seed, pass, unit, place in the unit): the same
            draws on every attempt. Or `pack_tokens(…)`.
        shard_size: bytes of a full shard (default 64 MB, or less in a small cache).
        order: "shuffle" (anew each pass), "sequential", weights (one a unit, with replacement), a torch Sampler
            over units, or a curriculum: weights as a function of the progress in passes, by which units come
            once a pass.
        seed: of the order, and of the generators that sources get.
        bandwidth_limit: bytes a second for all processes together, such as "40MB/s".
        when_full: "evict" what epochs have used, "wait" until the limit is raised, or "stop".
        detach: let the worker outlive this process (stop it with `cachestream stop`).
        concurrency: units in flight in each process, 1 to 64 (default 16).
        hang_timeout_s: a process in which one sample takes longer (30) is killed and restarted. A unit that does
            not answer for a second lets others go first; after four times `hang_timeout_s` it is left out, if
            its remote answers otherwise.
        partition: `(i, n)`, from 0: the share of node i of n. Shares are disjoint and complete, whatever order,
            seed or pass.
        linger_s: seconds that the worker goes on after this process died of an error or a signal, so that a
            job that is started again finds it at work. After an orderly exit it does not go on.
        holdout: the share of the samples that is held out of training, by their keys
            (`EpochLoader(split=, holdout=)`). These are kept, up to half of the limit, while others are
            replaced.
        engine: "local", or "ray": actors anywhere in a Ray cluster read, decode and transform the units, and this
            cache's own process writes the shards. The samples are the same. See the guide, "Ray clusters".
        ray_options: options of these actors, such as `{"num_cpus": 2}`, as `ray.remote` takes them.
        share: the name of a group of caches in a Ray cluster that fill from one source with one transform, order
            and seed: each unit is read once for all, and its shard is copied from cache to cache.
        share_required: raise SourceUnavailableError where no Ray cluster answers, and read nothing while it is
            away later. Else a warning says so, and each cache reads all of the remote.
        on_change: what becomes of cached samples that another `transform` has made, or other options of the source
            that make samples (`resize=`, `crop=`, `fields=`). "replace": their units are read anew, and
            shard by shard the old ones go as new samples of their units come; "keep": they stay until they are
            evicted; "refuse": ConfigError. A running worker goes on with its own transform. The caches of a
            group (`share=`) keep theirs.

    Raises ConfigError for what cannot work: a limit below one shard, another source's cache, what cannot be
    pickled.
    """
    check_seconds("linger_s", linger_s, 0.0, LINGER_AT_MOST_S)
    options = WorkerOptions(
        num_workers=num_workers,
        shard_size=shard_size,
        order=order,
        bandwidth_limit=bandwidth_limit,
        when_full=when_full,
        concurrency=concurrency,
        hang_timeout_s=hang_timeout_s,
        partition=partition,
        transform=transform,
        seed=seed,
        engine=engine,
        ray_options=ray_options,
        share=share,
        share_required=share_required,
        holdout=holdout,
        on_change=on_change,
    )
    options.check()
    cache = cache if isinstance(cache, Cache) else Cache(cache)
    with head_start(cache, protocols_of(source)) as launch:
        with _warn_if_slow(
            _OPENING_S,
            f"{cache.path} gets nothing so far: opening the source has taken {_OPENING_S:g} s; its remote "
            "does not answer, or it lists slowly",
        ):
            opened = open_source(source)
        job = _job(options, cache, opened)
        _check_cluster(cache, job)
        if holdout is not None:
            choose_split(cache, "train", holdout)  # a start that the job refuses stores no share
        with _warn_if_slow(
            _STARTING_S,
            f"{cache.path}: its worker has not started within {_STARTING_S:g} s (the call gives up after "
            f"three minutes at most): another process holds {cache.directory.worker_file('attach.lock')} "
            "while it starts or stops a worker, or the machine is very busy; see "
            f"{cache.directory.worker_file('log.txt')}",
        ):
            return _start_or_attach(cache, job, launch, detach, linger_s)


@contextmanager
def _warn_if_slow(after_s: float, message: str) -> Iterator[None]:
    """Log `message` as a warning if the block takes longer than `after_s`."""
    timer = threading.Timer(after_s, logger.warning, ("%s", message))
    timer.daemon = True
    with suppress(RuntimeError):  # the system refuses a thread: then it is not said
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _job(options: WorkerOptions, cache: Cache, source: Source) -> Job:
    try:
        return options.job(cache, source)
    except CatalogueDamagedError as error:  # it was lost while no worker ran
        cache.rebuild(error)
        return options.job(cache, source)


def _check_cluster(cache: Cache, job: Job) -> None:
    """Log a warning if the job needs a cluster and none answers; raise SourceUnavailableError if it is
    required.
    """
    if job.cluster is None:
        return
    try:
        ray_module("connection").check_cluster(job.cluster.address, is_required=job.cluster.required)
    except SourceUnavailableError as error:
        if job.cluster.required:
            raise
        then = "its actors read nothing until one does"
        if not job.cluster.num_actors:
            then = (
                f"the group {job.cluster.group!r} shares nothing until one does, and each of its caches "
                "reads all of the remote (share_required=True refuses that)"
            )
        logger.warning("%s: %s; %s", cache.path, error, then)


def _heed_change(cache: Cache, job: Job, *, is_running: bool) -> Job:
    """Say what becomes of samples that another transform makes, or has made, and return the job to that end.

    Raises ConfigError with `on_change="refuse"`. A job that finds another transform at work replaces nothing,
    also if it starts a worker later in place of this one: two jobs would undo each other's work.
    """
    filling = cache.filling
    state, others = filling.state(), filling.samples_of_others(job.transform)
    is_other = is_running and not is_same_transform(state.transform or "", job.transform)
    if job.on_change == "refuse" and (is_other or others):
        made = (
            f"{others} of the {state.num_samples} samples in it were made" if others else "a worker fills it"
        )
        raise ConfigError(
            f"{cache.path}: {made} by another transform (its code differs, a value bound to it, or an option "
            "such as resize=), and on_change='refuse': 'replace' has them read anew and 'keep' leaves them, "
            "once no worker runs; or give the transform of before, or another directory"
        )
    if is_other:
        job = replace(job, on_change="keep")
        logger.warning(
            "the transform has changed, and the worker that already fills %s goes on with the one before: "
            "stop it first ('cachestream stop', worker.stop()), or use another directory",
            cache.path,
        )
    if outdated := describe_outdated(others, state.num_samples, is_replaced=job.replaces):
        logger.warning("%s: %s", cache.path, outdated)
    return job


def _start_or_attach(cache: Cache, job: Job, launch: Launch | None, detach: bool, linger_s: float) -> Worker:
    attachments = Attachments(cache.directory)
    for _ in _polls(START_TIMEOUT_S):
        with attachments.locked():
            is_running = cache.has_worker()
            # A worker that was asked to stop cannot be attached to; it needs the attach lock to leave.
            if is_running and attachments.stop_requested():
                continue
            if is_running and (difference := _difference(cache, job)):
                if attachments.is_used():
                    raise ConfigError(difference)
                attachments.request_stop()  # it lingers, for another source or share
                continue
            job = _heed_change(cache, job, is_running=is_running)
            if is_running:
                logger.info("attached to the worker that already fills %s", cache.path)
            else:
                attachments.clear_requests()
            attachment = None if detach else attachments.attach(linger_s)
            if detach:
                attachments.detach()
            try:
                process = None if is_running else (launch or Launch(job.protocols)).give(job)
                return Worker(cache, attachment, process, linger_s, job)
            except BaseException:
                if attachment is not None:
                    release(attachment)
                raise
    raise WorkerError(f"the worker of {cache.path} was asked to stop and is still there; kill it")


def _difference(cache: Cache, job: Job) -> str:
    """The difference between the job and what the running worker does, and the way out; "" for none."""
    state = cache.filling.state()
    row = state.last_pass
    share = None if row is None else PassPlan.from_json(row.plan).partition
    if state.source not in (None, job.fingerprint) and state.data != job.data:
        return (
            f"a worker is filling {cache.path} from another source ({state.source}, not {job.fingerprint}); "
            "use another cache directory, or stop it and clear the cache"
        )
    if share != job.partition:
        return (
            f"a worker is filling {cache.path} with the share {share or 'of one node alone'}, not "
            f"{job.partition or 'all units'}; give all processes that use one cache the same partition "
            "(cs.stream finds one by itself under torch.distributed, unless it is given partition=)"
        )
    wanted = describe(job.cluster)
    with open(cache.directory.supervisor_lock, encoding="utf-8", opener=open_private) as file:
        running = file.read() or wanted  # nothing yet: it is about to begin, or about to fail
    if running != wanted:
        return (
            f"a worker is filling {cache.path} with {running}, not {wanted}; give all processes that use one "
            "cache the same engine= and share=, or stop that worker first"
        )
    return ""
