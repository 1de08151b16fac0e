"""Shards identified by their content, whatever their number and their cache."""

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
    """The identity of a shard: `hash` covers the whole file, `fill` describes its samples' origin."""

    shard_id: int
    num_samples: int
    hash: str
    fill: dict[str, Any]


class Contents:
    """The contents of the shards of one cache, read lazily from their headers. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[int, Content] = {}

    def read(self, root: str, shard_ids: Iterable[int]) -> list[Content]:
        """The contents of `shard_ids`, which must be leased. Raises CorruptShardError and CacheError."""
        found = {shard_id: self._known.get(shard_id) or _read(root, shard_id) for shard_id in shard_ids}
        self._known = found  # and no others: ids are never reused
        return list(found.values())

    def find(self, cache: Cache, wanted: Iterable[Content]) -> dict[str, int]:
        """Map the hash of each of `wanted` that is cached to the id of a shard with this content."""
        missing = {content.hash: content for content in wanted}
        with cache.catalogue.reading() as tables:
            ids, counts = (column.tolist() for column in tables.shard_columns("id", "num_samples"))
        # Most have kept their id. Only for the others are the remaining headers read.
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
                continue  # evicted meanwhile, or damaged
            if missing.pop(known.hash, None) is not None:
                found[known.hash] = shard_id
        return found


def _read(root: str, shard_id: int) -> Content:
    shard = MappedShard(shard_path(root, shard_id))
    try:
        return Content(shard_id, shard.num_samples, shard.content_hash, shard.fill)
    finally:
        shard.close()
