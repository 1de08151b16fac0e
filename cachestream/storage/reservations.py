"""Reservations: bytes are reserved before they are written, and credited only after the unlink.

The transaction that reserves also picks the victims of eviction. A victim's row is doomed first, then its
file is removed, and its bytes are credited last, with the row, so that the directory never holds more than
was promised, wherever a process dies. Reservations of a dead process are cleared by the next one that
reserves. The catalogue's write lock decides: under it the disk is measured and the leases are read, and a
lease is made.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from filelock import FileLock, Timeout

from cachestream.config import format_size
from cachestream.errors import CacheFullError, CacheLockedError
from cachestream.linux import remove
from cachestream.schema import IntArray, ShardRow
from cachestream.storage.catalogue import JOURNAL_BYTES
from cachestream.storage.eviction import EvictionPolicy, Room, choose_victims, chosen_by, describe_shortage
from cachestream.storage.layout import (
    BLOCK_BYTES,
    OWNER_SUFFIX,
    Directory,
    free_bytes,
    overhead_bytes,
    remove_if_there,
    size_of_file,
)
from cachestream.storage.leases import Lease, Leases
from cachestream.storage.locks import is_held, remove_unheld
from cachestream.storage.os_errors import check_own, translated_disk_errors
from cachestream.storage.shard import shard_path
from cachestream.storage.tables import DOOMED, REPLACED, RESERVED, RETIRING, Tables

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestream.storage.catalogue import Catalogue

# The reserve for the growth of logs, counters, history, rows and leases between two reservations.
HEADROOM_BYTES: Final = 256 * 1024
_BLOCKS_PER_INDEX: Final = 256  # fewer than any filesystem maps with one block, however fragmented the file
_OWNER_TIMEOUT_S: Final = 2.0


def disk_footprint(size_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """The maximum disk usage of a file of `size_bytes`: whole blocks, and the blocks that index them."""
    blocks = -(-size_bytes // block_bytes)
    return (blocks + 1 + blocks // _BLOCKS_PER_INDEX) * block_bytes


def effective_limit(limit_bytes: int, used_bytes: int, free_disk_bytes: int, min_free_bytes: int) -> int:
    """The limit in force: the configured one, or less when other programs have filled the disk."""
    return min(limit_bytes, used_bytes + free_disk_bytes - min_free_bytes)


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """The directory and its disk at one moment.

    `overhead_bytes`: everything but shards. `headroom_bytes`: what may be written without a reservation
    before the next one, and counts as used. `free_bytes`: those of the disk that are not promised either.
    """

    overhead_bytes: int
    headroom_bytes: int
    free_bytes: int


class Owner:
    """A process that writes into the cache, alive for as long as it holds its file's lock.

    The kernel drops the lock when the process ends; a forked child does not have it.
    """

    def __init__(self, directory: Directory, name: str) -> None:
        self.name = name
        path = directory.owner_file(name)
        check_own(directory.leases)
        self._lock = FileLock(path, _OWNER_TIMEOUT_S, mode=0o600, thread_local=False, poll_interval=0.01)
        with translated_disk_errors(path):
            if not os.path.isdir(
                directory.leases
            ):  # filelock would make it: a cache that was removed comes back
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            try:
                self._lock.acquire()
            except Timeout as error:
                raise CacheLockedError(f"{path} is held by another process; start again") from error

    @classmethod
    def temporary(cls, directory: Directory, what: str) -> Owner:
        """An owner with a name of its own, for the time of one operation."""
        return cls(directory, f"{what}-{secrets.token_hex(6)}")

    def release(self) -> None:
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                remove(self._lock.lock_file)
            self._lock.release(force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservations:
    """Reserves, evicts and clears up in one cache, for any process that has it open.

    `policy(tables)` returns the eviction policy in force: the stored one, or this process's function.
    """

    def __init__(
        self, directory: Directory, catalogue: Catalogue, policy: Callable[[Tables], EvictionPolicy]
    ) -> None:
        self._directory = directory
        self._catalogue = catalogue
        self.policy = policy
        self.leases = Leases(directory.leases)
        self._block_bytes = max(BLOCK_BYTES, os.statvfs(directory.root).f_frsize)
        # Reservations that could not be released, for lack of space or a disk error. No other process clears
        # them while their owner lives.
        self._unreleased: set[int] = set()

    def hold(self, ranges: IntArray) -> Lease:
        """Lease the shards in `ranges` `[n, 2]` of ids (first, last) for this process."""
        with self._catalogue.transaction():
            return self.leases.create(ranges)

    def footprint(self, size_bytes: int) -> int:
        """The maximum disk usage of a file of `size_bytes` on this disk."""
        return disk_footprint(size_bytes, self._block_bytes)

    # --- the room there is

    def measure(self) -> DiskUsage:
        """Measure the directory and its disk; in a write transaction nobody reserves meanwhile."""
        # Read before the disk's free bytes: a shard that is published meanwhile counts twice, not never.
        with self._catalogue.reading() as tables:
            promised_bytes = tables.bytes_in(RESERVED)
        with translated_disk_errors(self._directory.root, "measuring it"):
            # A transaction that touches every row (a snapshot) has a journal as large as the catalogue, of
            # which it keeps what it has.
            catalogue_bytes = size_of_file(self._directory.catalogue)
            journal_bytes = max(catalogue_bytes + catalogue_bytes // 8, JOURNAL_BYTES)
            journal_bytes -= size_of_file(self._directory.catalogue + "-journal")
            headroom_bytes = HEADROOM_BYTES + max(0, journal_bytes)
            free_disk = free_bytes(self._directory.root) - promised_bytes
            return DiskUsage(overhead_bytes(self._directory), headroom_bytes, free_disk)

    def room(self) -> Room:
        """The limit in force and the bytes in use, including everything in the directory."""
        usage = self.measure()
        with self._catalogue.reading() as tables:
            return room_in(tables, usage)

    def shortage(self, need_bytes: int) -> str:
        """The reason why a reservation fails, in one sentence."""
        usage, leased = self.measure(), self.leases.live().merged()
        with self._catalogue.reading() as tables:
            room, leased_bytes = room_in(tables, usage), tables.bytes_within(leased)
            size_limit, min_free = tables.settings.size_limit, tables.settings.min_free
        text = describe_shortage(need_bytes, max(0, room.limit_bytes), room.used_bytes, leased_bytes)
        if room.limit_bytes < size_limit:
            text += f"; other files fill the disk, of which min_free={format_size(min_free)} stays free"
        return text

    def missing_bytes(self, sizes: Iterable[int]) -> int:
        """The bytes that files of `sizes` need besides what is free, replaced, or being removed."""
        usage = self.measure()
        with self._catalogue.reading() as tables:
            there = room_in(tables, usage).free_bytes + tables.bytes_in(REPLACED, DOOMED)
        return sum(map(self.footprint, sizes)) - there

    # --- reserving and evicting

    def reserve(
        self, size_bytes: int, owner: str, *, may_evict: bool = True, spare_unused: bool = True
    ) -> int | None:
        """Promise `size_bytes` of disk to a new shard; return its id, or None when there is no space now.

        With `may_evict`, shards are evicted for it in the order of the policy, except leased ones and, with
        `spare_unused`, those that no epoch has used: they would have been fetched for nothing. The caller
        then writes the file, and turns the reservation into a shard or cancels it.
        """
        self.clear_dead()
        self.clear_replaced()
        ranking: list[int] = []
        if may_evict:
            ranking = self.rank(lambda room: room.free_bytes < size_bytes, used_only=spare_unused)
        with self._catalogue.transaction() as tables:
            usage, leased = self.measure(), self.leases.live(clear=True).merged()
            short_bytes = size_bytes - room_in(tables, usage).free_bytes
            if 0 < short_bytes <= tables.bytes_in(DOOMED):
                return None  # other processes are unlinking as much: more eviction would empty the cache
            policy = self.policy(tables) if may_evict else "none"
            victims = _victims(tables, policy, ranking, leased, short_bytes, used_only=spare_unused)
            if short_bytes > sum(row.size_bytes for row in victims):
                return None
            shard_id = tables.reserve(size_bytes, owner)
            self._doom(tables, victims)
        try:
            self._unlink([row.id for row in victims])
        except BaseException:
            self.cancel(shard_id, owner)
            raise
        return shard_id

    def cancel(self, shard_id: int, owner: str) -> None:
        """Give a reservation up, and remove its files. A published shard stays.

        If this fails, it is retried before this process gets another reservation.
        """
        self._unreleased.add(shard_id)
        with self._catalogue.reading() as tables:
            is_reserved = (shard_id, owner) in {(row.id, row.owner) for row in tables.unfinished()}
        if is_reserved:  # not interrupted after the commit
            self._unlink([shard_id])
        self._unreleased.discard(shard_id)

    def evict(self, to_bytes: int | None, policy: EvictionPolicy | None = None) -> int:
        """Evict until at most `to_bytes` (None: the limit) are used, as leases allow; return bytes freed."""
        freed_bytes = 0
        while True:
            try:
                return freed_bytes + self._evict(to_bytes, policy)
            except CacheFullError:
                # On a full disk there is only the journal's own space, enough for the eviction of one shard.
                one_bytes = self._evict(to_bytes, policy, at_most=1)
                if not one_bytes:
                    raise
                freed_bytes += one_bytes

    def _evict(self, to_bytes: int | None, policy: EvictionPolicy | None, at_most: int | None = None) -> int:
        self.clear_dead()
        freed_bytes = self.clear_replaced()
        ranking: list[int] = []
        if policy is None:
            ranking = self.rank(
                lambda room: room.used_bytes > (room.limit_bytes if to_bytes is None else to_bytes),
                spare_held_out=False,
            )
        with self._catalogue.transaction() as tables:
            usage, leased = self.measure(), self.leases.live(clear=True).merged()
            room = room_in(tables, usage)
            surplus_bytes = room.used_bytes - (room.limit_bytes if to_bytes is None else to_bytes)
            surplus_bytes -= tables.bytes_in(DOOMED)  # other processes are unlinking as much
            policy = policy or self.policy(tables)
            victims = _victims(tables, policy, ranking, leased, surplus_bytes, spare_held_out=False)
            victims = victims[:at_most]
            self._doom(tables, victims)
            if victims:
                tables.note_room()
        self._unlink([row.id for row in victims])
        return freed_bytes + sum(row.size_bytes for row in victims)

    def clear_dead(self) -> None:
        """Remove the leases and reservations of dead processes, and what nobody has finished to remove."""
        with translated_disk_errors(self._directory.leases, "listing it"):
            names = os.listdir(self._directory.leases)
        for name in names:
            if name.endswith((OWNER_SUFFIX, Leases.SUFFIX)):
                remove_unheld(os.path.join(self._directory.leases, name))
        with self._catalogue.reading() as tables:
            unfinished = tables.unfinished()
        # The name of a dead owner is never used again.
        owners = {row.owner for row in unfinished}
        dead = {name for name in owners if not name or not is_held(self._directory.owner_file(name))}
        doomed = [row.id for row in unfinished if row.state == DOOMED and row.owner in dead]
        reserved = [(row.id, row.owner) for row in unfinished if row.state == RESERVED]
        if abandoned := [one for one in reserved if one[1] in dead or one[0] in self._unreleased]:
            # An owner may have published its shard before it ended.
            with self._catalogue.transaction() as tables:
                doomed += tables.bury(abandoned)
            self._unreleased.difference_update(shard_id for shard_id, _ in abandoned)
        self._unlink(doomed)

    def clear_replaced(self) -> int:
        """Remove the replaced shards that no epoch holds; return the bytes freed. It is no eviction: other
        shards hold their samples.

        A catalogue that is made anew from the files would have them live again.
        """
        try:
            return self._clear_replaced()
        except CacheFullError:
            return self._clear_replaced(at_most=1)  # as in `evict`

    def _clear_replaced(self, at_most: int | None = None) -> int:
        def unleased(tables: Tables) -> IntArray:
            replaced = np.array(sorted(tables.shard_ids(REPLACED)), np.int64)
            return replaced[self.leases.live().holders(replaced) == 0] if len(replaced) else replaced

        with self._catalogue.reading() as tables:
            if not len(unleased(tables)):
                return 0  # without a commit, which would keep snapshots from being reused
        with self._catalogue.transaction() as tables:
            going = unleased(tables)[:at_most]
            freed_bytes = tables.bytes_within(np.stack([going, going], axis=1))
            tables.doom(going.tolist())
        self._unlink(going.tolist())
        return freed_bytes

    def rank(
        self,
        is_needed: Callable[[Room], bool] = lambda _: True,
        *,
        used_only: bool = False,
        spare_held_out: bool = True,
        spare_leased: bool = True,
    ) -> list[int]:
        """The ids of the shards that an eviction function returns, the first to evict first; [] without one.

        The user's function may take its time, and use the cache: it runs in no transaction.
        """
        with self._catalogue.reading() as tables:
            policy = self.policy(tables)
        if not callable(policy) or not is_needed(self.room()):
            return []
        leased = self.leases.live().merged() if spare_leased else np.empty((0, 2), np.int64)
        with self._catalogue.reading() as tables:
            kept = tables.held_out_shards() if spare_held_out else set()
            rows = [row for row in _outside(leased, tables.shards(used_only=used_only)) if row.id not in kept]
        return [row.id for row in chosen_by(policy, rows)]

    def _doom(self, tables: Tables, victims: list[ShardRow]) -> None:
        if not victims:
            return
        tables.doom(row.id for row in victims)
        tables.add("evicted_shards", len(victims))
        tables.add("evicted_samples", sum(row.num_samples for row in victims))
        tables.add("evicted_unused_samples", sum(row.num_samples for row in victims if not row.uses))

    def _unlink(self, doomed: list[int]) -> None:
        """Remove the files of doomed shards and of reservations, and only then their rows."""
        if not doomed:
            return
        for shard_id in doomed:
            for path in (
                self._directory.temporary_shard(shard_id),
                shard_path(self._directory.root, shard_id),
            ):
                with translated_disk_errors(path, "removing it"):
                    remove_if_there(path)
        with self._catalogue.transaction() as tables:
            tables.forget(doomed)


def room_in(tables: Tables, usage: DiskUsage) -> Room:
    """The limit in force and the bytes in use."""
    size_limit, min_free = tables.settings.size_limit, tables.settings.min_free
    used = tables.bytes_of_files() + usage.overhead_bytes + usage.headroom_bytes
    return Room(effective_limit(size_limit, used, usage.free_bytes, min_free), used)


def _victims(
    tables: Tables,
    policy: EvictionPolicy,
    ranking: list[int],
    leased: IntArray,
    need_bytes: int,
    *,
    used_only: bool = False,
    spare_held_out: bool = True,
) -> list[ShardRow]:
    """The shards to evict by `policy` that free `need_bytes`; all that may go if these do not.

    `ranking`: what a function has chosen before. Shards in the ranges `leased` stay, and those that hold only
    held-out samples, because a validation set must not change between epochs. Unless `spare_held_out`, these
    go last.
    """
    if need_bytes <= 0 or policy == "none":
        return []
    held_out = tables.held_out_shards()
    order = "fifo" if callable(policy) else policy
    with contextlib.closing(tables.evictable(order, used_only=used_only)) as rows:
        unleased = _outside(leased, rows)
        candidates: Iterable[ShardRow] = unleased
        if spare_held_out:
            candidates = (row for row in unleased if row.id not in held_out)
        if callable(policy):
            by_id = {row.id: row for row in candidates}
            retiring = tables.shard_ids(RETIRING)
            first = [shard_id for shard_id in by_id if shard_id in retiring]
            then = [shard_id for shard_id in ranking if shard_id in by_id and shard_id not in retiring]
            candidates = [by_id[shard_id] for shard_id in first + then]
        if held_out and not spare_held_out:
            candidates = sorted(candidates, key=lambda row: row.id in held_out)
        return choose_victims(candidates, need_bytes)


def _outside(ranges: IntArray, rows: Iterable[ShardRow]) -> Iterator[ShardRow]:
    """The `rows` whose ids are not in `ranges` (disjoint and ascending)."""
    firsts, lasts = ranges[:, 0].tolist(), ranges[:, 1].tolist()
    for row in rows:
        place = bisect.bisect_right(firsts, row.id) - 1
        if place < 0 or row.id > lasts[place]:
            yield row
