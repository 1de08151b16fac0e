"""One look at a cache: what the catalogue, the leases and the worker's board say at one moment."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from cachestream.config import format_size
from cachestream.model import Schema
from cachestream.storage.admission import Admission
from cachestream.storage.board import Board, Run, lasting_run
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.directory import Directory, free_bytes, overhead_bytes
from cachestream.storage.eviction import EvictionPolicy
from cachestream.storage.faults import translated_disk_errors
from cachestream.storage.locks import is_held
from cachestream.storage.status import CacheStatus, WorkerStatus
from cachestream.storage.tables import Tables

__all__ = [
    "RESTS",
    "WAITS",
    "all_dropped",
    "describe_loss",
    "forget_lost_worker",
    "has_worker",
    "hindrance",
    "lost_worker",
    "occupied_bytes",
    "read_status",
    "shortage_of_disk",
    "silence_of_remote",
    "state_of_filling",
]


# Why nothing is fetched into a full cache that evicts: "full" without an epoch in use, "filling" with one.
RESTS: Final = "full: rests until an epoch uses it"
WAITS: Final = "waiting for the next epoch"


def has_worker(directory: Directory) -> bool:
    """Whether a worker is running for the cache, in any process."""
    return is_held(directory.worker_file("supervisor.lock"))


def lost_worker(directory: Directory) -> Run | None:
    """The last worker, if it ended without a word: it was killed, or its container or machine was. None where one runs, or the
    last one ended in order.
    """
    path = directory.worker_file("board")
    run = lasting_run(path)
    if run is None or has_worker(directory):
        return None
    return run if lasting_run(path) == run else None  # else it has just ended in order, or another has begun


def forget_lost_worker(directory: Directory) -> None:
    """Take the last worker for one that ended in order. With the attach lock."""
    if lost_worker(directory) is not None:
        Board(directory.worker_file("board")).end()


def describe_loss(lost: Run | None, then: str = "") -> str:
    """That a worker was `lost`, and what is done `then`, or is to be done; "" for None."""
    if lost is None:
        return ""
    then = then or (
        "nothing more is fetched until another is started (cs.start_worker, 'cachestream worker'), which goes on where it "
        "stopped"
    )
    return f"its worker (pid {lost.pid}) ended without a word: it was killed, or its container or machine was; {then}"


def state_of_filling(directory: Directory, tables: Tables) -> str:
    """What the filling does: "filling", "complete", "full", "stopped", "failed" or "none" (never begun)."""
    state = str(tables.meta("fill_state", "none"))
    if state == "none":  # or it is the catalogue that was lost: the worker will tell the new one
        return "filling" if has_worker(directory) else state
    goes_on = state == "filling" or (state == "full" and tables.meta("fill_message") == RESTS)
    return "stopped" if goes_on and not has_worker(directory) else state


def shortage_of_disk(directory: Directory, tables: Tables) -> str:
    """Why nothing can be added whatever the limit says: the disk is full, or takes no more bytes from us, whatever is free
    (quotas, inodes); "" where it does.
    """
    min_free_bytes, left_bytes = int(tables.meta("min_free", 0)), free_bytes(directory.root)
    if left_bytes >= max(min_free_bytes, 1):
        board = _board(directory)
        return "" if board is None else board.refusal()
    return (
        f"the disk has {format_size(left_bytes)} left, and min_free keeps {format_size(min_free_bytes)} of it free: "
        "make room on it, or lower min_free"
    )


def silence_of_remote(directory: Directory) -> str:
    """What the worker waits for that does not answer; "" where all do."""
    board = _board(directory)
    said = "" if board is None else board.silence()
    return said and f"waiting for the remote: {said}"


def all_dropped(directory: Directory, tables: Tables) -> str:
    """How many samples the transform has left out, where nothing else has come; "" where something has."""
    board = None if tables.totals()[1] or tables.meta("written_samples", 0) else _board(directory)
    dropped = 0 if board is None else board.totals().dropped
    return (
        f"transform returned None for all {dropped} samples so far, which leaves them out" if dropped else ""
    )


def hindrance(directory: Directory, tables: Tables) -> str:
    """Why nothing comes at present: the worker, the disk, the remote or the transform; "" where none is known to be at
    fault.
    """
    return (
        describe_loss(lost_worker(directory))
        or shortage_of_disk(directory, tables)
        or silence_of_remote(directory)
        or all_dropped(directory, tables)
    )


def occupied_bytes(directory: Directory, tables: Tables) -> int:
    """What the whole directory occupies on disk: shards, what is being written or removed, and the rest."""
    in_work = directory.bytes_of(reservation.id for reservation in tables.reservations())
    return tables.totals()[2] + in_work + overhead_bytes(directory)


def read_status(
    directory: Directory, catalogue: Catalogue, admission: Admission, policy: EvictionPolicy | None
) -> CacheStatus:
    """Everything about the cache; `policy` is a function that this process evicts by, if any."""
    with catalogue.reading() as tables:
        shards, samples, _ = tables.totals()
        meta = tables.all_meta()
        passes = tables.passes()
        failures = tuple(tables.failures())
        leases, ranges = admission.leases.look()
        leased_bytes = tables.bytes_within(ranges)
        size_bytes = occupied_bytes(directory, tables)
        fill_state = state_of_filling(directory, tables)
        positions_done = tables.positions_done(passes[-1]) if passes else 0
        reserved_bytes = sum(tables.reserved_bytes())
        disk_message = shortage_of_disk(directory, tables)
        schema_text = _schema_text(meta)
        held_out_samples = tables.held_out()[0]
        dropped = all_dropped(directory, tables)
    current = passes[-1] if passes else None
    told = "" if fill_state == "stopped" else meta.get("fill_message", "")
    is_listing = bool(meta.get("listing", 0)) and fill_state != "none"
    return CacheStatus(
        path=directory.root,
        cache_id=meta["cache_id"],
        size_bytes=size_bytes,
        size_limit=meta["size_limit"],
        min_free=meta["min_free"],
        eviction=getattr(policy, "__name__", "function") if callable(policy) else meta["eviction"],
        num_shards=shards,
        num_samples=samples,
        leases=leases,
        leased_bytes=leased_bytes,
        reserved_bytes=reserved_bytes,
        evicted_shards=meta.get("evicted_shards", 0),
        evicted_samples=meta.get("evicted_samples", 0),
        evicted_unused_samples=meta.get("evicted_unused_samples", 0),
        epoch_waits=meta.get("epoch_waits", 0),
        snapshots=meta.get("clock", 0),
        schema=schema_text,
        source=meta.get("source"),
        num_units=None if current is None else current.length,
        fill_state=fill_state,
        fill_message=describe_loss(lost_worker(directory)) or told or dropped,
        pass_number=0 if current is None else current.id,  # old passes are forgotten, ids go on
        pass_done=None if is_listing or current is None else _share_done(positions_done, current.length),
        is_listing=is_listing,
        skipped=sum(failure.count for failure in failures),
        failures=failures,
        quarantined=meta.get("quarantined", 0),
        worker=_worker_status(directory),
        disk_message=disk_message,
        remote_message=silence_of_remote(directory),
        holdout=meta.get("holdout"),
        held_out_samples=held_out_samples,
    )


def _share_done(positions_done: int, length: int | None) -> float | None:
    """The share of a pass of `length` positions; None for one without an end."""
    if length is None:
        return None
    return positions_done / length if length else 1.0


def _schema_text(meta: dict[str, Any]) -> str | None:
    text = meta.get("schema")
    return None if text is None else str(Schema.from_json(text))


def _board(directory: Directory) -> Board | None:
    """The board of the worker that runs; None where none does."""
    path = directory.worker_file("board")
    if not has_worker(directory) or not os.path.exists(path):
        return None
    with translated_disk_errors(path):
        return Board(path)


def _worker_status(directory: Directory) -> WorkerStatus | None:
    board = _board(directory)
    if board is None:
        return None
    uptime_s = max(0.0, time.monotonic() - board.started_s)
    return WorkerStatus(board.pid, uptime_s, board.restarts, tuple(board.states()), board.totals())
