"""The stored listings of a cache: the one that is read by, and the one that may take its place."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from cachestream.remote.stored import Mark, StoredNames, file_names, read_mark
from cachestream.sampling.job import Job
from cachestream.storage.directory import Directory, remove_if_there

__all__ = ["Listings"]

_PREFIX = "listing"


@dataclass(frozen=True, slots=True)
class Listings:
    """The listings in the cache's folder of the worker. Only the supervisor changes them, and the lister that it runs."""

    directory: Directory

    @property
    def current(self) -> str:
        """Where the mark of the listing lies that samples are read by."""
        return self.directory.worker_file(f"{_PREFIX}.json")

    @property
    def next(self) -> str:
        """Where the mark of one lies that is made to see whether the remote has changed."""
        return self.directory.worker_file(f"{_PREFIX}-next.json")

    def load(self) -> StoredNames:
        """The current listing, as far as it goes."""
        names = StoredNames(self.current)
        names.look()
        return names

    @property
    def is_complete(self) -> bool:
        """Whether the current listing is there, to its end."""
        mark = read_mark(self.current)
        return mark is not None and mark.is_complete

    def is_of(self, job: Job) -> bool:
        """Whether the current listing is of the job's source, and begins as that does now."""
        mark, count = read_mark(self.current), job.num_units or 0
        return (
            mark is not None
            and mark.fingerprint == job.fingerprint
            and self.load().digest_of(count) == job.listing
        )

    def new_mark(self, fingerprint: str) -> Mark:
        """The mark of a listing that is to be made."""
        return Mark(f"{_PREFIX}-{secrets.token_hex(6)}", fingerprint)

    def differs(self) -> bool:
        """Whether the next listing holds other names than the current one."""
        current, following = self.load(), StoredNames(self.next)
        following.look()
        return (len(current), current.digest) != (len(following), following.digest)

    def promote(self) -> None:
        """Read by the next listing from now on. No sampling process may run."""
        os.replace(self.next, self.current)
        self._clean()

    def drop_next(self) -> None:
        remove_if_there(self.next)
        self._clean()

    def drop(self) -> None:
        """Forget all listings."""
        remove_if_there(self.current)
        self.drop_next()

    def _clean(self) -> None:
        marks = [read_mark(path) for path in (self.current, self.next)]
        kept = {name for mark in marks if mark is not None for name in file_names(mark.stem)}
        kept |= {os.path.basename(self.current), os.path.basename(self.next)}
        for name in os.listdir(self.directory.worker):
            if name.startswith(_PREFIX) and name not in kept:
                remove_if_there(self.directory.worker_file(name))
