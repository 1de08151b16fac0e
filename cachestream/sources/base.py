"""The `Source` protocol, through which every kind of remote data is read, and its extensions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError
from cachestream.listing.names import AnyNames, Names, StoredNames

if TYPE_CHECKING:
    from cachestream.listing.pages import Page


MANY_UNITS: Final = 64
EXPANSION: Final = 2
MAX_REASON: Final = 800


@runtime_checkable
class Source(Protocol):
    """Remote data as numbered units, each read on its own, in any order, in any process.

    A unit is fetched as a whole: a file, a tar, a row group, a window. A source is picklable, and `read` may
    be called from several threads at once.
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


@runtime_checkable
class RowsSource(Source, Protocol):
    """A source that can also yield samples in columns, which is many times as fast for small ones."""

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        """Yield the samples of `read` in the same order, those in columns as Rows.

        Used for samples that are cached without a transform. Raises the errors of `read`.
        """
        ...


class DivisibleSource(Source, Protocol):
    """A source of large units that can be read in parts, so that a small cache holds parts of many units.

    The units of a divided source come in `rounds`, each of which has one part of every whole unit.
    """

    @property
    def rounds(self) -> int:
        """The number of parts that each whole unit is read in; 1 if units are read whole."""
        ...

    def part_limit(self) -> tuple[int, int]:
        """Return the bytes of a typical unit, and the maximum number of parts (1: it cannot be divided)."""
        ...

    def divided(self, parts: int) -> DivisibleSource:
        """Return the same samples, with each unit in this number of parts."""
        ...


def as_divisible(source: Any) -> DivisibleSource | None:
    """Return `source` if its units can be read in parts, else None."""
    # Before Python 3.12, isinstance would evaluate num_units, and so list the source to its end.
    if callable(getattr(source, "divided", None)):
        found: DivisibleSource = source
        return found
    return None


def parts_for_diversity(limit_bytes: int, num_units: int, unit_bytes: int, most: int) -> int:
    """Return the fewest parts per unit, up to `most`, so that `limit_bytes` hold parts of `MANY_UNITS` units.

    `EXPANSION` allows for samples that are larger than in their unit (decoded images), and for the last round
    in the cache, which is seldom whole, as rounds are shuffled.
    """
    wanted = EXPANSION * unit_bytes * min(num_units, MANY_UNITS)
    return max(1, min(most, -(-wanted // max(1, limit_bytes)))) if num_units > 1 else 1


def one_by_one(found: Iterable[Rows | tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the samples of `RowsSource.read_rows` one by one, as `Source.read` does."""
    for item in found:
        if isinstance(item, Rows):
            yield from item.samples
        else:
            yield item


class Problems:
    """The problems of one unit, raised as one error at its end, so that all usable samples come first."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._first = ""
        self._count = 0

    def add(self, reason: str) -> None:
        if len(reason) > MAX_REASON:  # a name may be long
            reason = f"{reason[: MAX_REASON // 2]}…{reason[-MAX_REASON // 2 :]}"
        self._first = self._first or reason
        self._count += 1

    def raise_any(self) -> None:
        """Raise a SampleError with the number of problems and the first one, if there are any."""
        if self._count == 1:
            first = self._first
            raise SampleError(first if first.startswith(self._where) else f"{self._where}: {first}")
        if self._count:
            error = SampleError(f"{self._where}: {self._count:,} problems, the first: {self._first}")
            error.lost = self._count
            raise error


@runtime_checkable
class GrowingSource(Source, Protocol):
    """A source of named units, of which only the first may be known yet: unit i is that of name i.

    Evaluating `num_units` lists the rest at once. A worker does not do so: a process of its own lists into
    the cache, and the worker reads `over` the stored listing.
    """

    @property
    def is_listing(self) -> bool:
        """True if there are more names than the first ones."""
        ...

    @property
    def first_names(self) -> AnyNames:
        """The names listed so far."""
        ...

    def more_names(self, last: str) -> Iterator[Page]:
        """Yield the names after `last`, page by page. Raises SourceError and SourceUnavailableError."""
        ...

    def over(self, names: AnyNames) -> Source:
        """Return the same source over a listing that another process makes, as far as that has come."""
        ...


def as_growing(source: Any) -> GrowingSource | None:
    """Return `source` if its listing is not complete, else None."""
    # Before Python 3.12, isinstance would evaluate num_units, and so list the source to its end.
    if getattr(source, "is_listing", False) and callable(getattr(source, "over", None)):
        found: GrowingSource = source
        return found
    return None


def is_source(value: Any) -> bool:
    """Return whether `value` is a source, without completing its listing."""
    return as_growing(value) is not None or (isinstance(value, Source) and not isinstance(value, type))


def begins_with(source: Any, count: int | None, listing: str) -> bool:
    """Return whether the first `count` names of `source` have the digest `listing`."""
    names = getattr(source, "first_names", None)
    if not isinstance(names, Names | StoredNames) or count is None or count > len(names):
        return False
    return names.digest_of(count) == listing


def stored_names(source: Any) -> StoredNames | None:
    """Return the stored listing that `source` takes its names from, or None."""
    names = getattr(source, "first_names", None)
    return names if isinstance(names, StoredNames) else None
