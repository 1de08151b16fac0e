"""Options of a data set: checked, and named in its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cachestream.errors import ConfigError
from cachestream.sources.functions import fingerprint_of


def check_columns(columns: Sequence[str] | None) -> None:
    """Raise ConfigError unless `columns` are names, or None for all."""
    if isinstance(columns, str) or (columns is not None and not columns):
        raise ConfigError(f"columns={columns!r}: give a list of names, or None for all")


def identity_of(
    columns: Sequence[str] | None,
    decoders: Mapping[str, Callable[[bytes], Any]],
    samples_per_visit: int | None,
) -> list[str]:
    """What names these options of an indexed data set in its fingerprint; empty where all is taken as it is."""
    found = [f"columns={','.join(columns)}"] if columns is not None else []
    found += [f"decoder {name}:{fingerprint_of(one)}" for name, one in sorted(decoders.items())]
    return found + ([f"samples_per_visit={samples_per_visit}"] if samples_per_visit else [])
