"""The status of a cache at one moment, the wait for samples, and the warnings based on the status."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cachestream.config import format_size
from cachestream.errors import NotEnoughSamplesError
from cachestream.repr_html import table
from cachestream.storage.filling import fill_state, phase_now
from cachestream.storage.layout import free_bytes, overhead_bytes, size_of_file
from cachestream.storage.locks import is_held
from cachestream.storage.os_errors import CatalogueDamagedError, DiskFailedError, translated_disk_errors
from cachestream.storage.shard import shard_path
from cachestream.storage.snapshots import count_samples, of_split
from cachestream.storage.tables import DOOMED, LIVE, REPLACED, RESERVED, RETIRING, STRAY
from cachestream.storage.telemetry import Board, LoaderReport, Run, Totals, read_loaders, unfinished_run
from cachestream.storage.view import ALL, View

if TYPE_CHECKING:
    from cachestream.schema import Split
    from cachestream.storage.cache import Cache
    from cachestream.storage.filling import FillState
    from cachestream.storage.layout import Directory
    from cachestream.storage.tables import FailureRow

_POLL_S: Final = 0.02
# Counted for one poll beside its processor time; it takes longer if the process was stopped (SIGSTOP).
_LONGEST_POLL_S: Final = 0.5
_WARN_AFTER_S: Final = 8.0
_WARN_RETRY_S: Final = 0.5
_FEWER: Final = "ask for fewer samples (min_samples, a smaller batch_size, or drop_last=False)"

logger = logging.getLogger("cachestream")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The running worker: its processes, and their counters since it started `uptime_s` ago.

    `bandwidth_bytes_per_s` is its bandwidth limit. `states` is empty and the totals are zero if
    another version of cachestream started it.
    """

    pid: int
    uptime_s: float
    restarts: int
    states: tuple[str, ...]
    totals: Totals
    bandwidth_bytes_per_s: float | None = None

    @property
    def samples_per_s(self) -> float:
        return self.totals.samples / max(self.uptime_s, 1e-9)

    @property
    def fetched_bytes_per_s(self) -> float:
        return self.totals.fetched_bytes / max(self.uptime_s, 1e-9)


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """A cache at one moment.

    `size_bytes` is the disk usage of the whole directory. `evicted_unused_samples` were evicted before an
    epoch used them: by a lower limit, `min_free`, `evict` or `clear`, or for a listing, a drawn order or a
    shard that is brought back. `fill_state` is "filling",
    "complete", "full", "stopped", "failed" or "none"; `fill_message` gives its reason, or what the filling
    waits for, and `epoch_waits` counts how often that was the next epoch. `pass_number` counts passes over
    the remote from 1 (0: none yet). `pass_done` is the share of its units that are done, or None for an
    endless source and while the source `is_listing`: `num_units` is then the number of units listed so far.
    `disk_message` is set when the disk is full, `remote_message` when the worker waits for a remote that does
    not answer. `holdout` is the share of the samples that is held out, None without one, and
    `held_out_samples` the number of them in the cache, as far as they have been counted. `loaders` are those
    that have delivered a batch and are not closed, in any process. `outdated_samples` were made by another
    transform than that of the last worker; `is_replacing` while a worker reads them anew.
    """

    path: str
    cache_id: str
    size_bytes: int
    size_limit: int
    min_free: int
    eviction: str
    num_shards: int
    num_samples: int
    leases: int
    leased_bytes: int
    reserved_bytes: int
    evicted_shards: int
    evicted_samples: int
    evicted_unused_samples: int
    epoch_waits: int
    snapshots: int
    schema: str | None
    source: str | None
    num_units: int | None
    fill_state: str
    fill_message: str
    pass_number: int
    pass_done: float | None
    skipped: int
    failures: tuple[FailureRow, ...]
    quarantined: int
    worker: WorkerStatus | None
    is_listing: bool = False
    disk_message: str = ""
    remote_message: str = ""
    holdout: float | None = None
    held_out_samples: int = 0
    loaders: tuple[LoaderReport, ...] = ()
    outdated_samples: int = 0
    is_replacing: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        done = "" if self.pass_done is None else f", pass {self.pass_number} {self.pass_done:.0%}"
        return (
            f"{self.num_samples} samples in {self.num_shards} shards, {format_size(self.size_bytes)} of "
            f"{format_size(self.size_limit)}, {self.fill_state}{done}{self._outdated}"
        )

    @property
    def _outdated(self) -> str:
        return f", {self.outdated_samples} samples of another transform" if self.outdated_samples else ""

    def _repr_html_(self) -> str:
        done = "" if self.pass_done is None else f", pass {self.pass_number}: {self.pass_done:.0%}"
        rows = {
            "samples": f"{self.num_samples} in {self.num_shards} shards{self._outdated}",
            "size": f"{format_size(self.size_bytes)} of {format_size(self.size_limit)}",
            "filling": f"{self.fill_state}{done}",
            "message": self.fill_message or self.disk_message or self.remote_message,
            "worker": None if self.worker is None else f"pid {self.worker.pid}",
            "evicted": f"{self.evicted_samples} samples ({self.eviction})",
            "leases": self.leases,
            "source": self.source,
        }
        return table(f"Cache {self.path}", rows, self.size_bytes / max(self.size_limit, 1))


def describe_skipped(failures: Sequence[FailureRow]) -> str:
    """The number of skipped samples and the most frequent reason; "" if there are none.

    `failures` have the most frequent first.
    """
    if not failures:
        return ""
    most = failures[0]
    example = f" (first: {most.example})" if most.example else ""
    return f"{sum(one.count for one in failures)} skipped, most often: {most.kind}: {most.reason}{example}"


# Beginning of the source's fingerprint → the option that gives all samples the same fields.
_REMEDIES: Final = {
    "files:": "leave files of other kinds out with extensions=, ",
    "tfrecords:": "say what each feature is to be with features=, ",
    **dict.fromkeys(("parquet:", "mds:", "litdata:"), "choose the columns that all have with columns=, "),
}
_WITH_DEFAULTS: Final = (
    *("files:", "tars:", "tfrecords:", "parquet:", "lines:", "arrow:", "dataset:", "iterable:"),
)


def describe_outdated(outdated: int, num_samples: int, *, is_replaced: bool = False) -> str:
    """The number of samples of another transform, and what becomes of them; "" if there are none.

    `is_replaced`: a worker reads them anew.
    """
    if not outdated:
        return ""
    then = (
        "they stay in the epochs until they are evicted: on_change='replace' has them read anew, "
        "'cachestream clear' (cache.clear()) removes all"
    )
    if is_replaced:
        then = (
            "they are read anew, shard by shard: one is used until the first new samples of its units take "
            "its place (on_change='keep' leaves them as they are)"
        )
    return (
        "the transform has changed (its code, a value bound to it, or an option such as resize=), and "
        f"{outdated} of the {num_samples} cached samples were made by another one; {then}"
    )


def _remedy(cache: Cache, fill: FillState) -> str:
    """Advice when too many samples of a cache were skipped."""
    outdated = cache.filling.samples_of_others(fill.transform or "")
    if fill.failures[0].kind == "schema" and outdated:
        told = describe_outdated(outdated, fill.num_samples)
        return f"most of the cached samples decided what fields all have, and {told}"
    return remedy_for_skipped(fill.failures, fill.source or "")


def remedy_for_skipped(failures: Sequence[FailureRow], source: str) -> str:
    """Advice when too many samples were skipped.

    `failures` have the most frequent first; `source` is the fingerprint.
    """
    if failures[0].kind != "schema":
        return "correct what fails and start again"
    return (
        "most of the first samples decided what fields all have: "
        + "".join(words for kind, words in _REMEDIES.items() if source.startswith(kind))
        + ("give those that some lack a default with fields=, " if source.startswith(_WITH_DEFAULTS) else "")
        + "or make all alike in transform=; then 'cachestream clear CACHE' and start again"
    )


def has_worker(directory: Directory) -> bool:
    """Return whether a worker is running for the cache, in any process."""
    return is_held(directory.supervisor_lock)


def lost_worker(directory: Directory) -> Run | None:
    """The last worker, if it was killed, or its container or machine was stopped.

    None if one runs, or if the last one ended in order.
    """
    path = directory.worker_file("board")
    run = unfinished_run(path)
    if run is None or has_worker(directory):
        return None
    return run if unfinished_run(path) == run else None  # or it has just ended, or another has begun


def forget_lost_worker(directory: Directory) -> None:
    """Record that the last worker ended in order. Requires the attach lock."""
    if lost_worker(directory) is not None:
        Board(directory.worker_file("board")).end()


def describe_loss(lost: Run | None, then: str = "") -> str:
    """The message that a worker was `lost`, and the consequence `then`; "" for None."""
    if lost is None:
        return ""
    then = then or (
        "nothing more is fetched until another is started (cs.start_worker, 'cachestream worker'), which "
        "goes on where it stopped"
    )
    why = "it was killed, or its container or machine was"
    return f"its worker (pid {lost.pid}) ended without a word: {why}; {then}"


def read_filling(cache: Cache) -> tuple[str, FillState]:
    """The phase of the filling now, as `phase_now`, and the recorded state behind it."""
    fill = cache.filling.state()
    phase = phase_now(fill, cache.has_worker())
    if phase != fill.phase:  # the worker may have recorded its end meanwhile
        fill = cache.filling.state()
        phase = phase_now(fill, cache.has_worker())
    return phase, fill


def shortage_of_disk(directory: Directory, min_free_bytes: int) -> str:
    """The reason why nothing can be added whatever the limit, or "".

    The disk is full, or it refuses this user's writes despite free space (quotas, inodes).
    """
    left_bytes = free_bytes(directory.root)
    if left_bytes >= max(min_free_bytes, 1):
        board = _board(directory)
        return "" if board is None else board.refusal()
    return (
        f"the disk has {format_size(left_bytes)} left, and min_free keeps {format_size(min_free_bytes)} of "
        "it free: make room on it, or lower min_free"
    )


def silence_of_remote(directory: Directory) -> str:
    """The remote that the worker waits for and that does not answer; "" if all answer."""
    board = _board(directory)
    said = "" if board is None else board.silence()
    return said and f"waiting for the remote: {said}"


def all_dropped(directory: Directory, fill: FillState) -> str:
    """The number of samples that the transform has dropped, if no other ever came; otherwise ""."""
    board = None if fill.num_samples or fill.written_samples else _board(directory)
    dropped = 0 if board is None else board.totals().dropped
    return (
        f"transform returned None for all {dropped} samples so far, which leaves them out" if dropped else ""
    )


def hindrance(directory: Directory, fill: FillState) -> str:
    """The reason why no samples come at present: worker, disk, remote or transform; "" if none is known."""
    return (
        describe_loss(lost_worker(directory))
        or shortage_of_disk(directory, fill.min_free)
        or silence_of_remote(directory)
        or all_dropped(directory, fill)
    )


def wait_for_samples(
    cache: Cache,
    wanted: int,
    timeout_s: float = math.inf,
    least: int | None = None,
    split: Split | None = None,
    pause: Callable[[float], None] = time.sleep,
    view: View = ALL,
) -> int:
    """Wait until `wanted` samples of `split` and `view` are cached, and return the number of cached ones.

    When no more come, `least` are enough. `pause(seconds)` may raise an error, which ends the wait. Raises
    NotEnoughSamplesError when there are and will be too few. Warns once, after some seconds, why none come.
    """
    least = wanted if least is None else least
    warn_s, waited_s, polled_s, used_s = _WARN_AFTER_S, 0.0, time.monotonic(), time.thread_time()
    while True:
        deadline_s = polled_s + max(_LONGEST_POLL_S, timeout_s - waited_s)
        try:
            with cache.catalogue.patient_until(deadline_s):
                if (have := count_samples(cache, split, view)) >= wanted:
                    return have
                state, fill = read_filling(cache)
                ended = state in ("complete", "full", "failed")
                if ended or waited_s >= timeout_s:
                    # The last samples may have come between the count and the state.
                    if (have := count_samples(cache, split, view)) >= least:
                        return have
                    of = of_split(split)
                    if view.selects:
                        of += f" that where= selects (of {cache.num_samples} in all)"
                    why = f"its filling is '{state}'" if ended else f"after {timeout_s:g} s it is '{state}'"
                    reason = _describe_shortage(cache, fill, have, state, why, ended=ended)
                    raise NotEnoughSamplesError(
                        f"{cache.path} holds {have} samples{of}, {least} are needed, and {reason}"
                    )
                if waited_s > warn_s:
                    is_known = _warn_of_shortage(cache, fill, have, wanted)
                    warn_s = math.inf if is_known else waited_s + _WARN_RETRY_S
        except (CatalogueDamagedError, DiskFailedError):
            # A worker that runs rebuilds the catalogue, or waits for the disk.
            if waited_s >= timeout_s or not cache.catalogue.may_be_mended():
                raise
        pause(_POLL_S)  # SQLite cannot notify
        before_s, polled_s = polled_s, time.monotonic()
        used_before_s, used_s = used_s, time.thread_time()
        waited_s += min(polled_s - before_s, _LONGEST_POLL_S + used_s - used_before_s)


def _warn_of_shortage(cache: Cache, fill: FillState, have: int, wanted: int) -> bool:
    """Log why samples are missing; return whether the reason is known."""
    why = hindrance(cache.directory, fill)
    if why:
        text = "no samples" if not have else f"{have} samples of {wanted}"
        logger.warning("%s holds %s so far: %s", cache.path, text, why)
    else:
        warn_of_skipped(cache)
    return bool(why)


def _describe_shortage(cache: Cache, fill: FillState, have: int, state: str, why: str, *, ended: bool) -> str:
    """The reason why there are only `have` samples, which begins with `why`, and its remedy."""
    hindered, skipped = hindrance(cache.directory, fill), describe_skipped(fill.failures)
    if state == "full" and not hindered:
        why = f"no more fit into its size_limit of {format_size(fill.size_limit)}"
        hint = f"raise that ('cachestream limit CACHE SIZE'), or {_FEWER}"
    elif state == "none":
        hint = "start a worker (cs.start_worker, or 'cachestream worker')"
    elif state == "failed":
        hint = fill.message or "see 'cachestream status CACHE'"
    elif hindered and (state == "full" or not ended):
        hint = hindered
    elif not have and fill.message:
        hint = f"{fill.message}; correct what fails and start again"
    elif sum(one.count for one in fill.failures) > have:
        hint = f"{skipped}; {_remedy(cache, fill)}"
    elif ended:
        hint = f"{_FEWER}, or give more data"
    else:
        hint = fill.message or (
            "does the worker run and the remote answer? See 'cachestream status CACHE', or raise timeout_s"
        )
    return f"{why}: {hint}" + (f" ({skipped})" if skipped and skipped not in hint else "")


def occupied_bytes(cache: Cache) -> int:
    """The disk usage of the whole directory: shards, files being written or removed, and the rest."""
    directory = cache.directory
    with cache.catalogue.reading() as tables:
        shard_bytes, reserved = (
            tables.bytes_in(LIVE, RETIRING, REPLACED, STRAY),
            [row.id for row in tables.unfinished()],
        )
    unfinished_bytes = sum(
        size_of_file(directory.temporary_shard(key)) + size_of_file(shard_path(directory.root, key))
        for key in reserved
    )
    return shard_bytes + unfinished_bytes + overhead_bytes(directory)


def read_status(cache: Cache) -> CacheStatus:
    """The complete status of a cache."""
    directory, leased = cache.directory, cache.reservations.leases.live()
    with cache.catalogue.reading() as tables:
        fill, meta, settings = fill_state(tables), tables.all_meta(), tables.settings
        policy = cache.reservations.policy(tables)
        leased_bytes = tables.bytes_within(leased.merged())
        reserved_bytes = tables.bytes_in(RESERVED, DOOMED)
        held_out_samples = tables.held_out()[0]
        outdated = tables.samples_of_others(fill.transform or "")
    state, schema = phase_now(fill, has_worker(directory)), fill.schema
    current = fill.last_pass
    is_listing = bool(meta.get("listing", 0)) and state != "none"
    length = None if is_listing or current is None else current.length
    return CacheStatus(
        path=directory.root,
        cache_id=settings.cache_id,
        size_bytes=occupied_bytes(cache),
        size_limit=fill.size_limit,
        min_free=fill.min_free,
        eviction=getattr(policy, "__name__", "function") if callable(policy) else policy,
        num_shards=fill.num_shards,
        num_samples=fill.num_samples,
        leases=len(leased.ranges),
        leased_bytes=leased_bytes,
        reserved_bytes=reserved_bytes,
        evicted_shards=fill.evicted_shards,
        evicted_samples=fill.evicted_samples,
        evicted_unused_samples=meta.get("evicted_unused_samples", 0),
        epoch_waits=meta.get("epoch_waits", 0),
        snapshots=fill.snapshots,
        schema=None if schema is None else str(schema),
        source=fill.source,
        num_units=None if current is None or current.length is None else current.length - fill.again,
        fill_state=state,
        fill_message=describe_loss(lost_worker(directory))
        or (fill.message if state != "stopped" else "")
        or all_dropped(directory, fill),
        # Ids of deleted passes are not used again; those of refetched shards are below 0.
        pass_number=0 if current is None else max(1, current.id),
        pass_done=None if length is None else fill.positions_done / length if length else 1.0,
        is_listing=is_listing,
        skipped=sum(failure.count for failure in fill.failures),
        failures=fill.failures,
        quarantined=meta.get("quarantined", 0),
        worker=_worker_status(directory),
        disk_message=shortage_of_disk(directory, fill.min_free),
        remote_message=silence_of_remote(directory),
        holdout=settings.holdout,
        held_out_samples=held_out_samples,
        loaders=tuple(read_loaders(directory)),
        outdated_samples=outdated,
        is_replacing=bool(outdated) and fill.replacing == fill.transform and has_worker(directory),
    )


def _board(directory: Directory) -> Board | None:
    """The board of the running worker, as it is now; None if none runs."""
    path = directory.worker_file("board")
    if not has_worker(directory) or not os.path.exists(path):
        return None
    with translated_disk_errors(path):
        return Board(path, read_only=True)


def _worker_status(directory: Directory) -> WorkerStatus | None:
    board = _board(directory)
    if board is None:
        return None
    uptime_s = max(0.0, time.monotonic() - board.started_s)
    states, limit = tuple(board.states()), board.bandwidth_bytes_per_s()
    return WorkerStatus(board.pid, uptime_s, board.restarts, states, board.totals(), limit)


# Caches and lost workers that this process has warned about.
_warned: set[str] = set()


def is_much(skipped: int, used: int) -> bool:
    """Return whether more than 1 % of the samples were `skipped`, the others being `used`."""
    return skipped > 0.01 * (skipped + used)


def warn_of_skipped(cache: Cache) -> None:
    """Warn, once per cache and process, if more than 1 % of the samples were skipped.

    Also if a field has several shapes, because another transform gave it another one.
    """
    if cache.cache_id in _warned:
        return
    fill = cache.filling.state()
    used = fill.num_samples + fill.evicted_samples
    if is_much(sum(one.count for one in fill.failures), used):
        _warned.add(cache.cache_id)
        logger.warning(
            "%s: %d samples were cached, and %s; %s",
            cache.path,
            used,
            describe_skipped(fill.failures),
            _remedy(cache, fill),
        )
    elif (fields := cache.filling.fields_of_several_shapes()) and (
        outdated := cache.filling.samples_of_others(fill.transform or "")
    ):
        _warned.add(cache.cache_id)
        logger.warning(
            "%s: fields %s have one shape in some shards and another in others, so batches hold lists of "
            "them: %s",
            cache.path,
            fields,
            describe_outdated(outdated, fill.num_samples),
        )


def warn_of_loss(cache: Cache, then: str = "") -> None:
    """Warn, once per worker and process, that the worker was killed, and of the consequence `then`."""
    lost = lost_worker(cache.directory)
    if lost is not None and (key := f"{cache.cache_id} {lost}") not in _warned:
        _warned.add(key)
        logger.warning("%s: %s", cache.path, describe_loss(lost, then))
