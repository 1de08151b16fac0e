"""Helpers that read sources: samples in order, and the reasons for missing ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from cachestream.errors import SampleError
from cachestream.formats.files import FileSource
from cachestream.sources.base import Source, units_of

__all__ = ["keys", "read", "read_all", "read_unit", "record_places"]


def read(source: Source, unit: int) -> list[tuple[str, Any]]:
    """Return the samples of a unit. Raises if any is missing."""
    return list(source.read(unit, np.random.default_rng(0)))


def read_all(source: Source) -> list[tuple[str, Any]]:
    """Return the samples of all units. Raises if any is missing."""
    assert source.num_units is not None
    return [item for unit in range(source.num_units) for item in read(source, unit)]


def read_unit(source: Source, unit: int = 0) -> tuple[list[tuple[str, Any]], str]:
    """Return the samples of a unit, and the reason for missing ones, or an empty text."""
    found: list[tuple[str, Any]] = []
    try:
        found.extend(source.read(unit, np.random.default_rng(0)))  # keeps what came before an error
    except SampleError as error:
        return found, str(error)
    return found, ""


def keys(source: FileSource) -> list[str]:
    """Return the keys of all units, without reading them."""
    return [source.key(unit) for unit in range(units_of(source) or 0)]


def record_places(path: Path) -> list[int]:
    """Return the byte at which each record of an undamaged TFRecord file begins."""
    data, places, at = path.read_bytes(), [], 0
    while at < len(data):
        places.append(at)
        at += 8 + 4 + struct.unpack_from("<Q", data, at)[0] + 4
    return places
