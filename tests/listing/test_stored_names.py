"""Listings stored on disk: the names that were added, whole, whatever a writer that died left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachestream.errors import SourceError
from cachestream.listing.names import Mark, Names, NamesWriter, StoredNames, read_mark


def stored(folder: Path, *pages: list[str], is_complete: bool = False) -> str:
    """The mark of a listing of `pages`."""
    path = str(folder / "listing.json")
    writer = NamesWriter(path, read_mark(path) or Mark("listing-0", "data"))
    for number, page in enumerate(pages):
        writer.add(page, is_complete=is_complete and number == len(pages) - 1)
    writer.close()
    return path


ODD = ["a", "b/é", os.fsdecode(b"b/\xff"), "", "c" * 5000]


def test_stored_names_are_those_that_were_added_and_have_the_digest_that_names_in_memory_have(
    tmp_path: Path,
) -> None:
    path = stored(tmp_path, ODD[:2])
    names = StoredNames(path)
    names.look()
    assert list(names) == ODD[:2]
    stored(tmp_path, ODD[2:], [], is_complete=True)
    assert len(names) == 2, "nothing changes under who reads"
    names.reach(5)
    assert list(names) == ODD
    assert names.digest == Names(ODD).digest
    assert names.digest_of(3) == Names(ODD[:3]).digest
    assert names.digest_of(6) is None
    mark = read_mark(path)
    assert mark is not None
    assert mark.is_complete
    with pytest.raises(SourceError, match="5 names are listed and 6 were"):
        names.reach(6)


@pytest.mark.parametrize("torn", [b"", b"half of a pa"])
def test_what_a_writer_that_died_left_behind_the_mark_is_cut_off_by_the_next_one(
    tmp_path: Path, torn: bytes
) -> None:
    stored(tmp_path, ODD[:3])
    for ending in ("names", "ends"):
        with open(tmp_path / f"listing-0.{ending}", "ab") as file:
            file.write(torn)
    (tmp_path / "listing.json.new").write_bytes(torn)
    path = stored(tmp_path, ODD[3:])
    names = StoredNames(path)
    names.look()
    assert list(names) == ODD


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "listing.json").unlink(),
        lambda folder: (folder / "listing.json").write_bytes(b"{"),
        lambda folder: (folder / "listing.json").write_text('{"stem": "listing-0", "colour": 1}'),
        lambda folder: (folder / "listing-0.names").unlink(),
        lambda folder: os.truncate(folder / "listing-0.ends", 8),
    ],
    ids=["no mark", "half a mark", "another mark", "no names", "short"],
)
def test_a_listing_that_is_not_whole_counts_as_none(tmp_path: Path, spoil: object) -> None:
    path = stored(tmp_path, ODD)
    assert callable(spoil)
    spoil(tmp_path)
    assert read_mark(path) is None
    assert StoredNames(path).look() is None
