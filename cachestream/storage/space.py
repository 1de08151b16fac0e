"""Space that is made on request: the limit enforced, damaged shards quarantined, the cache emptied."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from cachestream.config import format_size
from cachestream.errors import CacheError
from cachestream.storage.layout import move_aside, remove_if_there
from cachestream.storage.locks import locked
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.reservations import Owner, room_in
from cachestream.storage.settings import opening_lock, save_copy
from cachestream.storage.shard import shard_path
from cachestream.storage.tables import Reservation

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.catalogue import Catalogue

_CLEAR_TIMEOUT_S: Final = 1.0
_WRITERS_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.01


def enforce_limit(cache: Cache, slack_bytes: int = 0) -> int:
    """If usage exceeds the limit by more than `slack_bytes`, evict down to the limit, as leases allow.

    Returns the bytes freed.
    """
    usage = cache.reservations.measure()
    with cache.catalogue.reading() as tables:
        room, size_limit = room_in(tables, usage), int(tables.meta("size_limit"))
        never_evicts = cache.reservations.policy(tables) == "none"
        doomed_bytes = tables.reserved_bytes()[1]
    # Under "none" only a lower limit evicts, not a disk that other programs fill.
    limit_bytes = size_limit if never_evicts else room.limit_bytes
    slack_bytes = slack_bytes if limit_bytes == size_limit else 0
    if room.used_bytes - doomed_bytes <= limit_bytes + slack_bytes:
        return 0
    return cache.reservations.evict(limit_bytes, "lru" if never_evicts else None)


def shrink(cache: Cache) -> None:
    """Enforce a limit that was just lowered, also for bytes that were promised before."""
    enforce_limit(cache)
    if cache.reservations.room().free_bytes < 0:
        _wait_for_writers(cache.catalogue)
        enforce_limit(cache)


def _wait_for_writers(catalogue: Catalogue) -> None:
    """Wait until the current reservations are shards or cancelled; return silently at the deadline."""
    deadline_s = time.monotonic() + _WRITERS_TIMEOUT_S
    pending = _reserved_ids(catalogue)
    while pending and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)  # SQLite cannot notify
        pending &= _reserved_ids(catalogue)


def _reserved_ids(catalogue: Catalogue) -> set[int]:
    with catalogue.reading() as tables:
        return {row.id for row in tables.reservations()}


def quarantine(cache: Cache, shard_id: int, reason: str) -> None:
    """Quarantine a damaged shard, and count its samples as lost. A shard that is gone already is ignored."""
    path = shard_path(cache.path, shard_id)
    finding = reason.partition("; run ")[0]  # without the advice, which is followed here
    where, _, damage = finding.partition(": ")
    is_missing = not os.path.lexists(path)
    with Owner.temporary(cache.directory, "quarantine") as owner:
        with cache.catalogue.transaction() as tables:
            row = tables.shard(shard_id)
            if row is None:
                return  # evicted, or quarantined by another rank
            tables.delete_shards([shard_id])
            tables.insert_reservation(Reservation(shard_id, row.size_bytes, owner.name, doomed=True))
            # In the transaction that deletes the row: an uncounted loss would not be fetched again.
            tables.add("evicted_shards", 1)
            tables.add("quarantined", int(not is_missing))
            tables.add_failure("quarantined", damage or "damaged", row.num_samples, where)
            limit_bytes = int(tables.meta("size_limit"))
        move_aside(cache.directory, path, limit_bytes)
        with cache.catalogue.transaction() as tables:
            tables.delete_reservations([shard_id])


def clear(cache: Cache) -> None:
    """Evict everything, and delete the progress of the filling and the quarantine.

    Raises CacheError while a worker runs, or while epochs hold shards.
    """
    directory = cache.directory
    busy = CacheError(f"a worker is filling {cache.path}; stop it first ('cachestream stop CACHE')")
    with locked(directory.supervisor_lock, _CLEAR_TIMEOUT_S, busy):  # the worker's: none can start meanwhile
        cache.reservations.evict(0, "fifo")
        with cache.catalogue.transaction() as tables:
            left, _, left_bytes = tables.totals()
            if left:
                raise CacheError(
                    f"{left} shards ({format_size(left_bytes)}) of {cache.path} are leased by epochs in use; "
                    "close them"
                )
            tables.forget_filling()
            tables.forget_holdout()  # the next samples may be split otherwise
        with translated_disk_errors(cache.path, "clearing it"):
            for name in os.listdir(directory.quarantine):
                remove_if_there(os.path.join(directory.quarantine, name))
            remove_if_there(os.path.join(cache.path, "catalogue.damaged"))
    with opening_lock(directory):
        save_copy(directory, cache.catalogue)
