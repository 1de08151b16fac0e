"""Listings of a remote, stored in the cache: their files, and how names are added to them.

A listing that a later one replaces is kept for as long as samples are cached by its names.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from cachestream import tracing
from cachestream.errors import CacheError, CacheFullError
from cachestream.linux import move
from cachestream.listing.names import Mark, Names, NamesWriter, StoredNames, file_names, read_mark
from cachestream.sources.base import IncrementalSource, NamedSource, Source
from cachestream.storage.layout import Directory, remove_if_there
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.publish import Publisher, Reserved
from cachestream.storage.reservations import Owner
from cachestream.transport import metering
from cachestream.worker.order import PassPlan

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

_PREFIX: Final = "listing"
_EARLIER: Final = re.compile(r"listing-[0-9a-f]{12}\.json")
_MOST_EARLIER: Final = 8
_COMMIT_S: Final = 0.5
_SPACE_TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Listings:
    """The listings in the worker folder of a cache; only the supervisor and its processes change them."""

    directory: Directory

    @property
    def current(self) -> str:
        """The path of the mark of the current listing, whose names samples are read by."""
        return self.directory.worker_file(f"{_PREFIX}.json")

    @property
    def next(self) -> str:
        """The path of the mark of the next listing, which is made to find changes of the remote."""
        return self.directory.worker_file(f"{_PREFIX}-next.json")

    def load(self) -> StoredNames:
        """The current listing, as far as it goes."""
        names = StoredNames(self.current)
        names.look()
        return names

    @property
    def is_complete(self) -> bool:
        """True if there is a current listing, and it is complete."""
        mark = read_mark(self.current)
        return mark is not None and mark.is_complete

    def begins(self, fingerprint: str, count: int, digest: str) -> bool:
        """True if the current listing is of this source, and its first `count` names have this digest."""
        mark = read_mark(self.current)
        return mark is not None and mark.fingerprint == fingerprint and self.load().digest_of(count) == digest

    def differs(self) -> bool:
        """True if the next listing holds other names than the current one."""
        current, following = self.load(), StoredNames(self.next)
        following.look()
        return (len(current), current.digest) != (len(following), following.digest)

    def promote(self) -> None:
        """Make the next listing the current one. No sampling process may run."""
        self.retire()
        move(self.next, self.current)
        self.clean()

    def retire(self) -> None:
        """Keep the current listing as an earlier one: its names find the samples that are cached of it."""
        mark = read_mark(self.current)
        if mark is not None:
            move(self.current, self.directory.worker_file(f"{mark.stem}.json"))

    def earlier(self) -> list[StoredNames]:
        """The earlier listings, the latest one first."""
        paths = {path: os.stat(path).st_mtime_ns for path in self._earlier_marks()}
        found = [StoredNames(path) for path in sorted(paths, key=paths.__getitem__, reverse=True)]
        return [names for names in found if names.look() is not None]

    def keep_earlier(self, plans: Iterable[PassPlan]) -> None:
        """Remove earlier listings, except for the latest few of the passes `plans`."""
        wanted = list(plans)
        kept = [names for names in self.earlier() if any(lists_units_of(names, plan) for plan in wanted)]
        paths = {names.path for names in kept[:_MOST_EARLIER]}
        for path in self._earlier_marks():
            if path not in paths:
                remove_if_there(path)
        self.clean()

    def drop_next(self) -> None:
        remove_if_there(self.next)
        self.clean()

    def drop(self) -> None:
        """Remove all listings."""
        for path in (self.current, *self._earlier_marks()):
            remove_if_there(path)
        self.drop_next()

    def _earlier_marks(self) -> list[str]:
        names = [name for name in os.listdir(self.directory.worker) if _EARLIER.fullmatch(name)]
        return [self.directory.worker_file(name) for name in names]

    def clean(self) -> None:
        """Remove files that no mark names: a writer that died has left them. No writer may be at work."""
        paths = [self.current, self.next, *self._earlier_marks()]
        marks = [read_mark(path) for path in paths]
        kept = {name for mark in marks if mark is not None for name in file_names(mark.stem)}
        kept |= set(map(os.path.basename, paths))
        for name in os.listdir(self.directory.worker):
            if name.startswith(_PREFIX) and name not in kept:
                remove_if_there(self.directory.worker_file(name))


def lists_units_of(names: Names, plan: PassPlan) -> bool:
    """True if the units of the pass are all of `names`, or the first of them."""
    count = plan.num_units or 0
    return 0 < count <= len(names) and names.digest_of(count) == plan.listing


class Space(Protocol):
    """Reserves space in a cache, as a `Publisher` does."""

    def reserve(
        self, sizes: Sequence[int], *, may_evict: bool, spare_unused: bool
    ) -> Sequence[Reserved] | None: ...
    def cancel(self, reserved: Sequence[Reserved]) -> None: ...


@dataclass(slots=True)
class Store:
    """Adds names to a stored listing, within the limit of the cache; `last` is the last stored name.

    `wait(delay_s)` is called while there is no space, and returns True to give up.
    """

    directory: Directory
    space: Space
    writer: NamesWriter
    wait: Callable[[float], bool]
    may_evict: bool
    last: str = ""

    @property
    def is_complete(self) -> bool:
        return self.writer.mark.is_complete

    def add(self, names: Sequence[str], *, is_complete: bool) -> None:
        name_bytes = sum(map(len, map(os.fsencode, names)))
        sizes = name_bytes, 8 * (len(names) + 1), 4096
        while (reserved := self.space.reserve(sizes, may_evict=self.may_evict, spare_unused=False)) is None:
            if self.wait(_SPACE_TICK_S):
                return
        try:
            with translated_disk_errors(self.directory.worker, "storing the names that are listed"):
                self.writer.add(names, is_complete=is_complete)
            self.last = names[-1] if names else self.last
        finally:
            self.space.cancel(reserved)


def list_all(source: IncrementalSource, cache: Cache) -> Source:
    """Complete the stored listing of `source`, and return the source over all its names.

    Used where no worker fills the cache. Raises CacheFullError if there is no space for the names, and the
    errors of `more_names`.
    """
    listings, first = Listings(cache.directory), source.first_names
    if not listings.begins(source.fingerprint, len(first), first.digest):
        listings.drop()

    def give_up(_delay_s: float) -> bool:
        raise CacheFullError(f"no space in {cache.path} for the names that its source lists")

    with Owner.temporary(cache.directory, "listing") as owner:
        space = Publisher(cache.directory, cache.catalogue, cache.reservations, owner.name)
        with open_store(source, cache.directory, space, give_up, is_next=False, may_evict=True) as store:
            store_rest(source, store)
    return source.over(listings.load())


def has_plain_names(source: Source) -> bool:
    """True if the units of `source` have names, all of which are known, and are nothing but their names."""
    if not isinstance(source, NamedSource) or isinstance(source.first_names, StoredNames):
        return False
    return source.listing_digest == source.first_names.digest  # differs for a manifest with labels


def keep_names(source: NamedSource, directory: Directory, space: Space) -> None:
    """Store the names of a source that was listed at once, for passes over a later listing.

    Stores nothing if there is no space: then cached samples are fetched again.
    """
    names, listings = source.first_names, Listings(directory)
    if listings.is_complete and listings.begins(source.fingerprint, len(names), names.digest):
        return

    def clean() -> None:  # files of a writer that was killed must not take space
        with suppress(OSError):
            listings.clean()

    clean()
    with (
        suppress(CacheError),  # filling works without
        open_store(
            source, directory, space, lambda _delay_s: True, is_next=False, may_evict=False, is_complete=True
        ),
    ):
        pass
    clean()


@contextmanager
def open_store(
    source: NamedSource,
    directory: Directory,
    space: Space,
    wait: Callable[[float], bool],
    *,
    is_next: bool,
    may_evict: bool,
    is_complete: bool = False,
) -> Iterator[Store]:
    """Open the stored listing for adding names; a new one begins with the first names of the source."""
    listings = Listings(directory)
    path = listings.next if is_next else listings.current
    known = StoredNames(path)
    mark = known.look() or Mark(f"{_PREFIX}-{secrets.token_hex(6)}", source.fingerprint)
    with translated_disk_errors(directory.worker, "storing the names that are listed"):
        writer = NamesWriter(path, mark)
    try:
        store = Store(directory, space, writer, wait, may_evict, known[-1] if mark.count else "")
        if not mark.count and not is_next:  # a listing for changes asks for the first names again
            store.add(source.first_names, is_complete=is_complete)
        yield store
    finally:
        writer.close()


def store_rest(source: IncrementalSource, store: Store) -> None:
    """Store the names after the last one, to their end.

    The first page is stored at once, others in groups, every half second at most. Raises the errors of
    `more_names`.
    """
    waiting: list[str] = []
    stored_s, began_s = -math.inf, time.monotonic()
    for page in () if store.is_complete else source.more_names(store.last):
        tracing.add("list", began_s, time.monotonic())
        metering.fetched(0)
        waiting += page.names
        if page.is_last or time.monotonic() - stored_s >= _COMMIT_S:
            store.add(waiting, is_complete=page.is_last)
            waiting, stored_s = [], time.monotonic()
        began_s = time.monotonic()
