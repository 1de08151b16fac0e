"""Leases: the shards that live readers need, as locked files that contain ranges of shard ids.

A lease is created under the catalogue's write lock, and evictors read the leases under the same lock, so no
shard can be evicted between being selected and being leased.
"""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Collection
from typing import Final

import numpy as np

from cachestream.errors import EpochError
from cachestream.schema import IntArray
from cachestream.storage.locks import HeldFile, is_held, lock_file, remove_unheld

_CREATE_TIMEOUT_S = 2.0


class Lease:
    """A hold on the shards of one snapshot, until `release`, or until this object or the process is gone."""

    def __init__(self, file: HeldFile) -> None:
        self._file = file
        # A dataset that is dropped without a close must not protect its shards from eviction for ever.
        self._release = weakref.finalize(self, file.release)
        self._release.atexit = False

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def held(self) -> bool:
        return self._release.alive and self._file.held

    def again(self) -> Lease | None:
        """Another hold on the same shards by this process; None if no one in it holds them any more."""
        return Lease(self._file) if self._file.share() else None

    def release(self) -> None:
        """End this hold. Further calls do nothing."""
        self._release()

    def __repr__(self) -> str:
        return f"<Lease {os.path.basename(self.path)} {'held' if self.held else 'released'}>"


def join_lease(path: str, timeout_s: float = 5.0) -> Lease:
    """Also hold the lease at `path`, from another process or an unpickled copy of a dataset.

    Raises EpochError when the lease has ended: its shards may have been evicted since.
    """
    try:
        file = lock_file(path, shared=True, create=False, timeout_s=timeout_s)
    except FileNotFoundError:
        file = None
    if file is None:
        raise EpochError(f"the lease {path} has ended, its shards may be gone; take a new snapshot")
    return Lease(file)


class Leases:
    """The leases of one cache. Not thread-safe: used under the catalogue's lock only."""

    SUFFIX: Final = ".lease"

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ranges: dict[str, IntArray] = {}

    def create(self, ranges: IntArray) -> Lease:
        """Lease the shards in `ranges` [n, 2] (first, last) for this process, within a write transaction."""
        self.leased()  # removes dead leases: without a writer, no one else does
        path = os.path.join(self._folder, f"{os.getpid()}-{secrets.token_hex(6)}{self.SUFFIX}")
        file = lock_file(path, shared=True, timeout_s=_CREATE_TIMEOUT_S)
        if file is None:
            raise EpochError(f"{path}: the new lease was taken away at once; is another cache cleaning up?")
        try:
            file.write(ranges.astype(np.int64).tobytes())
        except BaseException:
            file.release(unlink=True)
            raise
        return Lease(file)

    def leased(self) -> IntArray:
        """The ids of all leased shards as disjoint ascending ranges `[n, 2]` (first, last).

        Called within a write transaction, because it removes the leases of dead processes.
        """
        live: dict[str, IntArray] = {}
        for name in self._names():
            path = os.path.join(self._folder, name)
            if not remove_unheld(path):
                ranges = self._ranges.get(name)
                live[name] = _read_ranges(path) if ranges is None else ranges
        self._ranges = live
        return merge_ranges(np.concatenate([np.empty((0, 2), np.int64), *live.values()]))

    def holders(self, ids: IntArray, excluded: Collection[str] = ()) -> IntArray:
        """The number of leases that hold each of the shards `ids`, int64 `[n]`, except leases at the paths
        `excluded`.

        Called within a write transaction, as `leased`.
        """
        self.leased()
        counts = np.zeros(len(ids), np.int64)
        others = self._ranges.keys() - {os.path.basename(path) for path in excluded}
        for name in others:
            ranges = self._ranges[name]  # disjoint and ascending
            place = np.searchsorted(ranges[:, 0], ids, side="right") - 1
            counts += (place >= 0) & (ids <= ranges[place, 1]) if len(ranges) else 0
        return counts

    def look(self) -> tuple[int, IntArray]:
        """The number of leases that live processes hold, and their ranges; leases of dead ones stay."""
        paths = [os.path.join(self._folder, name) for name in self._names()]
        held = [path for path in paths if is_held(path, shared=True)]
        ranges = [np.empty((0, 2), np.int64), *map(_read_ranges, held)]
        return len(held), merge_ranges(np.concatenate(ranges))

    def count(self) -> int:
        """The number of leases that live processes hold."""
        return self.look()[0]

    def _names(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if name.endswith(self.SUFFIX)]


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
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    # Outside a transaction, a lease may be seen half written.
    return np.frombuffer(data[: len(data) // 16 * 16], np.int64).reshape(-1, 2)
