"""Sources whose listing goes on while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from cachestream.remote.names import Names
from cachestream.remote.source import Source
from cachestream.remote.stored import AnyNames, StoredNames

if TYPE_CHECKING:  # the supervisor comes by here, and loads no driver
    from cachestream.remote.paging import Page

__all__ = ["GrowingSource", "as_growing", "begins_with", "is_source", "stored_names"]


@runtime_checkable
class GrowingSource(Source, Protocol):
    """A source of named units, of which only the first may be known: unit i is the one of name i.

    Asked for `num_units`, it lists the rest at once. A worker does not ask: it has a process of its own list
    into the cache, and reads `over` what that has stored.
    """

    @property
    def is_listing(self) -> bool:
        """Whether there are more names than the first."""
        ...

    @property
    def first_names(self) -> AnyNames:
        """The names that are listed already."""
        ...

    def more_names(self, last: str) -> Iterator[Page]:
        """The names after `last`, page by page; raises SourceError and SourceUnavailableError."""
        ...

    def over(self, names: AnyNames) -> Source:
        """The same source over a listing that somebody else makes, as far as it goes."""
        ...


def as_growing(source: Any) -> GrowingSource | None:
    """`source`, if its listing goes on."""
    # Not isinstance alone: to see whether num_units is there, it would ask for it.
    if getattr(source, "is_listing", False) and callable(getattr(source, "over", None)):
        found: GrowingSource = source
        return found
    return None


def is_source(value: Any) -> bool:
    """Whether `value` is a source; asks none whose listing goes on for its number of units."""
    return as_growing(value) is not None or (isinstance(value, Source) and not isinstance(value, type))


def begins_with(source: Any, count: int | None, listing: str) -> bool:
    """Whether the first `count` names of `source` are those with the digest `listing`."""
    names = getattr(source, "first_names", None)
    if not isinstance(names, Names | StoredNames) or count is None or count > len(names):
        return False
    return names.digest_of(count) == listing


def stored_names(source: Any) -> StoredNames | None:
    """The stored listing that `source` reads by, if it does."""
    names = getattr(source, "first_names", None)
    return names if isinstance(names, StoredNames) else None
