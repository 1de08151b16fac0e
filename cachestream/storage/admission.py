"""Space: bytes are reserved before they are written, and given back only after the unlink.

The transaction that reserves also picks the victims. A victim's row goes first, its file next, and
its bytes are credited last, so that the directory never holds more than was promised, wherever a
process dies. What a dead process had reserved is cleared by the next one that asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np

from cachestream.errors import CacheFullError
from cachestream.model import IntArray, ShardRow
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.directory import Directory, free_bytes, overhead_bytes, sync_folder
from cachestream.storage.eviction import EvictionPolicy, choose_victims, describe_shortage, in_order
from cachestream.storage.leases import Leases, contains
from cachestream.storage.locks import HeldFile, is_held, lock_file
from cachestream.storage.shard import shard_path
from cachestream.storage.tables import Reservation, Tables

__all__ = ["Admission", "Owner", "Room", "disk_footprint", "effective_limit"]

BLOCK_BYTES: Final = 4096
# What the catalogue's journal, the worker's log and new leases may take between two reservations.
HEADROOM_BYTES: Final = 256 * 1024
_BATCH: Final = 256
_OWNER_TIMEOUT_S: Final = 2.0


def disk_footprint(size_bytes: int) -> int:
    """The most that a file of `size_bytes` occupies: whole blocks, and the blocks that index them."""
    blocks = -(-size_bytes // BLOCK_BYTES)
    return (blocks + 1 + blocks // 32_768) * BLOCK_BYTES


def effective_limit(limit_bytes: int, used_bytes: int, free_disk_bytes: int, min_free_bytes: int) -> int:
    """The limit now: what was configured, or less when others have filled the disk."""
    return min(limit_bytes, used_bytes + free_disk_bytes - min_free_bytes)


@dataclass(frozen=True, slots=True)
class Room:
    """Where the bytes are: the limit in force, and what counts against it."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


class Owner:
    """A process that writes into the cache, alive for as long as it holds its file's lock."""

    SUFFIX: Final = ".owner"

    def __init__(self, directory: Directory, name: str) -> None:
        self.name = name
        file = lock_file(_owner_path(directory, name), timeout_s=_OWNER_TIMEOUT_S)
        if file is None:
            raise CacheFullError(f"{_owner_path(directory, name)} is held by another process; start again")
        self._file: HeldFile = file

    def release(self) -> None:
        self._file.release(unlink=True)


def _owner_path(directory: Directory, name: str) -> str:
    return os.path.join(directory.leases, name + Owner.SUFFIX)


def owner_is_alive(directory: Directory, name: str) -> bool:
    """Whether the process that wrote under `name` still runs."""
    return is_held(_owner_path(directory, name))


class Admission:
    """Reserves, evicts and clears up in one cache, for any process that has it open."""

    def __init__(
        self, directory: Directory, catalogue: Catalogue, policy: Callable[[Tables], EvictionPolicy]
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self._policy = policy
        self._leases = Leases(directory.leases)

    @property
    def leases(self) -> Leases:
        """The leases; to be used within a write transaction of the catalogue."""
        return self._leases

    def reserve(self, size_bytes: int, owner: str, *, may_evict: bool = True) -> int | None:
        """Promise `size_bytes` of disk to a new shard; its id, or None when there is no space now.

        Evicts what the policy gives for it, except leased shards. The caller then writes the file,
        and turns the reservation into a shard or cancels it.
        """
        with self._catalogue.transaction() as tables:
            self._clear_dead(tables)
            room = self.room(tables)
            short_bytes = size_bytes - room.free_bytes
            if 0 < short_bytes <= tables.doomed_bytes():
                return None  # others are unlinking as much: evicting more would only empty the cache
            victims = self._victims(tables, short_bytes) if may_evict else []
            if victims is None or size_bytes > room.free_bytes + sum(v.size_bytes for v in victims):
                return None
            shard_id = tables.add("last_shard_id", 1)
            tables.insert_reservation(Reservation(shard_id, size_bytes, owner, doomed=False))
            self._doom(tables, victims, owner)
        self._unlink(victims)
        return shard_id

    def cancel(self, shard_id: int) -> None:
        """Give a reservation back; whatever was written under it goes first."""
        self._remove_files(shard_id)
        with self._catalogue.transaction() as tables:
            tables.delete_reservations([shard_id])

    def evict(self, to_bytes: int, owner: str, policy: EvictionPolicy | None = None) -> int:
        """Evict until at most `to_bytes` are used, as leases allow; returns the bytes freed."""
        with self._catalogue.transaction() as tables:
            self._clear_dead(tables)
            surplus = self.room(tables).used_bytes - to_bytes
            candidates = self._evictable(tables, policy)
            victims: list[ShardRow] = []
            for row in candidates:
                if surplus <= 0:
                    break
                victims.append(row)
                surplus -= row.size_bytes
            self._doom(tables, victims, owner)
        self._unlink(victims)
        return sum(row.size_bytes for row in victims)

    def clear_dead(self) -> None:
        """Give back what processes that died had reserved."""
        with self._catalogue.transaction() as tables:
            self._clear_dead(tables)

    def room(self, tables: Tables) -> Room:
        """The limit and the bytes in use, everything in the directory included."""
        size_limit, min_free = int(tables.meta("size_limit")), int(tables.meta("min_free"))
        reserved = tables.reserved_bytes()
        on_disk = tables.totals()[2] + overhead_bytes(self._directory)
        used = on_disk + reserved + HEADROOM_BYTES
        # What is reserved but not yet written still counts as free on the disk: take it off.
        free_disk = free_bytes(self._directory.root) - reserved
        return Room(effective_limit(size_limit, used, free_disk, min_free), used)

    def in_policy_order(self, tables: Tables) -> list[ShardRow]:
        """All shards, leased ones too, first to go first."""
        policy = self._policy(tables)
        return in_order(policy, list(tables.shards())) if callable(policy) else list(tables.shards(policy))

    def shortage(self, need_bytes: int) -> str:
        """Why a reservation fails, in one sentence."""
        with self._catalogue.transaction() as tables:
            room = self.room(tables)
            return describe_shortage(need_bytes, room.limit_bytes, room.used_bytes, self.leased_bytes(tables))

    def leased_bytes(self, tables: Tables) -> int:
        """Bytes of shards that live epochs hold."""
        ranges = self._leases.leased()
        rows = list(tables.shards())
        inside = contains(ranges, np.array([row.id for row in rows], np.int64))
        return sum(row.size_bytes for row, held in zip(rows, inside, strict=True) if held)

    def _victims(self, tables: Tables, need_bytes: int) -> list[ShardRow] | None:
        return [] if need_bytes <= 0 else choose_victims(self._evictable(tables, None), need_bytes)

    def _evictable(self, tables: Tables, policy: EvictionPolicy | None) -> Iterable[ShardRow]:
        policy = self._policy(tables) if policy is None else policy
        ranges = self._leases.leased()
        if callable(policy):
            return in_order(policy, _unleased(list(tables.shards()), ranges))
        if policy == "none":
            return []
        # SQLite sorts by the policy's own keys, so only the first few rows ever become objects.
        rows = tables.shards(policy)
        return chain.from_iterable(_unleased(batch, ranges) for batch in _batches(rows))

    def _doom(self, tables: Tables, victims: list[ShardRow], owner: str) -> None:
        if not victims:
            return
        tables.delete_shards(row.id for row in victims)
        for row in victims:
            tables.insert_reservation(Reservation(row.id, row.size_bytes, owner, doomed=True))
        tables.add("evicted_shards", len(victims))
        tables.add("evicted_samples", sum(row.num_samples for row in victims))
        tables.add("evicted_bytes", sum(row.size_bytes for row in victims))

    def _unlink(self, victims: list[ShardRow]) -> None:
        if not victims:
            return
        for row in victims:
            self._remove_files(row.id)
        sync_folder(self._directory.shards)
        with self._catalogue.transaction() as tables:
            tables.delete_reservations(row.id for row in victims)

    def _clear_dead(self, tables: Tables) -> None:
        reservations = tables.reservations()
        dead = {name for name in {r.owner for r in reservations} if not owner_is_alive(self._directory, name)}
        abandoned = [r.id for r in reservations if r.owner in dead]
        for shard_id in abandoned:
            self._remove_files(shard_id)
        if abandoned:
            sync_folder(self._directory.shards)
            tables.delete_reservations(abandoned)
        for name in os.listdir(self._directory.leases):
            path = os.path.join(self._directory.leases, name)
            if name.endswith(Owner.SUFFIX) and not is_held(path):
                _remove(path)

    def _remove_files(self, shard_id: int) -> None:
        _remove(self._directory.temporary_shard(shard_id))
        _remove(shard_path(self._directory.root, shard_id))


def _unleased(rows: list[ShardRow], ranges: IntArray) -> list[ShardRow]:
    leased = contains(ranges, np.array([row.id for row in rows], np.int64))
    return [row for row, held in zip(rows, leased, strict=True) if not held]


def _batches(rows: Iterable[ShardRow]) -> Iterable[list[ShardRow]]:
    batch: list[ShardRow] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    yield batch


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
