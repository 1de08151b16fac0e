"""The stored listings of a cache: the one that is read by, the one that may take its place, and earlier ones."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cachestream.private import move
from cachestream.remote.stored import AnyNames, Mark, StoredNames, file_names, read_mark
from cachestream.sampling.job import Job
from cachestream.sampling.order import PassPlan
from cachestream.storage.directory import Directory, remove_if_there

__all__ = ["Listings", "is_over"]

_PREFIX: Final = "listing"
_EARLIER: Final = re.compile(r"listing-[0-9a-f]{12}\.json")
_MOST_EARLIER: Final = 8


@dataclass(frozen=True, slots=True)
class Listings:
    """The listings in the cache's folder of the worker. Only the supervisor changes them, and the processes that it runs."""

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
        return self.begins(job.fingerprint, job.num_units or 0, job.listing)

    def begins(self, fingerprint: str, count: int, digest: str) -> bool:
        """Whether the current listing is of this source, and its first `count` names have this digest."""
        mark = read_mark(self.current)
        return mark is not None and mark.fingerprint == fingerprint and self.load().digest_of(count) == digest

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
        self.retire()
        move(self.next, self.current)
        self.clean()

    def retire(self) -> None:
        """Keep the current listing as an earlier one: what is cached of it is found by its names."""
        mark = read_mark(self.current)
        if mark is not None:
            move(self.current, self.directory.worker_file(f"{mark.stem}.json"))

    def earlier(self) -> list[StoredNames]:
        """Earlier listings, the last one first."""
        paths = {path: os.stat(path).st_mtime_ns for path in self._earlier_marks()}
        found = [StoredNames(path) for path in sorted(paths, key=paths.__getitem__, reverse=True)]
        return [names for names in found if names.look() is not None]

    def keep_earlier(self, plans: Iterable[PassPlan]) -> None:
        """Forget earlier listings but those of the passes `plans`, and these too beyond the last few."""
        wanted = list(plans)
        kept = [names for names in self.earlier() if any(is_over(names, plan) for plan in wanted)]
        paths = {names.path for names in kept[:_MOST_EARLIER]}
        for path in self._earlier_marks():
            if path not in paths:
                remove_if_there(path)
        self.clean()

    def forget_secrets(self) -> None:
        """Forget listings in which an earlier release left the queries of URLs, which may be signed."""
        for path in (self.current, *self._earlier_marks()):
            mark, names = read_mark(path), StoredNames(path)
            if mark is None or "http" not in mark.fingerprint or names.look() is None:
                continue
            if any("=" in name.partition("?")[2] for name in names):
                remove_if_there(path)
        self.clean()

    def drop_next(self) -> None:
        remove_if_there(self.next)
        self.clean()

    def drop(self) -> None:
        """Forget all listings."""
        for path in (self.current, *self._earlier_marks()):
            remove_if_there(path)
        self.drop_next()

    def _earlier_marks(self) -> list[str]:
        names = [name for name in os.listdir(self.directory.worker) if _EARLIER.fullmatch(name)]
        return [self.directory.worker_file(name) for name in names]

    def clean(self) -> None:
        """Remove what no mark knows: a writer that died has left it. None may be at work."""
        paths = [self.current, self.next, *self._earlier_marks()]
        marks = [read_mark(path) for path in paths]
        kept = {name for mark in marks if mark is not None for name in file_names(mark.stem)}
        kept |= set(map(os.path.basename, paths))
        for name in os.listdir(self.directory.worker):
            if name.startswith(_PREFIX) and name not in kept:
                remove_if_there(self.directory.worker_file(name))


def is_over(names: AnyNames, plan: PassPlan) -> bool:
    """Whether the units of a pass are those of `names`, or the first of them."""
    count = plan.num_units
    return (
        bool(count) and count is not None and count <= len(names) and names.digest_of(count) == plan.listing
    )
