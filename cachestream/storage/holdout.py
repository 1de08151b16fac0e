"""The held-out share of a cache.

The share is stored once. In shards that were cached before that, held-out samples are counted by their keys.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cachestream.errors import ConfigError, CorruptShardError
from cachestream.schema import Split, check_holdout, check_split
from cachestream.storage.opening import save_settings
from cachestream.storage.shard import MappedShard, shard_path

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache


logger = logging.getLogger("cachestream")


def choose_split(cache: Cache, split: object, holdout: object) -> Split | None:
    """The requested split: "train" where only `holdout` is given, None where neither is.

    The share is stored in the cache and is the default from then on. Raises ConfigError for another one.
    """
    if split is None and holdout is None:
        _warn_if_not_split(cache)
        return None
    name = check_split("train" if split is None else split)
    share = None if holdout is None else check_holdout(holdout)
    with cache.catalogue.reading() as tables:
        stored = tables.holdout
    if stored is None and share is not None:
        with cache.catalogue.transaction() as tables:
            stored = tables.holdout
            if stored is None:
                tables.hold_out(share)
                stored = share
        save_settings(cache.directory, cache.catalogue)
    if stored is None:
        raise ConfigError(
            f"split={split!r}: {cache.path} holds nothing out so far; say which share, such as holdout=0.05"
        )
    if share not in (None, stored):
        raise ConfigError(
            f"holdout={share:g}: {cache.path} holds out {stored:g} of its samples, the same for all that use it; "
            "give that, or another directory ('cachestream clear' forgets it)"
        )
    return Split(name, stored)


def _warn_if_not_split(cache: Cache) -> None:
    with cache.catalogue.reading() as tables:
        stored = tables.holdout
    if stored is not None:
        logger.warning(
            "%s holds out %g of its samples, and they are among those that are read here: "
            "say split='train' to train",
            cache.path,
            stored,
        )


def count_held_out(cache: Cache, split: Split) -> None:
    """Count the held-out samples of shards made before the cache held any out, by reading them once."""
    choose_split(cache, split.name, split.holdout)  # the cache may have been cleared meanwhile
    with cache.catalogue.reading() as tables:
        uncounted = tables.uncounted_shards()
    counts: dict[int, int] = {}
    for shard_id in uncounted:
        try:
            shard = MappedShard(shard_path(cache.path, shard_id))
            counts[shard_id] = len(Split("held-out", split.holdout).rows(shard.key_hashes()))
        except CorruptShardError as error:  # quarantining a shard evicted meanwhile does nothing
            cache.quarantine(shard_id, str(error))
    if counts:
        with cache.catalogue.transaction() as tables:
            for shard_id, count in counts.items():
                tables.insert_split(shard_id, count)


def count_samples(cache: Cache, split: Split | None) -> int:
    """The number of samples of `split` (None: all) in published shards."""
    if split is None:
        return cache.num_samples
    count_held_out(cache, split)
    with cache.catalogue.reading() as tables:
        held_out = tables.held_out()[0]
        return held_out if split.held_out else tables.totals()[1] - held_out


def held_out_share(cache: Cache) -> tuple[float | None, int]:
    """The share that is held out (None: never requested), and the bytes of shards with nothing else."""
    with cache.catalogue.reading() as tables:
        return tables.holdout, tables.held_out()[1]
