"""Shards known by what they hold: the same content is the same shard, whatever its number and its cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cachestream.errors import CacheError, CorruptShardError
from cachestream.storage.shard import MappedShard, shard_path

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What a shard is, apart from its data: `hash` covers all of the file. `fill` says what of the remote it holds."""

    shard_id: int
    num_samples: int
    hash: str
    fill: dict[str, Any]


class Contents:
    """What the shards of one cache hold, read from their headers when asked for. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, Content] = {}

    def read(self, root: str, shard_ids: Iterable[int]) -> list[Content]:
        """What each of `shard_ids` holds; they must be leased. Raises CorruptShardError and CacheError."""
        found = {shard_id: self._known.get(shard_id) or _read(root, shard_id) for shard_id in shard_ids}
        self._known = found  # and no others: ids are never used again
        return list(found.values())

    def find(self, cache: Cache, wanted: Iterable[Content]) -> dict[str, int]:
        """Where each of `wanted` that is cached lies: its hash → the id of a shard of this content."""
        missing = {content.hash: content for content in wanted}
        with cache.catalogue.reading() as tables:
            ids, counts = (column.tolist() for column in tables.shard_columns("id", "num_samples"))
        # Most are where they were; only for the others the rest of the cache is looked through.
        likely = {content.shard_id for content in missing.values()}
        sizes = {content.num_samples for content in missing.values()}
        candidates = [shard_id for shard_id, count in zip(ids, counts, strict=True) if count in sizes]
        found: dict[str, int] = {}
        for shard_id in sorted(candidates, key=lambda shard_id: shard_id not in likely):
            if not missing:
                break
            try:
                known = self._known.get(shard_id) or _read(cache.path, shard_id)
                self._known[shard_id] = known
            except (CorruptShardError, CacheError):
                continue  # evicted since, or damaged: not there
            if missing.pop(known.hash, None) is not None:
                found[known.hash] = shard_id
        return found


def _read(root: str, shard_id: int) -> Content:
    shard = MappedShard(shard_path(root, shard_id))
    try:
        return Content(shard_id, shard.num_samples, shard.content_hash, shard.fill)
    finally:
        shard.close()
