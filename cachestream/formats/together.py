"""Files that belong to others: the mask, the text or the array of an image, and tables that describe files.

| beside `images/1.jpg` | becomes the field |
|-|-|
| `images/1.txt`, `texts/1.txt` | "text" |
| `images/1.npy`; `images/1.json` | "array"; the object's own fields |
| `masks/1.png`, `images/1_mask.png` | "mask" |
| `images/metadata.jsonl` or `.csv`, which names it in "file_name" | the other columns |

A rule, or a table, holds if it names another, listed file for half of the samples at least.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np

from cachestream.formats.lines import LinesSource
from cachestream.sources.api import (
    File,
    FileList,
    Files,
    Kept,
    Names,
    SampleError,
    SourceError,
    SourceUnavailableError,
    extension_of,
    kind_of,
)

# The usual names of folders of images, and of folders and ends of names of what belongs to them.
_FOLDERS: Final = re.compile("(jpeg)?images?|imgs?|photos?|frames?|inputs?|rgb", re.IGNORECASE)
_OTHER_FOLDERS: Final = re.compile(
    r"masks?|segs?|segmentation\w*|annotations?|labels?|gt|targets?|captions?|texts?|depths?", re.IGNORECASE
)
_OTHER_END: Final = re.compile("[._-](masks?|segs?|segmentation|labels?|gt|depth)$", re.IGNORECASE)
_PLURAL: Final = re.compile("(mask|seg|annotation|label|target|caption|text|depth)s")
# The kinds of files to which others may belong, in the order in which one of several is chosen.
_MAIN_KINDS: Final = ("image", "data", "array", "arrays")
MOST_COMPARED: Final = 10_000  # files, whose names are compared
_TABLES: Final = ("metadata.jsonl", "metadata.csv")
_FILE_COLUMNS: Final = ("file_name", "filename", "file", "path")


@dataclass(frozen=True, slots=True)
class Partner:
    """A rule that gives the name of a file that belongs to another one; `field` is that of its value.

    `folder`: a folder in the path of the other, and the one that stands in its place; the path has `above`
    folders of that name before it. `end` follows the other's name without its extension.
    """

    field: str
    folder: tuple[str, str] | None
    end: str
    extension: str
    above: int = 0

    def name_for(self, name: str) -> str | None:
        """Return the name of the file that belongs to `name`; None if `name` does not lie in the folder."""
        *folders, base = name.split("/")
        if self.folder is not None:
            places = [place for place, one in enumerate(folders) if one == self.folder[0]]
            if len(places) <= self.above:
                return None
            folders[places[self.above]] = self.folder[1]
        return "/".join((*folders, f"{os.path.splitext(base)[0]}{self.end}{self.extension}"))

    def claims(self, name: str) -> bool:
        """Return whether `name` is that of a file that belongs to another one."""
        if not name.endswith(self.extension) or (
            self.end and not os.path.splitext(name)[0].endswith(self.end)
        ):
            return False
        return self.folder is None or f"/{self.folder[1]}/" in f"/{name}"


@dataclass(frozen=True, slots=True)
class Together:
    """The files that are samples, those of one `kind`, and what belongs to them: `partners`, and `tables`."""

    kind: str
    partners: tuple[Partner, ...] = ()
    tables: tuple[str, ...] = ()

    def is_sample(self, name: str) -> bool:
        return kind_of(extension_of(name)) == self.kind and not self.belongs(name)

    def belongs(self, name: str) -> bool:
        """Return whether the file `name` belongs to others."""
        for partner in self.partners:  # of millions of names: without a generator
            if partner.claims(name):
                return True
        return name in self.tables

    @property
    def identity(self) -> tuple[str, ...]:
        named = [
            *(f"{one.field}:{one.folder}{one.end}{one.extension}{one.above or ''}" for one in self.partners),
            *self.tables,
        ]
        return (f"with={','.join(named)}",) if named else ()


def names_to_compare(files: FileList) -> list[str]:
    """Return the names of the first files, and of the first ones in folders that are usual for pairs.

    Of an open list, a page of each such folder that lies beside the first files.
    """
    found = list(files.names[:MOST_COMPARED])
    if files.is_open:
        paths = (name.split("/")[:-1] for name in found)
        levels = next((levels for levels in paths if any(map(_usual_level, levels))), [])
        depth = next((i for i, level in enumerate(levels) if _usual_level(level)), None)
        if depth is not None:
            for folder in files.folders_ahead("".join(f"{level}/" for level in levels[:depth])):
                if _usual_level(folder.rpartition("/")[2]):
                    found += next(files.more(f"{folder}/")).names
        return list(dict.fromkeys(found))
    taken = Counter(_usual_level(name.rpartition("/")[0]) for name in found)
    if not any(taken):
        return found
    for name in islice(files.names, MOST_COMPARED, None):
        level = _usual_level(name.rpartition("/")[0])
        if level and taken[level] < MOST_COMPARED:
            taken[level] += 1
            found.append(name)
    return found


@lru_cache(4096)
def _usual_level(path: str) -> str:
    """Return the last folder in a path that is usual for pairs; "" if there is none."""
    usual = (
        one for one in reversed(path.split("/")) if _FOLDERS.fullmatch(one) or _OTHER_FOLDERS.fullmatch(one)
    )
    return next(usual, "")


def chosen_kind(counts: Counter[str]) -> str:
    """Return the kind to read: images if they are a tenth as many as the most frequent kind, else that."""
    most, count = counts.most_common(1)[0]
    return "image" if 10 * counts["image"] >= count else most


class _Named(NamedTuple):
    """A file by its name. In order, the file to which others of the same name may belong comes first."""

    rank: int
    has_end: bool
    is_in_other: bool  # a folder that is usual for what belongs to others
    name: str
    folder: str
    stem: str
    extension: str
    kind: str

    @classmethod
    def of(cls, name: str) -> _Named:
        folder, _, base = name.rpartition("/")
        stem, extension = os.path.splitext(base)
        kind = kind_of(extension.lower())
        rank = _MAIN_KINDS.index(kind) if kind in _MAIN_KINDS else len(_MAIN_KINDS)
        has_end = _OTHER_END.search(stem) is not None
        return cls(rank, has_end, _is_other(folder), name, folder, stem, extension, kind)


def partners_in(names: Sequence[str]) -> tuple[str, tuple[Partner, ...], list[str]]:
    """Return the kind of the samples, the rules that name a listed file for half of them at least, one for
    each field, and the names of the samples.

    Files that share a name count once, as one of the kind to which the others may belong.
    """
    groups: dict[tuple[str, str], list[_Named]] = {}
    for one in map(_Named.of, names):
        stem = _OTHER_END.sub("", one.stem) if one.has_end else one.stem
        groups.setdefault((_shared(one.folder), stem), []).append(one)
    if not groups:
        return "", (), []
    kind = chosen_kind(Counter(min(group).kind for group in groups.values()))
    rules, samples = Counter[Partner](), list[str]()
    for group in groups.values():
        of_kind = sorted(one for one in group if one.kind == kind)
        mains = of_kind[:1] + [one for one in of_kind[1:] if not (one.has_end or one.is_in_other)]
        samples += [main.name for main in mains]
        if len(group) > 1 and kind in _MAIN_KINDS:
            rules.update(rule for main in mains for rule in _rules_of(main, group))
    holding = [rule for rule, count in rules.items() if 2 * count >= len(samples)]
    holding.sort(key=lambda rule: (rules[rule], rule.folder is None, str(rule)))  # the same in all processes
    return kind, tuple({rule.field: rule for rule in holding}.values()), samples


@lru_cache(4096)
def _is_other(folder: str) -> bool:
    return any(map(_OTHER_FOLDERS.fullmatch, folder.split("/")))


@lru_cache(4096)
def _shared(folder: str) -> str:
    """Return the part of a folder's path that it shares with the folders of what may belong to its files."""
    return "/".join("*" if _usual_level(level) else level for level in folder.split("/"))


def _rules_of(main: _Named, group: Sequence[_Named]) -> set[Partner]:
    """Return the rules by which files of a group belong to `main`."""
    found = set[Partner]()
    for one in group:
        if one is not main and one.stem.startswith(main.stem):
            end = one.stem.removeprefix(main.stem)
            rule = _rule(main.kind, main.folder, one.folder, end, one.extension)
            if rule is not None and not rule.claims(main.name):
                found.add(rule)
    return found


@lru_cache(4096)
def _rule(kind: str, main: str, other: str, end: str, extension: str) -> Partner | None:
    """Return the rule by which a file in the folder `other` belongs to one of `kind` in the folder `main`."""
    own, folders, others = kind_of(extension.lower()), main.split("/"), other.split("/")
    differ = [place for place, one in enumerate(folders) if one != others[place]]
    if len(differ) > 1 or own == "data":
        return None
    folder = (folders[differ[0]], others[differ[0]]) if differ else None
    above = folders[: differ[0]].count(folders[differ[0]]) if differ else 0
    if own != kind:
        return Partner(own, folder, end, extension, above)
    if not end and (folder is None or not _OTHER_FOLDERS.fullmatch(folder[1])):
        return None  # the same in two forms, or two classes
    named = (end.strip("._-") or (folder[1] if folder else "")).lower()
    singular = _PLURAL.fullmatch(named)
    return Partner(singular[1] if singular else named, folder, end, extension, above)


class Metadata:
    """The rows of the tables that describe files, by the names of the files. Picklable, thread-safe."""

    def __init__(self, files: FileList, tables: Sequence[str], fields: Mapping[str, Any] | None) -> None:
        listed: Any = files.over(Names(tables))
        self.shown = ", ".join(tables)
        self._source, self._kept = LinesSource(listed, fields=fields), Kept()

    def of(self, name: str) -> Mapping[str, Any]:
        """Return the fields of the file `name`. Raises SampleError if no row names it."""
        rows = self._kept.value(0, lambda: (dict(self._rows()), 0))
        if name not in rows:
            raise SampleError(f"{self.shown} does not name it; to read it all the same, give extensions=")
        return rows[name]

    def names_half(self, files: Collection[str]) -> bool:
        """Return whether the rows name half of `files`, at least one; no more rows are read than needed."""
        unnamed, most = set(files), len(files) // 2
        for name, _ in self._rows() if files else ():
            unnamed.discard(name)
            if len(unnamed) <= most:
                return True
        return False

    def _rows(self) -> Iterable[tuple[str, dict[str, Any]]]:
        for unit in range(self._source.num_units):
            with suppress(SampleError):  # of rows that cannot be used: their files are counted
                for key, row in self._source.read(unit, np.random.default_rng(0)):
                    column = next((one for one in _FILE_COLUMNS if isinstance(row.get(one), str)), None)
                    if column is None:
                        return
                    folder = key.rpartition("#")[0].rpartition("/")[0]
                    name = posixpath.normpath(posixpath.join(folder, row.pop(column)))
                    yield name, row


def tables_in(files: FileList) -> tuple[str, ...]:
    """Return the names of the tables that may describe `files`: those listed first, and one in the root.

    Of a long list the root is asked for one, if the first file lies there, or in a folder that is usual for
    pairs: not where folders are classes.
    """
    first = files.names[:MOST_COMPARED]
    found = [name for name in first if posixpath.basename(name) in _TABLES]
    is_long = files.is_open or len(files) > MOST_COMPARED
    folder = first[0].rpartition("/")[0] if first else ""
    if not found and is_long and (not folder or _usual_level(folder.partition("/")[0])):
        found += [name for name in _TABLES if _is_there(Files(files.over(Names([name])), Kept())[0])]
    return tuple(found)


def _is_there(file: File) -> bool:
    """Return whether a file can be read, by its first byte: not all servers tell a size."""
    try:
        with file.stream(0, 1) as stream:
            stream.read(1)
    except SourceUnavailableError:
        raise
    except SourceError:
        return False
    return True
