"""What a source is: the protocol that every kind of remote data is read through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "DivisibleSource",
    "Rows",
    "RowsSource",
    "Source",
    "as_divisible",
    "one_by_one",
    "parts_for_diversity",
]

MANY_UNITS: Final = 64
EXPANSION: Final = 2


@runtime_checkable
class Source(Protocol):
    """Remote data as numbered units, each read on its own, in any order, in any process.

    A unit is what is fetched as one: a file, a tar, a row group, a window. A source is picklable,
    and `read` may be called from several threads at once.
    """

    @property
    def fingerprint(self) -> str:
        """Names the data: two sources with one fingerprint yield the same samples."""
        ...

    @property
    def num_units(self) -> int | None:
        """How many units there are; None for an endless source."""
        ...

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield `(key, sample)` for each sample of `unit`.

        `rng` is seeded from the run's seed, the pass and the unit: with it the same samples come
        again. Raises SampleError for a unit that cannot be used (skipped and counted), and
        SourceUnavailableError for a remote that does not answer (retried).
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Samples that lie in columns: sample i is the dict of every field's value i.

    A field is an array `[n, ...]`, or n str, or n bytes.
    """

    keys: Sequence[str]
    fields: Mapping[str, npt.NDArray[Any] | Sequence[str] | Sequence[bytes]]

    @property
    def samples(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The same as `Source.read` yields them."""
        names = tuple(self.fields)
        for key, values in zip(self.keys, zip(*self.fields.values(), strict=True), strict=True):
            yield key, dict(zip(names, values, strict=True))


@runtime_checkable
class RowsSource(Source, Protocol):
    """A source that can also give its samples in columns: where they are small, many times as fast."""

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        """Yield what `read` yields, in the same order; samples in columns where there are any.

        Used where samples are cached as they are, without a transform. Raises as `read`.
        """
        ...


class DivisibleSource(Source, Protocol):
    """A source of large units, each of which can be read in parts: a small cache then holds parts of many units.

    The units of a divided source come in `rounds`: in each round there is one part of every whole unit.
    """

    @property
    def rounds(self) -> int:
        """The number of parts that each whole unit is read in; 1 where units are read whole."""
        ...

    def part_limit(self) -> tuple[int, int]:
        """The bytes of a typical unit, and the most parts that it may be read in (1: it cannot be divided)."""
        ...

    def divided(self, parts: int) -> DivisibleSource:
        """The same samples, with each unit in so many parts."""
        ...


def as_divisible(source: Any) -> DivisibleSource | None:
    """`source`, if its units can be read in parts."""
    # Not isinstance: to see whether num_units is there, it would list everything.
    if callable(getattr(source, "divided", None)):
        found: DivisibleSource = source
        return found
    return None


def parts_for_diversity(limit_bytes: int, num_units: int, unit_bytes: int, most: int) -> int:
    """The fewest parts a unit, `most` at most, with which a cache of `limit_bytes` holds something of `MANY_UNITS` units.

    Samples may take `EXPANSION` times the bytes of their unit (decoded images), and the rounds are shuffled, so the
    last one in the cache is seldom whole.
    """
    wanted = EXPANSION * unit_bytes * min(num_units, MANY_UNITS)
    return max(1, min(most, -(-wanted // max(1, limit_bytes)))) if num_units > 1 else 1


def one_by_one(found: Iterable[Rows | tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What `RowsSource.read_rows` yields, as `Source.read` does."""
    for item in found:
        if isinstance(item, Rows):
            yield from item.samples
        else:
            yield item
