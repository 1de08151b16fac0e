"""Listings of a remote, stored in the cache: their files, and the process that lists page by page into them.

The process may be killed at any point: the next one continues after the last name that is stored. It prints
empty lines as signs of life. A listing that a later one replaces is kept for as long as samples are cached by
its names.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from cachestream.errors import (
    CacheError,
    CacheFullError,
    SourceError,
    SourceUnavailableError,
)
from cachestream.linux import move, name_process
from cachestream.listing.names import Mark, Names, NamesWriter, StoredNames, file_names, read_mark
from cachestream.sources.base import IncrementalSource, NamedSource, Source, as_incremental
from cachestream.storage.cache import Cache
from cachestream.storage.layout import Directory, remove_if_there
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.reservations import Owner
from cachestream.transport import metering
from cachestream.transport.remote_errors import backoff_delays
from cachestream.worker.fork_server import ChildProcess, ForkServer
from cachestream.worker.health import LATER_PAUSE_S, START_DEADLINE_S, GiveUpError
from cachestream.worker.job import Job, load_shared, unpack
from cachestream.worker.order import PassPlan
from cachestream.worker.processes import EXIT_FATAL, EXIT_LATER, end_now, exit_code, live_with_parent

_PREFIX: Final = "listing"
_EARLIER: Final = re.compile(r"listing-[0-9a-f]{12}\.json")
_MOST_EARLIER: Final = 8
_COMMIT_S: Final = 0.5
_SPACE_TICK_S: Final = 0.5
_BEAT_S: Final = 0.2
_MOST_DEATHS: Final = 5
_LONGEST_PAUSE_S: Final = 5.0
_LEAST_PATIENCE_S: Final = 5.0  # the process shows life every half a second

logger = logging.getLogger("cachestream.worker")


@dataclass(frozen=True, slots=True)
class Listings:
    """The listings in the worker folder of a cache; only the supervisor and its processes change them."""

    directory: Directory

    @property
    def current(self) -> str:
        """The path of the mark of the listing by which samples are read."""
        return self.directory.worker_file(f"{_PREFIX}.json")

    @property
    def next(self) -> str:
        """The path of the mark of a listing that is made to find changes of the remote."""
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


@dataclass(slots=True)
class Store:
    """Adds names to a stored listing, within the limit of the cache; `last` is the last name.

    `wait(delay_s)` waits for space, and returns True to give up.
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
        reservations = self.cache.reservations
        name_bytes = sum(map(len, map(os.fsencode, names)))
        need_bytes = sum(map(reservations.footprint, (name_bytes, 8 * (len(names) + 1), 4096)))
        while (
            reserved := reservations.reserve(
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
            reservations.cancel(reserved, self.owner)


def list_all(source: IncrementalSource, cache: Cache) -> Source:
    """Complete the stored listing of `source`, and return the source over all its names.

    For filling the cache without a worker. Raises CacheFullError if there is no space for the names, and the
    errors of `more_names`.
    """
    listings, first = Listings(cache.directory), source.first_names
    if not listings.begins(source.fingerprint, len(first), first.digest):
        listings.drop()

    def give_up(_delay_s: float) -> bool:
        raise CacheFullError(f"no space in {cache.path} for the names that its source lists")

    with open_store(source, cache, give_up, is_next=False, may_evict=True) as store:
        store_rest(source, store)
    return source.over(listings.load())


def keep_names(source: Source, cache: Cache) -> None:
    """Store the names of a source that was listed at once, for passes over a later listing.

    Stores nothing for a source without names, or if there is no space: then cached samples are fetched again.
    """
    if not isinstance(source, NamedSource) or isinstance(source.first_names, StoredNames):
        return
    names, listings = source.first_names, Listings(cache.directory)
    if source.listing_digest != names.digest:
        return  # a unit of a manifest with labels is more than its name
    if listings.is_complete and listings.begins(source.fingerprint, len(names), names.digest):
        return

    def clean() -> None:  # files of a writer that was killed must not take space
        with suppress(OSError):
            listings.clean()

    clean()
    with (
        suppress(CacheError),  # filling works without
        open_store(source, cache, lambda _delay_s: True, is_next=False, may_evict=False, is_complete=True),
    ):
        pass
    clean()


@contextmanager
def open_store(
    source: NamedSource,
    cache: Cache,
    wait: Callable[[float], bool],
    *,
    is_next: bool,
    may_evict: bool,
    is_complete: bool = False,
) -> Iterator[Store]:
    """Open the stored listing for adding names; a new one begins with the first names of the source."""
    listings = Listings(cache.directory)
    path = listings.next if is_next else listings.current
    known = StoredNames(path)
    mark = known.look() or Mark(f"{_PREFIX}-{secrets.token_hex(6)}", source.fingerprint)
    owner = Owner(cache.directory, f"listing-{secrets.token_hex(6)}")
    try:
        with translated_disk_errors(cache.directory.worker, "storing the names that are listed"):
            writer = NamesWriter(path, mark)
        try:
            store = Store(cache, owner.name, writer, wait, may_evict, known[-1] if mark.count else "")
            if not mark.count and not is_next:  # a listing for changes asks for the first names again
                store.add(source.first_names, is_complete=is_complete)
            yield store
        finally:
            writer.close()
    finally:
        owner.release()


def store_rest(source: IncrementalSource, store: Store) -> None:
    """Store the names after the last one, to their end.

    The first page is stored at once, others in groups, every half second at most. Raises the errors of
    `more_names`.
    """
    waiting: list[str] = []
    stored_s = -math.inf
    for page in () if store.is_complete else source.more_names(store.last):
        metering.fetched(0)
        waiting += page.names
        if page.is_last or time.monotonic() - stored_s >= _COMMIT_S:
            store.add(waiting, is_complete=page.is_last)
            waiting, stored_s = [], time.monotonic()


class Lister:
    """Lists for one job: completes the current listing, and on demand makes another one to find changes."""

    def __init__(self, job: Job, server: ForkServer | None, job_fd: int, listings: Listings) -> None:
        self._hang_timeout_s, self._listings = job.hang_timeout_s, listings
        self.process = ChildProcess("cachestream.worker.lister", "lister", server, job.sys_path, job_fd)
        self._is_next = False
        self._deaths = 0
        self._listed_before = 0
        self.has_changed = False

    @property
    def running(self) -> bool:
        """True if a process lists, or is about to."""
        return not self.process.is_over

    def begin(self) -> None:
        """Complete the current listing."""
        self._listings.drop_next()
        if not self._listings.is_complete:
            self._start(is_next=False)

    def look_for_changes(self) -> None:
        """List all again beside the current listing; sets `has_changed` at the end."""
        if not self.running:
            self.has_changed = False
            self._listings.drop_next()
            self._start(is_next=True)

    def promote(self) -> bool:
        """Replace the current listing by the new one if they differ.

        To be called while no sampling process runs.
        """
        if not self.has_changed:
            return False
        self._listings.promote()
        self.has_changed = False
        return True

    def tick(self, now_s: float, resumed_s: float = -math.inf) -> None:
        """Reap, restart or kill the process as needed; raises GiveUpError if the current listing has failed.

        `resumed_s`: the time at which all processes continued after a stop; none could show life before.
        """
        code = self.process.reap()
        if code is not None:
            self._ended(code, now_s)
        elif self.process.running and self._hangs(now_s, resumed_s):
            logger.warning("the lister shows no sign of life: it is ended, and another one goes on")
            self.process.kill()
        if self.process.start_at_s is not None and now_s >= self.process.start_at_s:
            self._start(is_next=self._is_next)

    def _hangs(self, now_s: float, resumed_s: float) -> bool:
        life_s = self.process.life_s
        if life_s is None:
            return now_s - max(self.process.started_s, resumed_s) > START_DEADLINE_S
        return now_s - max(life_s, resumed_s) > max(_LEAST_PATIENCE_S, self._hang_timeout_s)

    def stop(self) -> None:
        """End the process; the next one continues the current listing, or restarts a listing for changes."""
        if self.process.running:
            self.process.end()
            self.process.reap()
            self._listings.drop_next()
        self.process.start_at_s = None

    def _start(self, is_next: bool) -> None:
        self._is_next = is_next
        self.process.start_at_s = time.monotonic()  # it stays due if the disk or the system refuses
        self._listings.clean()  # a process that died before its first mark has left files that no mark names
        self._listed_before = self._listed
        self.process.start(time.monotonic(), is_next)

    @property
    def _listed(self) -> int:
        """The number of names that are stored of the listing in progress."""
        mark = read_mark(self._listings.next if self._is_next else self._listings.current)
        return 0 if mark is None else mark.count

    def _ended(self, code: int, now_s: float) -> None:
        if code == 0:
            self._deaths = 0
            if self._is_next:
                self.has_changed = self._listings.differs()
                if not self.has_changed:
                    self._listings.drop_next()
            return
        if code == EXIT_LATER:
            self.process.start_at_s = now_s + LATER_PAUSE_S
            return
        self._deaths = self._deaths + 1 if self._listed == self._listed_before else 1
        if code != EXIT_FATAL and self._deaths < _MOST_DEATHS:
            logger.warning("the lister ended with code %d", code)
            self.process.start_at_s = now_s + random.uniform(0.0, _LONGEST_PAUSE_S)
        elif self._is_next:
            logger.warning("whether the remote has changed cannot be found out; going on by what is known")
            self._listings.drop_next()
        else:
            words = self.process.last_words
            raise GiveUpError(words or f"the process that lists ended {self._deaths} times, with code {code}")


def main() -> None:
    """The main of the process: its arguments come through stdin, whose end means stop."""
    job_fd, is_next = live_with_parent()
    name_process("cs-lister")
    end_now(exit_code(lambda: _run(load_shared(job_fd), is_next=is_next), fatal=SourceError))


def _run(job: Job, *, is_next: bool) -> None:
    source = as_incremental(unpack(job.payload).source)
    assert source is not None
    metering.install(_Life().show)

    def wait(delay_s: float) -> bool:
        metering.wait(delay_s)
        return False

    cache, delays = Cache(job.root), backoff_delays(random.Random())
    with open_store(source, cache, wait, is_next=is_next, may_evict=job.when_full == "evict") as store:
        while True:
            known = store.last
            try:
                store_rest(source, store)
            except SourceUnavailableError as error:
                sys.stderr.write(f"{error}; asking again\n")  # to the worker's log
                delays = delays if store.last == known else backoff_delays(random.Random())
                metering.wait(next(delays))
            else:
                return


class _Life:
    """Prints empty lines as signs of life."""

    def __init__(self) -> None:
        self._shown_s = -math.inf

    def show(self, _nbytes: int = 0) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _BEAT_S:
            self._shown_s = now_s
            sys.stdout.write("\n")
            sys.stdout.flush()
