"""What a source is: the protocol that every kind of remote data is read through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

__all__ = ["Source"]


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
