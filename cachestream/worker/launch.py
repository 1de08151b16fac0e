"""The start of a worker: its options, checked and made into a job, and the process of its supervisor.

The caller starts that process while the source is still being opened (`head_start`), hands over the job, and
waits for the answer (`Launch.give`).
"""

from __future__ import annotations

import math
import os
import pickle
import select
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from cachestream import tracing
from cachestream.config import (
    SHORTEST_S,
    check_count,
    check_mapping,
    check_seconds,
    format_size,
    parse_size,
)
from cachestream.errors import CacheStreamError, ConfigError, WorkerError
from cachestream.schema import check_holdout
from cachestream.sources import registry as plugins
from cachestream.sources.base import (
    DivisibleSource,
    LabelledSource,
    Source,
    as_incremental,
    listing_digest_of,
    made_with,
    units_of,
    whole_units,
)
from cachestream.sources.mix import MixSource
from cachestream.sources.token_windows import PackTokens, apply_packing
from cachestream.sources.user_code import fingerprint_of
from cachestream.storage.layout import overhead_bytes
from cachestream.storage.locks import lock_file
from cachestream.storage.reservations import HEADROOM_BYTES
from cachestream.storage.settings import held_out_share
from cachestream.storage.telemetry import PROCESSES_AT_MOST, READS_AT_ONCE
from cachestream.transport.remote import Remote
from cachestream.worker.cluster import ENGINES, MOST_ACTORS, ClusterOptions, ray_module
from cachestream.worker.job import Job, Payload, pack
from cachestream.worker.listings import has_plain_names
from cachestream.worker.order import PassPlan, parse_partition
from cachestream.worker.processes import import_path, read_frame, start_python
from cachestream.worker.transform_identity import identity_of_samples, transform_identity
from cachestream.worker.user_order import NAMED, check_order, kind_of

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

CONCURRENCY: Final = 16
HANG_TIMEOUT_S: Final = 30.0
DEFAULT_SHARD: Final = "64MB"
DEFAULT_ACTORS: Final = 8
_WHEN_FULL: Final = ("evict", "wait", "stop")
_ON_CHANGE: Final = ("replace", "keep", "refuse")
START_TIMEOUT_S: Final = 60.0
_DRAW_TIMEOUT_S: Final = 180.0  # of a start for which the user's sampler or curriculum draws a pass


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of `start_worker` that describe the filling; `start_worker` documents them."""

    num_workers: int | None = None
    shard_size: int | str | None = None
    order: Any = "shuffle"
    bandwidth_limit: int | str | None = None
    when_full: str = "evict"
    concurrency: int = CONCURRENCY
    hang_timeout_s: float = HANG_TIMEOUT_S
    partition: Any = None
    transform: Any = None
    seed: int = 0
    engine: str = "local"
    ray_options: Mapping[str, Any] | None = None
    share: str | None = None
    share_required: bool = False
    holdout: float | None = None
    on_change: str = "replace"

    def check(self) -> None:
        """Raise ConfigError for values that are wrong with any cache and source."""
        if self.num_workers is not None:
            most = MOST_ACTORS if self.engine == "ray" else PROCESSES_AT_MOST
            check_count("num_workers", self.num_workers, 1, most)
        self._check_cluster()
        check_count("concurrency", self.concurrency, 1, READS_AT_ONCE)
        if self.when_full not in _WHEN_FULL:
            raise ConfigError(f"when_full={self.when_full!r}: choose one of {', '.join(_WHEN_FULL)}")
        if self.on_change not in _ON_CHANGE:
            raise ConfigError(f"on_change={self.on_change!r}: choose one of {', '.join(_ON_CHANGE)}")
        check_seconds("hang_timeout_s", self.hang_timeout_s, SHORTEST_S)
        if self.transform is not None and not callable(self.transform):
            raise ConfigError(f"transform={self.transform!r}: must be a function of one sample")
        check_count("seed", self.seed, -math.inf)
        if self.shard_size is not None and parse_size(self.shard_size, "shard_size") == 0:
            raise ConfigError(f"shard_size={self.shard_size!r}: must be above 0")
        if self.holdout is not None:
            check_holdout(self.holdout)
        self._bandwidth()
        parse_partition(self.partition)
        kind_of(self.order)

    def _check_cluster(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine={self.engine!r}: choose one of {', '.join(ENGINES)}")
        check_mapping("ray_options", self.ray_options, "{'num_cpus': 2}")
        if self.ray_options and self.engine != "ray":
            raise ConfigError("ray_options= are for the actors of engine='ray'")
        if self.ray_options:
            ray_module("connection").check_actor_options(self.ray_options)
        if self.share is None:
            if self.share_required:
                raise ConfigError("share_required= is of a group of caches: name it with share=")
            return
        if not self.share:
            raise ConfigError("share='': give the group of caches a name")
        if not isinstance(self.order, str) or self.order not in NAMED:
            raise ConfigError(
                "share= needs order='shuffle' or 'sequential': all caches of a group have one order"
            )

    def _check_group(self, cache: Cache, source_name: str, num_units: int | None) -> None:
        """Raise ConfigError if this cache cannot share the filling from this source."""
        if num_units is None:
            raise ConfigError(f"share=: {source_name} has no end, so its units cannot be shared out")
        self._refuse_holdout(cache, "share= and holdout= do not go together yet: hold out files instead")

    def _refuse_holdout(self, cache: Cache, message: str) -> None:
        """Raise ConfigError if samples are to be held out, or the cache holds some out."""
        stored, _ = held_out_share(cache)
        if stored is not None:
            message += f" ({cache.path} holds out {stored:g} of its samples; 'cachestream clear' forgets it)"
        if stored is not None or self.holdout is not None:
            raise ConfigError(message)

    def _cluster(self) -> ClusterOptions | None:
        if self.engine == "local" and self.share is None:
            return None
        return ClusterOptions(
            ray_module("connection").current_address(),
            num_actors=int(self.num_workers or DEFAULT_ACTORS) if self.engine == "ray" else 0,
            actor_options=dict(self.ray_options or {}),
            group=self.share or "",
            required=bool(self.share_required),
            decoders=plugins.plugin_decoders(),
        )

    def job(self, cache: Cache, source: Source) -> Job:
        """The job of the worker that fills `cache` from `source`, by options that `check` has passed.

        Raises ConfigError for options that cannot work with this cache and source.
        """
        partition = parse_partition(self.partition)
        read = source.sources if isinstance(source, MixSource) else (source,)
        if any(getattr(one, "cache_folder", None) == cache.path for one in read):
            raise ConfigError(f"{cache.path}: a cache cannot be filled from itself; give another cache")
        source, transform = apply_packing(source, self.transform)
        if isinstance(self.transform, PackTokens):
            self._refuse_holdout(
                cache, "pack_tokens() has no holdout=: hold out files instead, with two caches"
            )
        source = self._divided(cache, source)
        cluster = self._cluster()
        growing = None
        # The processes of a cluster have no listing that grows: the source is listed to its end first.
        if cluster is None and isinstance(self.order, str) and self.order in NAMED:
            growing = as_incremental(source)
        source_name = type(source).__name__
        num_units = (
            whole_units(units_of(source), source_name) if growing is None else len(growing.first_names)
        )
        fingerprint: object = source.fingerprint
        if not isinstance(fingerprint, str) or not fingerprint:
            raise ConfigError(
                f"{source_name}: fingerprint={fingerprint!r}: must be a str that names the data"
            )
        if partition is not None and num_units is not None and not partition.length(num_units):
            raise ConfigError(
                f"partition={partition}: the source has {num_units} units, too few for every node to get "
                "one; use fewer nodes, or smaller units"
            )
        if self.share is not None:
            self._check_group(cache, source_name, num_units)
        kind, weights, sampler = check_order(self.order, num_units, partition)
        policy = cache.eviction if callable(cache.eviction) else None
        options, state = made_with(source), cache.filling.state()
        recorded = (state.transform or "") if state.source == fingerprint else ""
        identity = identity_of_samples(transform_identity(transform), options, recorded)
        protocols: set[str] = set()

        def collect_protocol(value: Any) -> None:
            if isinstance(value, Remote) and not value.is_local:
                protocols.add(value.protocol)

        return Job(
            root=cache.path,
            sys_path=import_path(),
            fingerprint=fingerprint,
            kind=kind,
            seed=int(self.seed),
            num_units=num_units,
            listing=listing_digest_of(source) if growing is None else growing.first_names.digest,
            num_workers=1 if cluster and cluster.num_actors else self._local_processes,
            concurrency=int(self.concurrency),
            shard_bytes=self._shard_bytes(cache),
            bandwidth_bytes_per_s=self._bandwidth(),
            when_full=self.when_full,
            hang_timeout_s=float(self.hang_timeout_s),
            custom_eviction=policy is not None,
            payload=pack(Payload(source, transform, policy), collect_protocol),
            sampler=None if sampler is None else pack(sampler),
            partition=partition,
            rule=fingerprint_of(self.order) if kind == "curriculum" else "",
            growing=growing is not None,
            label_names=tuple(map(str, source.label_names)) if isinstance(source, LabelledSource) else (),
            protocols=tuple(sorted(protocols)),
            source_module=module
            if (module := type(source).__module__).startswith("cachestream.sources.")
            else "",
            trace=tracing.folder(),
            round_ends=source.round_ends if kind == "shuffle" and isinstance(source, DivisibleSource) else (),
            cluster=cluster,
            mix=tuple(source.whole_weights)
            if isinstance(source, MixSource) and kind == "shuffle" and num_units and self.share is None
            else (),
            transform=identity,
            weights=weights,
            has_names=growing is None and has_plain_names(source),
            on_change=self.on_change,
            data=fingerprint.removesuffix(options),
        )

    @property
    def _local_processes(self) -> int:
        return int(self.num_workers or min(4, os.cpu_count() or 1))

    def _divided(self, cache: Cache, source: Source) -> Source:
        """The source, divided into parts so small that the cache holds samples of many units.

        If the cache has had a pass over the source, the number of parts is that of the last pass.
        """
        is_shuffled = isinstance(self.order, str) and self.order == "shuffle"
        if not isinstance(source, DivisibleSource) or source.round_ends or not is_shuffled:
            return source
        state = cache.filling.state()
        if state.last_pass is not None and state.source == source.fingerprint:
            parts = max(1, len(PassPlan.from_json(state.last_pass.plan).segments))
        else:
            parts = source.parts_for(cache.size_limit)
        return source.divided(parts) if parts > 1 else source

    def _shard_bytes(self, cache: Cache) -> int:
        usable = cache.size_limit - overhead_bytes(cache.directory) - HEADROOM_BYTES
        if self.shard_size is None:
            return min(parse_size(DEFAULT_SHARD), max(1, usable // 8))
        shard_bytes = parse_size(self.shard_size, "shard_size")
        if shard_bytes > usable:
            raise ConfigError(
                f"shard_size={self.shard_size!r} does not fit a cache of {format_size(cache.size_limit)} "
                f"({format_size(max(0, usable))} of it for shards); raise size_limit or lower shard_size"
            )
        return shard_bytes

    def _bandwidth(self) -> float | None:
        if self.bandwidth_limit is None:
            return None
        bytes_per_s = parse_size(self.bandwidth_limit, "bandwidth_limit")
        if bytes_per_s <= 0:
            raise ConfigError("bandwidth_limit must be above 0; None means no limit")
        return float(bytes_per_s)


class Launch:
    """A process that becomes a supervisor: it loads the drivers of `protocols` and waits for its job."""

    def __init__(self, protocols: Collection[str] = ()) -> None:
        try:
            answer, to_answer = os.pipe()
            self._answer = os.fdopen(answer, "rb")
            try:
                self._process: subprocess.Popen[bytes] | None = start_python(
                    "cachestream.worker.supervisor",
                    import_path(),
                    str(to_answer),
                    *protocols,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,  # a `sitecustomize` may print before the supervisor redirects it
                    pass_fds=(to_answer,),
                    start_new_session=True,  # Ctrl-C in the terminal is for the trainer, whose end ends the worker
                )
            except BaseException:
                self._answer.close()
                raise
            finally:
                os.close(to_answer)
        except OSError as error:
            raise WorkerError(
                f"no process can be started for the worker ({error}): raise 'ulimit -u' and 'ulimit -n', "
                "or free memory"
            ) from error

    def give(self, job: Job) -> subprocess.Popen[bytes]:
        """Hand over the job and wait for the answer; returns the process, which fills the cache from now on.

        Raises the error of a supervisor that could not start, or WorkerError if it does not answer.
        """
        process, self._process = self._process, None
        assert process is not None
        try:
            answer = _ask(process, self._answer, job)
        except BaseException:
            _end(process)
            raise
        if isinstance(answer, CacheStreamError):
            process.wait(timeout=START_TIMEOUT_S)
            raise answer
        return process

    def close(self) -> None:
        """End a process that got no job."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with process.stdin, self._answer:
            _end(process)


@contextmanager
def head_start(cache: Cache, protocols: Collection[str]) -> Iterator[Launch | None]:
    """Yield a Launch, closed at the end.

    None if a worker runs already, or another process is about to start one.
    """
    lock = None if cache.has_worker() else lock_file(cache.directory.worker_file("launch.lock"))
    if lock is None:
        yield None
        return
    launch = None
    try:
        launch = Launch(protocols)
        yield launch
    finally:
        lock.release(unlink=True)
        if launch is not None:
            launch.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=5.0)


def _ask(process: subprocess.Popen[bytes], answer: BinaryIO, job: Job) -> Any:
    assert process.stdin is not None
    try:
        # Inside the `try`: closing the pipe to a dead process flushes its buffer, and fails again.
        with process.stdin, answer:
            timeout_s = _DRAW_TIMEOUT_S if job.sampler is not None else START_TIMEOUT_S
            deadline_s = time.monotonic() + timeout_s
            if _send(process.stdin.fileno(), pickle.dumps(job), deadline_s) and _is_ready(
                answer.fileno(), select.POLLIN, deadline_s
            ):
                return read_frame(answer)
        problem = (
            f"did not answer within {timeout_s:.0f} s: the machine is very busy, the disk does not answer, or "
            "order= takes long to draw; start it again"
        )
    except (BrokenPipeError, EOFError):
        problem = f"ended at once (exit code {process.wait(timeout=5.0)}); its error is on stderr"
    raise WorkerError(f"the background worker for {job.root} {problem}")


def _send(fd: int, data: bytes, deadline_s: float) -> bool:
    """Write all of `data`; False at the deadline.

    A job may be larger than the pipe, and its reader may be stopped.
    """
    os.set_blocking(fd, False)
    view = memoryview(data)
    while view:
        if not _is_ready(fd, select.POLLOUT, deadline_s):
            return False
        with suppress(BlockingIOError):
            view = view[os.write(fd, view) :]
    return True


def _is_ready(fd: int, event: int, deadline_s: float) -> bool:
    """Wait until `fd` is ready for `event` or closed at the other end; False at the deadline."""
    waiter = select.poll()  # select() takes no descriptor above 1023
    waiter.register(fd, event)
    return bool(waiter.poll(max(0.0, 1000 * (deadline_s - time.monotonic()))))
