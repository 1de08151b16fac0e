"""The labels of files, one a file, as a manifest gives them: numbers, or the places of names among all names."""

from __future__ import annotations

import math
import re
from array import array
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["Labels", "LabelsBuilder", "real_number", "whole_number"]

_DECIMAL: Final = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """`values[i]` belongs to file i: int64 or float64 `[files]`; `names` of the values, or () for numbers."""

    values: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        self.values.flags.writeable = False  # as processes may share them

    def __getitem__(self, index: int) -> int | float:
        value: int | float = self.values[index].item()
        return value

    @property
    def digest(self) -> str:
        """xxh3 (64 bits, hexadecimal) of all labels in their order."""
        state = xxhash.xxh3_64(np.ascontiguousarray(self.values).data)
        state.update("\0".join(self.names).encode("utf-8", "surrogatepass"))
        return state.hexdigest()


class LabelsBuilder:
    """Labels that come one by one: each different one is kept once, and 8 bytes a file."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._values = array("q")

    def add(self, label: Any) -> None:
        self._values.append(self._numbers.setdefault(label, len(self._numbers)))

    def labels(self) -> Labels:
        """All labels: numbers if all are written as such, otherwise the places of the texts in order."""
        known = list(self._numbers)
        index = np.frombuffer(self._values, np.int64)
        for kind in (np.int64, np.float64):
            numbers = _as_numbers(known, kind)
            if numbers is not None:
                return Labels(numbers[index], ())
        texts = list(map(str, known))
        names = sorted(set(texts))
        places = {name: place for place, name in enumerate(names)}
        return Labels(np.array([places[text] for text in texts], np.int64)[index], tuple(names))


def _as_numbers(values: list[Any], kind: type[np.int64 | np.float64]) -> npt.NDArray[Any] | None:
    """`values` as int64, but only if they are all whole and none would be changed; or as float64."""
    read = whole_number if kind is np.int64 else real_number
    if kind is np.int64 and any(isinstance(value, float) for value in values):
        return None
    try:
        return np.array([read(value) for value in values], kind)
    except (ValueError, TypeError, OverflowError):
        return None


def whole_number(value: Any) -> int:
    """`value` as it is written: "007" and "1_0" are names. Raises ValueError for what is no whole number."""
    number = int(value)
    if number != value and str(number) != value:
        raise ValueError(value)
    return number


def real_number(value: Any) -> float:
    """The same of decimal numbers: "nan" and "inf" are names."""
    number = float(value)
    if isinstance(value, str) and not (_DECIMAL.fullmatch(value) and math.isfinite(number)):
        raise ValueError(value)
    return number
