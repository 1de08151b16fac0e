"""Leases: which shards live readers need, as locked files that name ranges of shard ids.

A lease is created under the catalogue's write lock, and evictors read the leases under the same
lock, so no shard is chosen for eviction between being listed and being leased.
"""

from __future__ import annotations

import os
import secrets

import numpy as np

from cachestream.errors import EpochError
from cachestream.model import IntArray
from cachestream.storage.locks import HeldFile, is_held, lock_file

__all__ = ["Lease", "Leases", "join_lease"]

_SUFFIX = ".lease"
_CREATE_TIMEOUT_S = 2.0


class Lease:
    """A hold on the shards of one snapshot, for as long as this process lives or until `release`."""

    def __init__(self, file: HeldFile) -> None:
        self._file = file

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def held(self) -> bool:
        return self._file.held

    def release(self) -> None:
        """Give the shards free (once; further calls do nothing)."""
        self._file.release()

    def __repr__(self) -> str:
        return f"<Lease {os.path.basename(self.path)} {'held' if self.held else 'released'}>"


def join_lease(path: str, timeout_s: float = 5.0) -> Lease:
    """Hold the lease at `path` too (another process, an unpickled copy of a dataset).

    Raises EpochError when the lease is gone: its shards may have been evicted since.
    """
    try:
        file = lock_file(path, shared=True, create=False, timeout_s=timeout_s)
    except FileNotFoundError:
        file = None
    if file is None:
        raise EpochError(f"the lease {path} has ended, its shards may be gone; take a new snapshot")
    return Lease(file)


class Leases:
    """The leases of one cache. Not thread-safe: used under the catalogue's write lock only."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ranges: dict[str, IntArray] = {}

    def create(self, shard_ids: IntArray) -> Lease:
        """Lease `shard_ids` (ascending) for this process."""
        path = os.path.join(self._folder, f"{os.getpid()}-{secrets.token_hex(6)}{_SUFFIX}")
        file = lock_file(path, shared=True, timeout_s=_CREATE_TIMEOUT_S)
        if file is None:
            raise EpochError(f"{path}: the new lease was taken away at once; is another cache cleaning up?")
        file.write(ranges_of(shard_ids).tobytes())
        return Lease(file)

    def leased(self) -> IntArray:
        """The ids of all leased shards as ascending ranges `[n, 2]` (first, last); clears dead leases."""
        live: dict[str, IntArray] = {}
        for name in os.listdir(self._folder):
            if not name.endswith(_SUFFIX):
                continue
            path = os.path.join(self._folder, name)
            if not self._is_live(path):
                continue
            ranges = self._ranges.get(name)
            live[name] = _read_ranges(path) if ranges is None else ranges
        self._ranges = live
        return np.concatenate([np.empty((0, 2), np.int64), *live.values()])

    def count(self) -> int:
        """How many leases live processes hold."""
        paths = [
            os.path.join(self._folder, name) for name in os.listdir(self._folder) if name.endswith(_SUFFIX)
        ]
        return sum(is_held(path, shared=True) for path in paths)

    @staticmethod
    def _is_live(path: str) -> bool:
        try:
            dead = lock_file(path, create=False)
        except FileNotFoundError:
            return False
        if dead is None:
            return True
        dead.release(unlink=True)
        return False


def ranges_of(ids: IntArray) -> IntArray:
    """Ascending `ids` as ranges `[n, 2]` of (first, last): contiguous runs cost 16 bytes each."""
    if not len(ids):
        return np.empty((0, 2), np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1)
    starts = np.concatenate([ids[:1], ids[breaks + 1]])
    stops = np.concatenate([ids[breaks], ids[-1:]])
    return np.stack([starts, stops], axis=1).astype(np.int64)


def contains(ranges: IntArray, ids: IntArray) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """For each of `ids`, whether it lies in one of `ranges` (which may overlap)."""
    if not len(ranges):
        return np.zeros(len(ids), np.bool_)
    # An id lies in a range when more ranges have started at or before it than have ended before it.
    started = np.searchsorted(np.sort(ranges[:, 0]), ids, side="right")
    ended = np.searchsorted(np.sort(ranges[:, 1]), ids, side="left")
    inside: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = started > ended
    return inside


def _read_ranges(path: str) -> IntArray:
    try:
        with open(path, "rb") as file:
            return np.frombuffer(file.read(), np.int64).reshape(-1, 2)
    except FileNotFoundError:
        return np.empty((0, 2), np.int64)
