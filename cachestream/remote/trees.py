"""A tree of files in the order of their paths, folder by folder; and the folders of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Final, NamedTuple

from cachestream.remote import pulse

__all__ = ["Folder", "Listed", "LocalFolders", "in_order"]

MOST_FOLLOWING: Final = 16
_ENTRIES_A_BEAT: Final = 8192
_OF_A_CACHE: Final = frozenset({"cache.json", "catalogue.sqlite"})


class Folder(NamedTuple):
    """What a folder holds: names of files and of folders; `is_there` unless it is gone, `is_all` unless there is more."""

    files: list[str]
    inner: list[str]
    is_there: bool = True
    is_all: bool = True


Listed = Callable[[str, Sequence[str]], Folder]


def in_order(listed: Listed, last: str = "") -> Iterator[tuple[list[str], bool]]:
    """The paths below the root that come after `last`, all of them in order: what lies together at a time, and whether
    nothing can come after it.

    `listed(folder, following)` gives what `folder` holds ("" is the root, others end in "/") and is told which ones
    will be asked for next, as far as that is known. Folders that lie before `last` are not asked for.
    """
    pending: list[str | list[str]] = [""]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            folders = (next_one for next_one in reversed(pending) if isinstance(next_one, str))
            pending += reversed(_items(one, listed(one, list(islice(folders, MOST_FOLLOWING))), last))
        else:
            yield one, not pending


def _items(folder: str, holds: Folder, last: str) -> list[str | list[str]]:
    """What comes after `last` of a folder, in the order of the paths below it: folders, and runs of files."""
    # "a.txt" comes before "a/b" and "a0" after it, so that folders take part with their "/".
    paths = sorted([folder + name for name in holds.files] + [f"{folder}{name}/" for name in holds.inner])
    if last.startswith(folder):
        paths = [path for path in paths if path > last or (path[-1] == "/" and last.startswith(path))]
    if not holds.inner:
        return [paths] if paths else []
    items: list[str | list[str]] = []
    for is_folder, run in groupby(paths, lambda path: path[-1] == "/"):
        together = list(run)
        items += together if is_folder else [together]
    return items


class LocalFolders:
    """What the folders below `root` ("/data/") hold, but for hidden files and folders, and for caches, which may be this one's.

    Links to folders are followed, but not to those that are found by their own paths, nor in circles. That is seen
    from where a link leads alone, so that a listing can go on from anywhere.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._real = os.path.realpath(root).rstrip("/") + "/"

    def __call__(self, folder: str, _following: Sequence[str] = (), most: int | None = None) -> Folder:
        """What `folder` holds; `most` entries of it, in no order. Raises OSError."""
        files, inner, number = list[str](), list[str](), -1
        try:
            with os.scandir((self._root + folder).rstrip("/") or "/") as entries:
                for number, entry in enumerate(islice(entries, most)):
                    if not number % _ENTRIES_A_BEAT:
                        pulse.fetched(0)
                    if entry.name.startswith("."):
                        continue
                    if entry.is_file():
                        files.append(entry.name)
                    elif entry.is_dir() and (not entry.is_symlink() or self._is_new(folder, entry.path)):
                        inner.append(entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return Folder([], [], is_there=False)
        if folder and "shards" in inner and _OF_A_CACHE.issubset(files):
            return Folder([], [])
        return Folder(files, inner, is_all=number + 1 != most)

    def _is_new(self, folder: str, link: str) -> bool:
        target = os.path.realpath(link).rstrip("/") + "/"
        if target.startswith(self._real) and "/." not in target[len(self._real) - 1 :]:
            return False
        return not any(above.startswith(target) for above in self._chain(folder))

    def _chain(self, folder: str) -> Iterable[str]:
        """Where `folder` and those above it lie."""
        yield self._real
        for end, letter in enumerate(folder, 1):
            if letter == "/":
                yield os.path.realpath(self._root + folder[:end]).rstrip("/") + "/"
