"""What a source is: the protocol that every kind of remote data is read through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["Rows", "RowsSource", "Source", "one_by_one"]


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


def one_by_one(found: Iterable[Rows | tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """What `RowsSource.read_rows` yields, as `Source.read` does."""
    for item in found:
        if isinstance(item, Rows):
            yield from item.samples
        else:
            yield item
