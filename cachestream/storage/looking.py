"""One look at a cache: what the catalogue, the leases and the worker's board say at one moment."""

from __future__ import annotations

import os
import time
from typing import Any

from cachestream.config import format_size
from cachestream.model import Schema
from cachestream.storage.admission import Admission
from cachestream.storage.board import Board
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.directory import Directory, free_bytes, overhead_bytes
from cachestream.storage.eviction import EvictionPolicy
from cachestream.storage.faults import translated_disk_errors
from cachestream.storage.locks import is_held
from cachestream.storage.status import CacheStatus, WorkerStatus
from cachestream.storage.tables import Tables

__all__ = [
    "all_dropped",
    "has_worker",
    "hindrance",
    "occupied_bytes",
    "read_status",
    "shortage_of_disk",
    "silence_of_remote",
    "state_of_filling",
]


def has_worker(directory: Directory) -> bool:
    """Whether a worker is running for the cache, in any process."""
    return is_held(directory.worker_file("supervisor.lock"))


def state_of_filling(directory: Directory, tables: Tables) -> str:
    """What the filling does: "filling", "complete", "full", "stopped", "failed" or "none" (never begun)."""
    state = str(tables.meta("fill_state", "none"))
    return "stopped" if state == "filling" and not has_worker(directory) else state


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
    """Why nothing comes at present: the disk, the remote or the transform; "" where none is known to be at fault."""
    return (
        shortage_of_disk(directory, tables) or silence_of_remote(directory) or all_dropped(directory, tables)
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
        held_out_samples = tables.held_out()[0]
        fill_message = str(meta.get("fill_message", "")) or all_dropped(directory, tables)
    current = passes[-1] if passes else None
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
        snapshots=meta.get("clock", 0),
        schema=_schema_text(meta),
        source=meta.get("source"),
        num_units=None if current is None else current.length,
        fill_state=fill_state,
        fill_message=fill_message,
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
