"""Storing the names that a source lists in the cache, where all processes read by them."""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from cachestream.errors import CacheError, CacheFullError
from cachestream.remote import pulse
from cachestream.remote.growing import GrowingSource
from cachestream.remote.names import Names
from cachestream.remote.source import Source
from cachestream.remote.stored import NamesWriter, StoredNames, read_mark
from cachestream.sampling.listings import Listings
from cachestream.storage.admission import Owner
from cachestream.storage.cache import Cache
from cachestream.storage.faults import translated_disk_errors

__all__ = ["Store", "keep_names", "list_all", "open_store", "store_rest"]

_COMMIT_S: Final = 0.5
_SPACE_TICK_S: Final = 0.5


@dataclass(slots=True)
class Store:
    """Adds names to a stored listing, within the limit like all else; `last` is the last of them.

    `wait` waits for space, so many seconds, and says whether to give up.
    """

    cache: Cache
    owner: str
    writer: NamesWriter
    wait: Callable[[float], bool]
    may_evict: bool
    last: str = ""

    @property
    def is_complete(self) -> bool:
        return self.writer.mark.is_complete

    def add(self, names: Sequence[str], *, is_complete: bool) -> None:
        admission = self.cache.admission
        name_bytes = sum(map(len, map(os.fsencode, names)))
        need_bytes = sum(map(admission.footprint, (name_bytes, 8 * (len(names) + 1), 4096)))
        while (
            reserved := admission.reserve(
                need_bytes, self.owner, may_evict=self.may_evict, spare_unused=False
            )
        ) is None:
            if self.wait(_SPACE_TICK_S):
                return
        try:
            with translated_disk_errors(self.cache.directory.worker, "storing the names that are listed"):
                self.writer.add(names, is_complete=is_complete)
            self.last = names[-1] if names else self.last
        finally:
            admission.cancel(reserved, self.owner)


def list_all(source: GrowingSource, cache: Cache) -> Source:
    """`source` over a listing of all in `cache`: what of it is stored there, and the rest, which is listed here.

    For one who fills the cache without a worker. Raises CacheFullError where there is no space for the names, and
    what `more_names` does.
    """
    listings, first = Listings(cache.directory), source.first_names
    if not listings.begins(source.fingerprint, len(first), first.digest):
        listings.drop()

    def give_up(_delay_s: float) -> bool:
        raise CacheFullError(f"no space in {cache.path} for the names that its source lists")

    with open_store(source, cache, give_up, is_next=False, may_evict=True) as store:
        store_rest(source, store, threading.Event())
    return source.over(listings.load())


def keep_names(source: Any, cache: Cache) -> None:
    """Store the names of a source that was listed at once, so that they are known when it is listed otherwise.

    Nothing for one without names, or where there is no space: then what is cached is fetched again.
    """
    names, listings = getattr(source, "first_names", None), Listings(cache.directory)
    if not isinstance(names, Names) or getattr(source, "listing_digest", "") != names.digest:
        return  # those of a manifest with labels are not all that there is to a unit
    if listings.is_complete and listings.begins(source.fingerprint, len(names), names.digest):
        return

    def give_up(_delay_s: float) -> bool:
        return True

    def clean() -> None:  # what one that was killed has left, or refused by the disk, must not take the space
        with suppress(OSError):
            listings.clean()

    clean()
    with (
        suppress(CacheError),  # filling goes on without
        open_store(source, cache, give_up, is_next=False, may_evict=False, is_complete=True),
    ):
        pass
    clean()


@contextmanager
def open_store(
    source: GrowingSource,
    cache: Cache,
    wait: Callable[[float], bool],
    *,
    is_next: bool,
    may_evict: bool,
    is_complete: bool = False,
) -> Iterator[Store]:
    """The stored listing, to be added to: what there is of it, or the first names."""
    listings = Listings(cache.directory)
    path = listings.next if is_next else listings.current
    mark = read_mark(path) or listings.new_mark(source.fingerprint)
    owner = Owner(cache.directory, f"listing-{secrets.token_hex(6)}")
    try:
        with translated_disk_errors(cache.directory.worker, "storing the names that are listed"):
            writer = NamesWriter(path, mark)
    except BaseException:
        owner.release()
        raise
    try:
        store = Store(cache, owner.name, writer, wait, may_evict)
        if mark.count:
            known = StoredNames(path)
            known.look()
            store.last = known[len(known) - 1]
        elif not is_next:  # to see whether there are others by now, they are asked for again
            store.add(source.first_names, is_complete=is_complete)
        yield store
    finally:
        writer.close()
        owner.release()


def store_rest(source: GrowingSource, store: Store, stop: threading.Event) -> None:
    """Store what comes after the last name, until the end or until told to stop: the first page at once, others as they
    come, every half a second at most. Raises what `more_names` does.
    """
    waiting: list[str] = []
    stored_s = -math.inf
    for page in () if store.is_complete else source.more_names(store.last):
        pulse.fetched(0)
        waiting += page.names
        if page.is_last or time.monotonic() - stored_s >= _COMMIT_S:
            store.add(waiting, is_complete=page.is_last)
            waiting, stored_s = [], time.monotonic()
        if stop.is_set():
            return
