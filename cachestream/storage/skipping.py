"""Telling the user of the library, once, of what would go unnoticed: that much is skipped, that nobody fills the cache any more."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from cachestream.storage.looking import describe_loss, lost_worker
from cachestream.storage.status import describe_skipped, remedy_for_skipped

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

__all__ = ["is_much", "warn_of_loss", "warn_of_skipped"]

_SHARE: Final = 0.01  # of all

logger = logging.getLogger("cachestream")

# The caches that this process was warned of, and the workers that they have lost.
_told: set[str] = set()


def is_much(skipped: int, used: int) -> bool:
    """Whether `skipped` samples are too many, beside `used` ones, to be passed over in silence."""
    return skipped > _SHARE * (skipped + used)


def warn_of_skipped(cache: Cache) -> None:
    """Warn, once a cache and process, where more than 1 % of the samples were skipped."""
    if cache.cache_id in _told:
        return
    with cache.catalogue.reading() as tables:
        failures, source = tables.failures(), str(tables.meta("source", ""))
        used = tables.totals()[1] + int(tables.meta("evicted_samples", 0))
    if is_much(sum(one.count for one in failures), used):
        _told.add(cache.cache_id)
        remedy = remedy_for_skipped(failures, source)
        logger.warning(
            "%s: %d samples were cached, and %s; %s", cache.path, used, describe_skipped(failures), remedy
        )


def warn_of_loss(cache: Cache, then: str = "") -> None:
    """Warn, once a worker and process, where the worker ended without a word, and of what is done `then`."""
    lost = lost_worker(cache.directory)
    if lost is not None and (key := f"{cache.cache_id} {lost}") not in _told:
        _told.add(key)
        logger.warning("%s: %s", cache.path, describe_loss(lost, then))
