"""The Ray actors of a group of caches: its directory, and a shard server for each cache."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from cachestream.errors import CorruptShardError
from cachestream.storage.cache import Cache
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.worker.cluster.directory import Answer, CacheReport, GroupDirectory
from cachestream.worker.job import Job

Identity = tuple[tuple[str, str], ...]


def identity_of(job: Job) -> Identity:
    """The properties that all caches of a group have in common, as (beginning of a sentence, value)."""
    return (
        ("it is filled from the source", job.fingerprint),
        ("it lists the units", f"{job.num_units} {job.listing}"),
        ("it has the transform", job.transform),
        ("it has the order", job.kind),
        ("it has the seed", str(job.seed)),
        ("it divides the units among nodes:", str(job.partition.count) if job.partition else ""),
    )


class GroupActor:
    """The actor of a group: its directory, and the shard servers of its caches.

    The actor ends with the process that has made it. The next cache that misses it makes another one, whose
    directory is made anew from the reports of all caches.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity, self._directory = identity, GroupDirectory()
        self._servers: dict[str, Any] = {}

    def join(self, name: str, identity: Identity, server: Any) -> str:
        """Take in the cache `name`; returns the difference if it is filled with something else, "" if not."""
        self._forget(self._directory.forget_silent(time.monotonic()))
        if not self._servers:
            self._identity = identity  # what caches that are gone had in common binds no one
        for (what, ours), (_, theirs) in zip(self._identity, identity, strict=True):
            if ours != theirs:
                return f"{what} {theirs or 'none'}, and the group has {ours or 'none'}"
        self._servers[name] = server
        return ""

    def sync(self, name: str, report: CacheReport) -> tuple[Answer, dict[str, Any]]:
        """The decisions for the cache `name`, and the servers of the caches that they name."""
        if name not in self._servers:
            return Answer(is_known=False), {}
        now_s = time.monotonic()
        self._forget(self._directory.forget_silent(now_s))
        answer = self._directory.sync(name, report, now_s)
        holders = {one for copy in answer.copies for one, _ in copy.holders}
        return answer, {one: self._servers[one] for one in holders if one in self._servers}

    def leave(self, name: str) -> None:
        """Forget the cache `name`."""
        self._directory.leave(name)
        self._forget([name])

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._servers.pop(name, None)


class ShardServer:
    """The actor that gives the shards of the cache at `root` to other caches; it runs on the cache's node."""

    def __init__(self, root: str) -> None:
        self._cache = Cache(root)

    def ready(self) -> None:
        """Do nothing: an answer shows that the server runs."""

    def read(self, shard_id: int) -> npt.NDArray[np.uint8]:
        """The file of a shard, uint8 `[nbytes]`; raises FileNotFoundError for one that was evicted."""
        lease = self._cache.reservations.hold(np.array([[shard_id, shard_id]], np.int64))
        try:
            return np.fromfile(shard_path(self._cache.path, shard_id), np.uint8)
        finally:
            lease.release()

    def check(self, shard_id: int) -> None:
        """Quarantine a shard if it is damaged: another cache has found it so."""
        path = shard_path(self._cache.path, shard_id)
        try:
            shard = MappedShard(path)
            try:
                shard.verify()
            finally:
                shard.close()
        except CorruptShardError as error:
            self._cache.quarantine(shard_id, str(error))
