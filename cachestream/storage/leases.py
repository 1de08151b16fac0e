"""Leases: the shards that live readers need, as locked files that contain ranges of shard ids.

A process that takes a snapshot makes the lease in the transaction that chooses the shards. A process that
evicts reads the leases in the transaction that dooms the rows. So no shard is evicted after it was chosen and
before it is leased. Whoever joins a lease, as the workers of a DataLoader do, needs no catalogue.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachestream.errors import EpochError
from cachestream.linux import open_private
from cachestream.schema import IntArray
from cachestream.storage.locks import HeldFile, is_held, lock_file, remove_unheld
from cachestream.storage.os_errors import translated_disk_errors

_CREATE_TIMEOUT_S: Final = 2.0
_JOIN_TIMEOUT_S: Final = 5.0


class Lease:
    """A hold on the shards of one snapshot, until `release`, or until this object or the process is gone."""

    def __init__(self, file: HeldFile) -> None:
        self._file = file
        # A dataset that is dropped without a close must not protect its shards from eviction for ever.
        weakref.finalize(self, file.release, holder=id(self)).atexit = False
        file.share(id(self))

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def held(self) -> bool:
        return self._file.is_held_by(id(self))

    def again(self) -> Lease | None:
        """Another hold on the same shards; None if this process holds them no longer."""
        lease = Lease(self._file)
        return lease if lease.held and self._file.is_ours else None

    def release(self) -> None:
        """End this hold. Further calls do nothing."""
        self._file.release(holder=id(self))

    def __repr__(self) -> str:
        return f"<Lease {os.path.basename(self.path)} {'held' if self.held else 'released'}>"


def join_lease(path: str) -> Lease:
    """Also hold the lease at `path`, from another process or an unpickled copy of a dataset.

    Raises EpochError when the lease has ended: its shards may have been evicted since.
    """
    try:
        file = lock_file(path, shared=True, create=False, timeout_s=_JOIN_TIMEOUT_S)
    except FileNotFoundError:
        file = None
    if file is None:
        raise EpochError(f"the lease {path} has ended, its shards may be gone; take a new snapshot")
    return Lease(file)


@dataclass(frozen=True, slots=True)
class LeasedShards:
    """The leases of live processes: path → disjoint ascending ranges `[n, 2]` of ids (first, last)."""

    ranges: Mapping[str, IntArray]

    def merged(self) -> IntArray:
        """The ids of all leased shards as disjoint ascending ranges `[n, 2]` (first, last)."""
        return merge_ranges(np.concatenate([np.empty((0, 2), np.int64), *self.ranges.values()]))

    def holders(self, ids: IntArray, excluded: Collection[str] = ()) -> IntArray:
        """The number of leases that hold each of `ids`, int64 `[n]`, except those at the paths `excluded`."""
        counts = np.zeros(len(ids), np.int64)
        for ranges in (self.ranges[path] for path in self.ranges.keys() - set(excluded)):
            index = np.searchsorted(ranges[:, 0], ids, side="right") - 1
            counts += (index >= 0) & (ids <= ranges[index, 1]) if len(ranges) else 0
        return counts


class Leases:
    """The leases of one cache."""

    SUFFIX: Final = ".lease"

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def create(self, ranges: IntArray) -> Lease:
        """Lease the shards in `ranges` `[n, 2]` (first, last) for this process. Requires the catalogue's
        write lock.
        """
        path = os.path.join(self._folder, f"{os.getpid()}-{secrets.token_hex(6)}{self.SUFFIX}")
        file = lock_file(path, shared=True, timeout_s=_CREATE_TIMEOUT_S)
        if file is None:
            raise EpochError(
                f"{path} could not be made within {_CREATE_TIMEOUT_S:.0f} s, because other processes of this "
                "cache locked or removed it; try again"
            )
        try:
            file.write(ranges.astype(np.int64).tobytes())
        except BaseException:
            file.release(unlink=True)
            raise
        return Lease(file)

    def live(self, *, clear: bool = False) -> LeasedShards:
        """The leases that live processes hold. With `clear`, those of dead ones are removed."""
        found = {}
        with translated_disk_errors(self._folder, "listing it"):
            names = os.listdir(self._folder)
        for name in names:
            path = os.path.join(self._folder, name)
            if name.endswith(self.SUFFIX) and (
                not remove_unheld(path) if clear else is_held(path, shared=True)
            ):
                found[path] = _read_ranges(path)
        return LeasedShards(found)

    def count(self) -> int:
        """The number of leases that live processes hold."""
        return len(self.live().ranges)


def ranges_of(ids: IntArray, chosen: IntArray) -> IntArray:
    """The shards `ids[chosen]` as ranges `[n, 2]` of ids; `chosen` are ascending indices into `ids`.

    Two shards that are adjacent in `ids` share a range even if their ids are not consecutive: the ids between
    belong to shards that are gone, or to a few that are being written. So a lease of a whole cache is one
    range, however often its shards were replaced.
    """
    if not len(chosen):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(chosen) != 1)
    starts = np.concatenate([chosen[:1], chosen[breaks + 1]])
    stops = np.concatenate([chosen[breaks], chosen[-1:]])
    return np.stack([ids[starts], ids[stops]], axis=1).astype(np.int64)


def merge_ranges(ranges: IntArray) -> IntArray:
    """Sort `ranges` `[n, 2]` (first, last) and join those that overlap or touch."""
    if len(ranges) < 2:
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges[:, 1])
    new = np.concatenate([[True], ranges[1:, 0] > reach[:-1] + 1])
    last = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(ranges) - 1]])
    return np.stack([ranges[new, 0], reach[last]], axis=1)


def _read_ranges(path: str) -> IntArray:
    try:
        with open(path, "rb", opener=open_private) as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    # Without the lock, a lease may be seen half written.
    return np.frombuffer(data[: len(data) // 16 * 16], np.int64).reshape(-1, 2)
