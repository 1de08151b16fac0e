"""The names of all folders that hold files, before the files are listed: as far as a look at some tells."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

MOST_LOOKS: Final = 512  # for the names of folders, before the first sample
MOST_PROBES: Final = 16
PROBE_NAMES: Final = 200  # of a folder that is probed, where it need not be listed to its end: to take a page of S3 apart takes 0.1 s


class Seen(NamedTuple):
    """What a folder was seen to hold; `is_all` unless more than its beginning was not looked at."""

    holds_files: bool
    inner: list[str]
    is_all: bool


class Look(Protocol):
    """A look at the folders of a remote."""

    def name(self, folder: str) -> str:
        """The name of `folder` alone."""
        ...

    def may_count(self, folder: str, empty: set[str]) -> bool:
        """Whether files of a folder that holds some may count; those in `empty` hold none."""
        ...

    def at_beginnings(self, folders: list[str]) -> dict[str, Seen]:
        """The beginnings of some of `folders`, from all over them."""
        ...

    def through(self, folders: list[str]) -> list[Seen] | None:
        """All of `folders`; None where that would take too long."""
        ...


def some_of(folders: list[str]) -> list[str]:
    """So many of `folders` as are probed, from all over them."""
    return folders[:: -(-len(folders) // MOST_PROBES)]


def foreseen(look: Look, top: str, depth: int) -> frozenset[str] | None:
    """The names of all folders below `top`, and its own, that hold files, as far as can be told.

    Folders less than `depth` below it are looked through; of those deeper the beginnings of some, and where these
    hold folders again, all. So a folder may stay unseen behind the first files of another. None where it would take
    too many looks.
    """
    level, found = [top], set[str]()
    while level:
        if depth <= 0:
            probed = look.at_beginnings(level)
            if not any(one.inner for one in probed.values()):
                empty = {folder for folder, one in probed.items() if one.is_all and not one.holds_files}
                return frozenset(found | {look.name(one) for one in level if look.may_count(one, empty)})
        seen = look.through(level)
        if seen is None:
            return None
        found |= {look.name(folder) for folder, one in zip(level, seen, strict=True) if one.holds_files}
        level = [inner for one in seen for inner in one.inner]
        depth -= 1
    return frozenset(found)
