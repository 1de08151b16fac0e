"""`start_worker`: fill a cache in the background, from scripts, notebooks, and every rank of a job."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import check_seconds, keywords_of, reject_unknown
from cachestream.errors import ConfigError, WorkerError, WorkerTimeoutError
from cachestream.sources.open import SOURCE_OPTIONS, open_source, protocols_of
from cachestream.sources.user_code import fingerprint_of
from cachestream.storage.cache import Cache
from cachestream.storage.locks import HeldFile
from cachestream.storage.os_errors import CatalogueDamagedError
from cachestream.storage.settings import choose_split
from cachestream.storage.status import CacheStatus, forget_lost_worker, lost_worker, warn_of_skipped
from cachestream.worker.attachments import LINGER_AT_MOST_S, Attachments, WorkerMonitor
from cachestream.worker.job import Job
from cachestream.worker.launch import (
    CONCURRENCY,
    HANG_TIMEOUT_S,
    START_TIMEOUT_S,
    Launch,
    WorkerOptions,
    head_start,
)
from cachestream.worker.order import Partition, PassPlan

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_S: Final = 0.05
_OPENING_S: Final = 8.0  # after so long a warning says that a source is still being opened
logger = logging.getLogger("cachestream")


class Worker:
    """The background worker of a cache, as seen from one of the processes that use it.

    A context manager that lets the worker go at the end: the worker stops when no process needs it. A worker
    that is killed meanwhile is replaced within seconds by one of these processes.
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
        self._monitor = None if job is None else self._watch(job, process)

    def _watch(self, job: Job, process: subprocess.Popen[bytes] | None) -> WorkerMonitor:
        this, attachment = weakref.ref(self), self._attachment

        def is_needed() -> bool:  # of a detached worker: as long as this object is there
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
            state, last = self._progress()
            first = min(first, last) or max(first, last)  # a catalogue made anew counts from 1 again
            if state == "failed":
                failure = self.cache.filling.state()
                raise WorkerError(
                    f"the worker of {self.cache.path} failed: {failure.message}", failure.traceback
                )
            if state in ("complete", "full") or last not in (0, first):
                warn_of_skipped(self.cache)
                return True
            if not (alive or self.is_alive() or (self._monitor is not None and self._monitor.will_replace())):
                break
        else:
            raise WorkerTimeoutError(
                f"{self.status()}: not complete within {timeout_s:g} s; "
                "wait longer, or train on what there is"
            )
        if state == "filling" or lost_worker(self.cache.directory) is not None:
            raise WorkerError(
                f"the worker of {self.cache.path} ended without a word: it was killed, or could not write (what it still "
                f"could say is in {self.cache.directory.worker_file('log.txt')}); start it again: it goes on where it "
                "stopped"
            )
        return False

    def _progress(self) -> tuple[str, int]:
        """The state of the filling that the worker recorded, and the id of its pass.

        The id is 0 without a pass, and until the worker knows if another pass has to follow.
        """
        state = self.cache.filling.state()
        return state.phase, 0 if state.last_pass is None or state.is_looking else state.last_pass.id

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop the worker for all processes, and wait until it is gone; the samples stay cached.

        Raises WorkerError if the worker is still there at the deadline.
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
        for held in list(_own_attachments):
            if os.path.dirname(held.path) == directory.worker:
                _release(held)

    def close(self, timeout_s: float = 30.0) -> None:
        """Let the worker go: it stops unless another process needs it, or it is detached.

        This takes up to 5 s, longer on a busy machine; raises WorkerError if the worker is still there at the
        deadline.
        """
        if self._monitor is not None:
            self._monitor.close()
        if self._attachment is None:
            return
        _release(self._attachment)
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
                f"the worker of {self.cache.path} (pid {process.pid if process else '?'}) is still there after "
                f"{timeout_s:.0f} s; kill that process: the cache stays sound"
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
    """Yield at once, every `_POLL_S`, and a last time after `timeout_s`: SQLite and locks cannot notify."""
    deadline_s = time.monotonic() + timeout_s
    yield
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(min(_POLL_S, left_s))
        yield


# A worker lives as long as the process that started it, also when the caller dropped the Worker.
_own_attachments: set[HeldFile] = set()


def _release_at_exit() -> None:
    """Let all workers go if the process ends in order; after an error a restarted job may need them."""
    if not hasattr(sys, "last_value"):
        for attachment in list(_own_attachments):
            _release(attachment)


atexit.register(_release_at_exit)


def _release(attachment: HeldFile) -> None:
    attachment.release(unlink=True)
    _own_attachments.discard(attachment)


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
    **unknown: object,
) -> Worker:
    """Fill `cache` from `source` in background processes; returns at once.

    One supervisor a cache: when one runs already, started by any process, this attaches to it.

    Args:
        cache: a Cache, or the path of one.
        source: a Source, or anything that `open_source` takes.
        num_workers: sampling processes (default: the number of cores, at most 4).
        transform: `fn(sample) -> sample | None` (None drops it), run before caching; closures work. Or
            `fn(sample, rng)`, with a `numpy.random.Generator` seeded by (seed, pass, unit, place in the unit): the same draws on
            every attempt.
        shard_size: bytes of a full shard (default 64 MB, or less in a small cache).
        order: "shuffle" (anew each pass), "sequential", weights (one a unit, with replacement), a torch Sampler over
            units, or a curriculum: weights as a function of the progress in passes, by which units come once a pass.
        seed: of the order, and of the generators that sources get.
        bandwidth_limit: bytes a second for all processes together, such as "40MB/s".
        when_full: "evict" what epochs have used, "wait" until the limit is raised, or "stop".
        detach: let the worker outlive this process (stop it with `cachestream stop`).
        concurrency: units in flight in each process, 1 to 64.
        hang_timeout_s: a process in which one sample takes longer is killed and restarted. A unit that does not
            answer for a third of that lets others go first; after four times that it is left out, if its remote
            does answer.
        partition: `(i, n)`, from 0: the share of node i of n: disjoint and complete, whatever order, seed or pass.
        linger_s: seconds that the worker goes on after this process died of an error or a signal (none after an
            end in order): a job that is started again finds it at work.
        holdout: the share of the samples that is held out of training, by their keys (`EpochLoader(split=, holdout=)`).
            These are kept, up to half of the limit, while others are replaced.
        unknown: refused, with the name that is meant.

    Raises ConfigError for what cannot work: a limit below one shard, another source's cache, what cannot be
    pickled.
    """
    _refuse_source_options(unknown)
    reject_unknown("start_worker", unknown, ("cache", "source", *keywords_of(start_worker)))
    check_seconds("linger_s", linger_s, 0.0, LINGER_AT_MOST_S)
    options = WorkerOptions(
        *(num_workers, shard_size, order, bandwidth_limit, when_full, concurrency, hang_timeout_s, partition),
        *(transform, seed),
    )
    options.check()
    cache = cache if isinstance(cache, Cache) else Cache(cache)
    if holdout is not None:
        choose_split(cache, "train", holdout)
    with head_start(cache, protocols_of(source)) as launch:
        with _warn_if_slow(cache):
            opened = open_source(source)
        try:
            job = options.job(cache, opened)
        except CatalogueDamagedError:  # it was lost while no worker ran
            cache.rebuild()
            job = options.job(cache, opened)
        worker = _start_or_attach(cache, job, launch, detach, linger_s)
    _warn_if_transform_changed(worker, transform)
    return worker


@contextmanager
def _warn_if_slow(cache: Cache) -> Iterator[None]:
    """Log a warning if the block, which opens the source, takes long."""
    message = (
        f"{cache.path} gets nothing so far: opening the source has taken {_OPENING_S:g} s; its remote does not answer, "
        "or it lists slowly"
    )
    timer = threading.Timer(_OPENING_S, logger.warning, ("%s", message))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refuse_source_options(options: Mapping[str, object]) -> None:
    """Raise ConfigError for an option that belongs to the source."""
    for name in options:
        if name in SOURCE_OPTIONS:
            raise ConfigError(
                f"{name}= belongs to the source: start_worker(cache, cs.open_source(…, {name}=…)); cs.stream takes it itself"
            )


def _warn_if_transform_changed(worker: Worker, transform: Callable[..., Any] | None) -> None:
    if _transform_has_changed(worker, transform):
        logger.warning(
            "the transform has changed, and %s keeps the samples of the one before%s; to make them anew, "
            "'cachestream clear' the cache (cache.clear()), or use another directory",
            worker.cache.path,
            ", which the running worker goes on with" if worker.attached else "",
        )


def _transform_has_changed(worker: Worker, transform: Callable[..., Any] | None) -> bool:
    """True if samples are cached that another transform made; only `transform_fingerprint` counts.

    Records the transform of a worker that this process has started.
    """
    fingerprint = transform_fingerprint(transform)
    state = worker.cache.filling.state()
    known = state.transform
    if known == fingerprint:
        return False
    if not worker.attached:
        worker.cache.filling.record_transform(fingerprint)
    # Other versions of Python compile the same function to something else.
    is_comparable = known and fingerprint and known.partition(":")[0] == fingerprint.partition(":")[0]
    return bool(is_comparable and state.num_samples)


def transform_fingerprint(transform: Callable[..., Any] | None) -> str:
    """A fingerprint of the code of a transform, the same in every process; "" if the code cannot be seen.

    Changes in functions that the transform calls, in what it closes over, and in files that it reads go
    unnoticed.
    """
    while isinstance(transform, functools.partial):
        transform = transform.func
    version = "python {}.{}".format(*sys.version_info)
    if transform is None:
        return f"{version}:"
    function = getattr(transform, "__func__", transform)
    code: Any = getattr(function, "__code__", None) or getattr(type(transform).__call__, "__code__", None)
    has_code = isinstance(code, CodeType)
    return f"{version}:{fingerprint_of(code)}" if has_code else ""


def _start_or_attach(cache: Cache, job: Job, launch: Launch | None, detach: bool, linger_s: float) -> Worker:
    attachments = Attachments(cache.directory)
    for _ in _polls(START_TIMEOUT_S):
        with attachments.locked():
            is_running = cache.has_worker()
            # A worker that was asked to stop cannot be attached to; it needs the attach lock to leave.
            if is_running and attachments.stop_requested():
                continue
            if is_running and not attachments.is_used() and not _fills_as_asked(cache, job):
                attachments.request_stop()  # it lingers, for another source or share
                continue
            if is_running:
                _check_same_source(cache, job)
                logger.info("attached to the worker that already fills %s", cache.path)
            else:
                attachments.clear_requests()
            attachment = _hold_worker(attachments, detach, linger_s)
            try:
                process = None if is_running else (launch or Launch(job.protocols)).give(job)
                return Worker(cache, attachment, process, linger_s, job)
            except BaseException:
                if attachment is not None:
                    _release(attachment)
                raise
    raise WorkerError(f"the worker of {cache.path} was asked to stop and is still there; kill it")


def _hold_worker(attachments: Attachments, detach: bool, linger_s: float) -> HeldFile | None:
    """Keep the worker running for as long as this process lives; None if it is to run until it is stopped."""
    if detach:
        attachments.detach()
        return None
    attachment = attachments.attach(linger_s)
    _own_attachments.add(attachment)
    return attachment


def _what_is_filled(cache: Cache) -> tuple[str | None, Partition | None]:
    """The source and the share that the running worker fills the cache with."""
    state = cache.filling.state()
    row = state.last_pass
    return state.source, None if row is None else PassPlan.from_json(row.plan).partition


def _fills_as_asked(cache: Cache, job: Job) -> bool:
    return _what_is_filled(cache) in ((job.fingerprint, job.partition), (None, job.partition))


def _check_same_source(cache: Cache, job: Job) -> None:
    known, share = _what_is_filled(cache)
    if known is not None and known != job.fingerprint:
        raise ConfigError(
            f"a worker is filling {cache.path} from another source ({known}, not {job.fingerprint}); "
            "use another cache directory, or stop it and clear the cache"
        )
    if share != job.partition:
        raise ConfigError(
            f"a worker is filling {cache.path} with the share {share or 'of one node alone'}, not "
            f"{job.partition or 'all units'}; give all processes that use one cache the same partition (cs.stream "
            "finds one by itself under torch.distributed, unless it is given partition=)"
        )
