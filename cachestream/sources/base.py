"""The `Source` protocol, through which every kind of remote data is read, and its extensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from cachestream.config import whole_number
from cachestream.errors import ConfigError, SampleError, SourceError
from cachestream.listing.names import Names, StoredNames

if TYPE_CHECKING:
    from cachestream.listing.names import Page

P = ParamSpec("P")
T = TypeVar("T")

MAX_REASON: Final = 800


@runtime_checkable
class Source(Protocol):
    """Remote data as numbered units, each read on its own, in any order, in any process.

    A unit is fetched as a whole: a file, a tar, a row group, a window. A source is picklable, and `read` may
    be called from several threads at once. No attribute of it asks the remote.

    `cachestream.sources.base` has protocols for what else some sources can do, such as `read_rows`; a source
    has those whose members it has.
    """

    @property
    def fingerprint(self) -> str:
        """The identity of the data: two sources with the same fingerprint yield the same samples."""
        ...

    @property
    def num_units(self) -> int | None:
        """The number of units; None for an endless source."""
        ...

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield `(key, sample)` for each sample of `unit`.

        `rng` is seeded from the run's seed, the pass and the unit, so that the same samples come again.
        Raises SampleError for a unit that cannot be used (skipped and counted), and SourceUnavailableError
        for a remote that does not answer (retried).
        """
        ...


def made_with(source: Source) -> str:
    """The end of the fingerprint that says how samples are made of the data (the size of images, the defaults
    of fields), where the source tells it; else "".
    """
    found: object = getattr(source, "made_with", "")
    return found if isinstance(found, str) and source.fingerprint.endswith(found) else ""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Samples in columns: sample i is a dict of value i of every field.

    A field is an array `[n, ...]`, or a sequence of n str or n bytes.
    """

    keys: Sequence[str]
    fields: Mapping[str, npt.NDArray[Any] | Sequence[str] | Sequence[bytes]]

    @property
    def samples(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The samples one by one, as `Source.read` yields them."""
        names = tuple(self.fields)
        for key, values in zip(self.keys, zip(*self.fields.values(), strict=True), strict=True):
            yield key, dict(zip(names, values, strict=True))


@dataclass(frozen=True, slots=True)
class Skipped:
    """`count` samples that cannot be used, and the `reason`, without the name of the file."""

    reason: str
    count: int = 1


# A sample with its name in the file, which becomes its key; or several in columns; or some that are left out.
Item = tuple[str | int, Any] | Rows | Skipped


@runtime_checkable
class ColumnarSource(Source, Protocol):
    """A source that can also yield samples in columns, which is many times as fast for small ones."""

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        """Yield the samples of `read` in the same order, those in columns as Rows.

        Used for samples that are cached without a transform. Raises the errors of `read`.
        """
        ...


@runtime_checkable
class DivisibleSource(Source, Protocol):
    """A source of files that can be read in parts. Its units are then numbered in rounds.

    Each round has about the same share of every file.
    """

    @property
    def round_ends(self) -> tuple[int, ...]:
        """The number of units up to the end of each round; empty if files are read whole."""
        ...

    def parts_for(self, limit_bytes: int) -> int:
        """Return the fewest parts with which a cache of `limit_bytes` holds samples of many files.

        1 if files are better read whole, or cannot be read in parts.
        """
        ...

    def divided(self, parts: int) -> DivisibleSource:
        """Return a source of the same samples, with each file read in `parts`."""
        ...


@runtime_checkable
class LabelledSource(Source, Protocol):
    """A source whose samples have a label that is the index of a name."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names, by label; () for labels of another kind."""
        ...


@runtime_checkable
class ListedSource(Source, Protocol):
    """A source whose units were listed, and differ if it is opened when other data are there."""

    @property
    def listing_digest(self) -> str:
        """A digest of all units known so far: the same for the same units in the same order."""
        ...


@runtime_checkable
class NamedSource(ListedSource, Protocol):
    """A listed source whose units have names, by which a unit is known again when others come or go."""

    @property
    def first_names(self) -> Names:
        """The names of the units known so far."""
        ...


@runtime_checkable
class IncrementalSource(NamedSource, Protocol):
    """A source of named units, of which only the first may be known yet: unit i is that of name i.

    While it `is_listing`, `num_units` is None. A worker does not `complete` the listing: a process of its own
    lists into the cache, and the worker reads `over` the stored listing.
    """

    @property
    def is_listing(self) -> bool:
        """True if there are more names than the first ones."""
        ...

    def more_names(self, last: str) -> Iterator[Page]:
        """Yield the names after `last`, page by page. Raises SourceError and SourceUnavailableError."""
        ...

    def complete(self) -> None:
        """List the rest here and now. Raises as `more_names`."""
        ...

    def over(self, names: Names) -> Source:
        """Return the same source over a listing that another process makes, as far as that has come."""
        ...


def is_source(value: Any) -> bool:
    """Return whether `value` is a source itself; a class of sources has the same attributes."""
    return isinstance(value, Source) and not isinstance(value, type)


def as_incremental(source: Source) -> IncrementalSource | None:
    """Return `source` if its listing is not complete, else None."""
    return source if isinstance(source, IncrementalSource) and source.is_listing else None


def reads_from_disk(source: Source) -> bool:
    """Return whether `source` only reads files on disks of this machine, which answer at once."""
    return bool(getattr(source, "is_on_disk", False))


def units_of(source: Source) -> int | None:
    """Return the number of all units, for which the listing is completed; None for an endless source."""
    if (incremental := as_incremental(source)) is not None:
        incremental.complete()
    return source.num_units


def listing_digest_of(source: Source) -> str:
    """Return the digest of what `source` has listed; "" for a source that lists nothing."""
    return str(source.listing_digest) if isinstance(source, ListedSource) else ""


def names_of(source: Source) -> Names | None:
    """Return the names of the units of `source` known so far; None if they have no names."""
    return source.first_names if isinstance(source, NamedSource) else None


def stored_names(source: Source) -> StoredNames | None:
    """Return the stored listing that `source` takes its names from, or None."""
    names = names_of(source)
    return names if isinstance(names, StoredNames) else None


def has_units(source: Source, count: int | None, listing: str) -> bool:
    """Return whether the first `count` units of `source`, or all of it, have the digest `listing`."""
    if source.num_units == count and listing_digest_of(source) == listing:
        return True
    names = names_of(source)
    return names is not None and count is not None and names.digest_of(count) == listing


# --- for the `read` of sources -----------------------------------------------------------------


def whole_units(num_units: Any, owner: str = "") -> int | None:
    """Return the number of units as an int, or None for an endless source.

    Raises ConfigError for anything but None and whole numbers from 1 on.
    """
    if num_units is None:
        return None
    count = whole_number(num_units)
    if count is None or count < 1:
        raise ConfigError(
            f"{owner and f'{owner}: '}num_units={num_units!r}: must be a whole number, 1 or more (without "
            "units there is nothing to read), or None for an endless source"
        )
    return count


def check_unit(source: object, unit: int, num_units: int | None) -> None:
    """Raise SourceError unless `unit` is one of `num_units` (None: endless)."""
    if unit < 0 or (num_units is not None and unit >= num_units):
        last = "" if num_units is None else f" to {num_units - 1:,}"
        raise SourceError(f"{source!r} has no unit {unit}: its units are numbered from 0{last}")


def in_own_context(read: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Run every iterator of the generator function `read` in a context of its own (`contextvars`).

    A generator shares the context of the caller otherwise, and two that are read in turns would apply the
    limit for one object of each other's source.
    """

    @functools.wraps(read)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items: Any = read(*args, **kwargs)
        context, end = copy_context(), cast(T, object())
        try:
            while (item := context.run(next, items, end)) is not end:
                yield item
        finally:
            context.run(items.close)

    return wrapper


def one_by_one(found: Iterable[Rows | tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the samples of `ColumnarSource.read_rows` one by one, as `Source.read` does."""
    for item in found:
        if isinstance(item, Rows):
            yield from item.samples
        else:
            yield item


def decoded(
    items: Iterable[tuple[int, T] | Skipped], decode: Callable[[T], Any], noun: str
) -> Iterator[tuple[int, Any] | Skipped]:
    """Yield the samples that `decode` makes of what is stored in a file, with their numbers.

    Those for which it raises SampleError or ValueError are Skipped, as "`noun` 7: …".
    """
    for item in items:
        if isinstance(item, Skipped):
            yield item
            continue
        number, stored = item
        try:
            sample = decode(stored)
        except (ValueError, SampleError) as error:
            yield Skipped(f"{noun} {number}: {error}")
            continue
        yield number, sample


class Problems:
    """The problems of one unit, raised as one error at its end, so that all usable samples come first."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._first = ""
        self._count = 0

    def add(self, reason: str, count: int = 1) -> None:
        if len(reason) > MAX_REASON:  # a name may be long
            reason = f"{reason[: MAX_REASON // 2]}…{reason[-MAX_REASON // 2 :]}"
        self._first = self._first or reason
        self._count += count

    def raise_any(self) -> None:
        """Raise a SampleError with the number of problems and the first one, if there are any."""
        if self._count == 1:
            first = self._first
            raise SampleError(first if first.startswith(self._where) else f"{self._where}: {first}")
        if self._count:
            error = SampleError(f"{self._where}: {self._count:,} problems, the first: {self._first}")
            error.lost = self._count
            raise error
