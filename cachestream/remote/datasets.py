"""Samples of a map-style dataset, torch's or anyone's: `dataset[i]` and `len(dataset)`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cachestream.errors import ConfigError
from cachestream.remote.defaults import Defaults
from cachestream.remote.fieldwise import empty_lists, plain_fields
from cachestream.remote.filelist import check_unit
from cachestream.remote.foreign import Calls, foreign_errors

__all__ = ["DatasetSource", "is_map_style"]


def is_map_style(what: Any) -> bool:
    """Whether `what` can be read as `what[0]` … `what[len(what) - 1]`."""
    kind = type(what)
    if isinstance(what, Mapping | str | bytes) or hasattr(kind, "iloc"):  # keyed otherwise than by position
        return False
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__")


class DatasetSource:
    """`dataset[i]` for every index; a unit is one index, the key is its number.

    `dataset` is pickled to the sampling processes: a map-style torch Dataset, a Hugging Face
    dataset, a list, an array. A process makes one call at a time, as few datasets are written for
    threads; `thread_safe=True` lets calls overlap, which pays where they wait for a network.

    Fields of a dict become what columns of Parquet do: a dict a field for each member, "field.member", a list of
    texts or of dicts a JSON text; an item with a None is skipped and counted.

    fields: a default for each optional field, `{"caption": ""}`, for items that lack it or have None.
    """

    def __init__(
        self, dataset: Any, *, thread_safe: bool = False, fields: Mapping[str, Any] | None = None
    ) -> None:
        self._defaults = Defaults(fields)
        if hasattr(type(dataset), "__iter__") and not is_map_style(dataset):
            raise ConfigError(
                f"{type(dataset).__name__} has no dataset[0], it can only be iterated: give it to IterableSource(…)"
            )
        if not is_map_style(dataset):
            raise ConfigError(
                f"{type(dataset).__name__} has no dataset[0] … dataset[len(dataset) - 1]; wrap it in a map-style "
                "dataset, or give a function fn(rng) -> sample"
            )
        try:
            self._num_units = operator.index(len(dataset))
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(f"len() of {type(dataset).__name__} fails: {error}") from None
        if self._num_units == 0:
            raise ConfigError(f"{type(dataset).__name__} is empty: a source needs at least one sample")
        self._dataset = dataset
        self._calls = Calls(thread_safe)
        kind = type(dataset)
        self._name = f"{kind.__module__}.{kind.__qualname__}"
        own = getattr(dataset, "fingerprint", getattr(dataset, "_fingerprint", None))  # the latter is HF's
        suffix = f":{own}" if isinstance(own, str | int) else ""
        identity = f"dataset:{self._name}[{self._num_units}]{suffix}"
        self.fingerprint = "|".join((identity, *self._defaults.identity))
        self._empty = empty_lists(getattr(dataset, "features", None))
        self.listing_digest = ""

    @property
    def num_units(self) -> int:
        return self._num_units

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield `dataset[unit]`; SampleError if that raises."""
        check_unit(self, unit, self._num_units)
        with self._calls.one(), foreign_errors(f"{self._name}[{unit}]"):
            sample = self._dataset[unit]
        yield str(unit), self._defaults.fill(plain_fields(sample, self._empty))

    def __repr__(self) -> str:
        return f"<DatasetSource {self._name}, {self._num_units:,} samples>"
