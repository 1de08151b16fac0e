"""The process that lists: from the remote into the cache, page by page, until the listing has ended.

What it has stored is good whenever it is killed; the next one goes on after the last name.
"""

from __future__ import annotations

import random
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cachestream.errors import SourceError, SourceUnavailableError
from cachestream.remote.growing import GrowingSource, as_growing
from cachestream.remote.retry import backoff_delays
from cachestream.remote.stored import NamesWriter, StoredNames, read_mark
from cachestream.sampling.job import Job, load_shared, unpack
from cachestream.sampling.listings import Listings
from cachestream.sampling.process import EXIT_FATAL, end_now, live_with_parent
from cachestream.storage.admission import Owner
from cachestream.storage.cache import Cache

__all__ = ["main"]

_COMMIT_S: Final = 0.5
_SPACE_TICK_S: Final = 0.5


def main() -> None:
    """The process's main: what to list comes through stdin, whose end means stop."""
    stop = threading.Event()
    job_fd, is_next = live_with_parent(stop)
    job = load_shared(job_fd)
    code = 0
    try:
        _run(job, is_next=is_next, stop=stop)
    except SourceError:
        traceback.print_exc()
        code = EXIT_FATAL
    except BaseException:  # noqa: BLE001  a process's main: the supervisor ships the traceback home
        traceback.print_exc()
        code = 1
    end_now(code)


def _run(job: Job, *, is_next: bool, stop: threading.Event) -> None:
    source = as_growing(unpack(job.payload).source)
    assert source is not None
    cache = Cache(job.root)
    listings = Listings(cache.directory)
    path = listings.next if is_next else listings.current
    mark = read_mark(path) or listings.new_mark(job.fingerprint)
    if mark.is_complete:
        return
    owner = Owner(cache.directory, f"listing-{secrets.token_hex(6)}")
    try:
        store = _Store(cache, owner.name, NamesWriter(path, mark), stop, may_evict=job.when_full == "evict")
        last = ""
        if mark.count:
            known = StoredNames(path)
            known.look()
            last = known[len(known) - 1]
        elif not is_next:  # to see whether there are others by now, they are asked for again
            store.add(source.first_names, is_complete=False)
            last = source.first_names[-1]
        _list(source, store, last, stop)
    finally:
        owner.release()


def _list(source: GrowingSource, store: _Store, last: str, stop: threading.Event) -> None:
    """Store what comes after the name `last`; a remote that does not answer is asked again for ever."""
    delays = backoff_delays(random.Random())
    while not stop.is_set():
        waiting: list[str] = []
        stored_s = time.monotonic()
        try:
            for page in source.more_names(last):
                waiting += page.names
                if page.is_last or time.monotonic() - stored_s >= _COMMIT_S:
                    store.add(waiting, is_complete=page.is_last)
                    last = waiting[-1] if waiting else last
                    waiting, stored_s = [], time.monotonic()
                    delays = backoff_delays(random.Random())
                if stop.is_set():
                    return
        except SourceUnavailableError as error:
            sys.stderr.write(f"{error}; asking again\n")  # to the worker's log
            stop.wait(next(delays))
        else:
            return


@dataclass(frozen=True, slots=True)
class _Store:
    """Adds names to a stored listing, within the limit like all else."""

    cache: Cache
    owner: str
    writer: NamesWriter
    stop: threading.Event
    may_evict: bool

    def add(self, names: Sequence[str], *, is_complete: bool) -> None:
        admission = self.cache.admission
        name_bytes = sum(map(len, map(str.encode, names)))
        need_bytes = sum(map(admission.footprint, (name_bytes, 8 * (len(names) + 1), 4096)))
        while (reserved := admission.reserve(need_bytes, self.owner, may_evict=self.may_evict)) is None:
            if self.stop.wait(_SPACE_TICK_S):
                return
        try:
            self.writer.add(names, is_complete=is_complete)
        finally:
            admission.cancel(reserved)


if __name__ == "__main__":
    main()
