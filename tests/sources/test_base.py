"""The protocols say what a source can do: no member is probed, and to look at one asks nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs
from cachestream.listing.names import Names, Page
from cachestream.sources.base import (
    ColumnarSource,
    DivisibleSource,
    IncrementalSource,
    LabelledSource,
    ListedSource,
    NamedSource,
    Source,
    as_incremental,
    has_units,
    is_source,
    listing_digest_of,
    names_of,
    units_of,
)

NAMES = [f"{number}.bin" for number in range(9)]


class Growing:
    """A source of NAMES, of which three are known until it is completed."""

    fingerprint = "growing"

    def __init__(self) -> None:
        self.first_names = Names(NAMES[:3])

    @property
    def is_listing(self) -> bool:
        return len(self.first_names) < len(NAMES)

    @property
    def num_units(self) -> int | None:
        return None if self.is_listing else len(self.first_names)

    @property
    def listing_digest(self) -> str:
        return self.first_names.digest

    def more_names(self, last: str) -> Iterator[Page]:
        yield Page([name for name in NAMES if name > last], is_last=True)

    def complete(self) -> None:
        self.first_names = Names([*self.first_names, *next(self.more_names(self.first_names[-1])).names])

    def over(self, names: Names) -> Growing:
        raise NotImplementedError

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        yield NAMES[unit], {"x": unit}


def test_a_listing_is_completed_where_all_units_are_needed_and_only_there() -> None:
    source = Growing()
    assert isinstance(source, IncrementalSource)
    assert is_source(source)
    assert not is_source(Growing)
    assert as_incremental(source) is source
    first = source.listing_digest
    assert has_units(source, 3, first)
    assert not has_units(source, 9, Names(NAMES).digest)
    assert source.is_listing, "nothing of this lists the rest"
    assert units_of(source) == 9
    assert as_incremental(source) is None
    assert has_units(source, 3, first), "the first units are what they were"
    assert has_units(source, 9, Names(NAMES).digest)


OF_FILES: Final = {NamedSource, ColumnarSource, DivisibleSource}


@pytest.mark.parametrize(
    ("make", "abilities"),
    [
        (
            lambda folder: cs.FileSource(folder, extensions="*"),
            {LabelledSource, IncrementalSource, *OF_FILES},
        ),
        (lambda folder: cs.TarSource(folder / "a.tar"), OF_FILES),
        (lambda folder: cs.TFRecordSource(folder / "a.tfrecord"), OF_FILES),
        (lambda folder: cs.CacheSource(folder / "cache"), OF_FILES),
        (lambda folder: cs.LinesSource(folder / "a.jsonl"), OF_FILES),
        (lambda folder: cs.ArraySource(folder / "a.npy", window=2), {ListedSource}),
        (
            lambda folder: cs.mix([(cs.ArraySource(folder / "a.npy", window=2), 1)]),
            {ListedSource, ColumnarSource},
        ),
        (lambda _: cs.DatasetSource([1, 2]), set()),
        (lambda _: cs.CallableSource(lambda rng: rng.random()), set()),
    ],
)
def test_every_source_has_the_abilities_of_its_kind(tmp_path: Path, make: Any, abilities: set[Any]) -> None:
    for name in ("a.tar", "a.tfrecord"):
        (tmp_path / name).write_bytes(bytes(1024))
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "cache/shards").mkdir(parents=True)
    (tmp_path / "cache/shards/1.safetensors").touch()
    np.save(tmp_path / "a.npy", np.arange(4))
    source: Source = make(tmp_path)
    kinds = (LabelledSource, NamedSource, IncrementalSource, DivisibleSource, ColumnarSource, ListedSource)
    wanted = abilities | ({ListedSource} if NamedSource in abilities else set())
    assert {kind for kind in kinds if isinstance(source, kind)} == wanted
    assert bool(listing_digest_of(source)) == (ListedSource in wanted)
    assert (names_of(source) is not None) == (NamedSource in wanted)
