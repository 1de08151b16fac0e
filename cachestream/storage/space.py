"""Taking shards out of a cache: down to its limit, on request, one that is damaged, or all of them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cachestream.config import format_size
from cachestream.errors import CacheError
from cachestream.storage.admission import Admission, Owner
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.directory import Directory, remove_if_there
from cachestream.storage.eviction import EvictionPolicy
from cachestream.storage.faults import translated_disk_errors
from cachestream.storage.locks import lock_file
from cachestream.storage.quarantine import move_aside
from cachestream.storage.shard import shard_path

__all__ = ["Space"]

_CLEAR_TIMEOUT_S: Final = 1.0
_WRITERS_TIMEOUT_S: Final = 2.0


class Space:
    """Takes shards out of one cache, each time under a name of its own, as a process that may die."""

    def __init__(self, directory: Directory, catalogue: Catalogue, admission: Admission) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._admission = admission

    def evict(self, to_bytes: int | None, policy: EvictionPolicy | None = None) -> int:
        """Evict until at most `to_bytes` (None: the limit) are used, as leases allow; the bytes freed."""
        with self._owner("evict") as name:
            return self._admission.evict(to_bytes, name, policy)

    def enforce_limit(self, slack_bytes: int = 0) -> int:
        """Evict what is over the limit by more than `slack_bytes`, as leases allow; returns the bytes freed."""
        with self._catalogue.reading() as tables:
            room, size_limit = self._admission.room(tables), int(tables.meta("size_limit"))
            keeps = self._admission.policy(tables) == "none"
            going_bytes = tables.reserved_bytes()[1]
        # Nothing but a lower limit evicts under "none": not other programs that fill the disk.
        limit_bytes = size_limit if keeps else room.limit_bytes
        slack_bytes = slack_bytes if limit_bytes == size_limit else 0
        if room.used_bytes - going_bytes <= limit_bytes + slack_bytes:
            return 0
        return self.evict(limit_bytes, "lru" if keeps else None)

    def shrink(self) -> None:
        """Enforce a limit that was just set, also on what was promised under the one before it."""
        self.enforce_limit()
        if self._is_over():
            self._admission.wait_for_writers(_WRITERS_TIMEOUT_S)
            self.enforce_limit()

    def put_aside(self, shard_id: int, reason: str) -> None:
        """Quarantine a damaged shard; nothing happens where it is gone already."""
        path = shard_path(self._directory.root, shard_id)
        where, _, what = reason.partition("; run ")[0].partition(": ")  # what it advises is done here
        with self._owner("quarantine") as name:
            with self._catalogue.transaction() as tables:
                row = self._admission.drop(tables, shard_id, name)
                if row is None:
                    return  # evicted, or another rank was faster
                # Together with its row: one that goes uncounted, because we are killed, nobody fetches again.
                tables.add("quarantined" if os.path.lexists(path) else "lost_shards", 1)
                tables.add_failure("quarantined", what or "damaged", row.num_samples, where)
                limit_bytes = int(tables.meta("size_limit"))
            move_aside(self._directory, path, limit_bytes)
            self._admission.dropped(shard_id)

    def clear(self) -> None:
        """Evict everything, and forget the filling and what was put aside.

        Raises CacheError while a worker runs, or while epochs hold shards.
        """
        root = self._directory.root
        # Held as a supervisor holds it: none can start while we clear.
        lock = lock_file(self._directory.worker_file("supervisor.lock"), timeout_s=_CLEAR_TIMEOUT_S)
        if lock is None:
            raise CacheError(f"a worker is filling {root}; stop it first ('cachestream stop CACHE')")
        try:
            self.evict(0, "fifo")
            with self._catalogue.transaction() as tables:
                left, _, left_bytes = tables.totals()
                if left:
                    raise CacheError(
                        f"{left} shards ({format_size(left_bytes)}) of {root} are leased by epochs in use; "
                        "close them"
                    )
                tables.forget_filling()
                tables.execute("DELETE FROM meta WHERE key = 'holdout'")  # what comes may be split otherwise
            with translated_disk_errors(root, "clearing it"):
                for name in os.listdir(self._directory.quarantine):
                    remove_if_there(os.path.join(self._directory.quarantine, name))
                remove_if_there(os.path.join(root, "catalogue.damaged"))
        finally:
            lock.release()

    def _is_over(self) -> bool:
        with self._catalogue.reading() as tables:
            return self._admission.room(tables).free_bytes < 0

    @contextmanager
    def _owner(self, what: str) -> Iterator[str]:
        """The name under which this process holds bytes for the time of one action."""
        owner = Owner(self._directory, f"{what}-{secrets.token_hex(6)}")
        try:
            yield owner.name
        finally:
            owner.release()
