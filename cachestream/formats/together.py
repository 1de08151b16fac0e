"""Files that belong to others: the mask, the text or the array of an image, and tables that describe files.

| beside `images/1.jpg` | becomes the field |
|-|-|
| `images/1.txt`, `texts/1.txt` | "text" |
| `images/1.npy`; `images/1.json` | "array"; the object's own fields |
| `masks/1.png`, `images/1_mask.png` | "mask" |
| `images/metadata.jsonl` or `.csv`, which names it in "file_name" | the other columns |
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import numpy as np

from cachestream.formats.lines import LinesSource
from cachestream.sources.api import (
    FileList,
    Files,
    Kept,
    Names,
    SampleError,
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

    `folder`: a folder in the path of the other, and the one that stands in its place. `end` follows the
    other's name without its extension.
    """

    field: str
    folder: tuple[str, str] | None
    end: str
    extension: str

    def name_for(self, name: str) -> str:
        """Return the name of the file that belongs to `name`."""
        *folders, base = name.split("/")
        if self.folder is not None and self.folder[0] in folders:
            folders[folders.index(self.folder[0])] = self.folder[1]
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
            *(f"{one.field}:{one.folder}{one.end}{one.extension}" for one in self.partners),
            *self.tables,
        ]
        return (f"with={','.join(named)}",) if named else ()


def names_to_compare(files: FileList) -> list[str]:
    """Return the names of the first files, and of the first ones in folders that are usual for pairs.

    Of an open list, a page of each such folder that lies beside the first files.
    """
    found = list(files.names[:MOST_COMPARED])
    if files.is_open:
        levels = found[0].split("/")[:-1]
        depth = next((i for i, level in enumerate(levels) if _usual_level(level)), None)
        if depth is not None:
            for folder in files.folders_ahead("".join(f"{level}/" for level in levels[:depth])):
                if _usual_level(folder.rpartition("/")[2]):
                    found += next(files.more(f"{folder}/")).names
        return found
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


def partners_in(names: Sequence[str]) -> tuple[str, tuple[Partner, ...]]:
    """Return the kind of files to which most others belong, and the rules that hold for half of them at
    least.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault(_in_common(name), []).append(name)
    rules, mains = Counter[tuple[str, Partner]](), Counter[str]()
    for group in groups.values():
        main, *others = sorted(group, key=_order)
        if (kind := kind_of(extension_of(main))) in _MAIN_KINDS:
            mains[kind] += 1
            rules.update({(kind, rule) for other in others if (rule := _rule(kind, main, other)) is not None})
    kind = rules.most_common(1)[0][0][0] if rules else ""
    found = [rule for (of, rule), count in rules.most_common() if of == kind and 2 * count >= mains[kind]]
    return kind, tuple({rule.field: rule for rule in reversed(found)}.values())


def _in_common(name: str) -> tuple[str, str]:
    """Return the part of a file's name that it shares with the files that may belong to it."""
    folder, _, base = name.rpartition("/")
    shared = ("*" if _usual_level(level) else level for level in folder.split("/"))
    return "/".join(shared), _OTHER_END.sub("", os.path.splitext(base)[0])


def _order(name: str) -> tuple[Any, ...]:
    """Return the order of files that belong together: the one that the others belong to comes first."""
    stem, extension = os.path.splitext(name)
    kind = kind_of(extension.lower())
    rank = _MAIN_KINDS.index(kind) if kind in _MAIN_KINDS else len(_MAIN_KINDS)
    is_other = any(map(_OTHER_FOLDERS.fullmatch, stem.split("/")[:-1]))
    return rank, _OTHER_END.search(stem) is not None, is_other, name


def _rule(kind: str, main: str, other: str) -> Partner | None:
    """Return the rule by which `other` belongs to `main`, a file of `kind`; None if there is none."""
    stems = os.path.splitext(main)[0].split("/"), os.path.splitext(other)[0].split("/")
    differ = [pair for pair in zip(stems[0][:-1], stems[1][:-1], strict=True) if pair[0] != pair[1]]
    end, extension = stems[1][-1].removeprefix(stems[0][-1]), os.path.splitext(other)[1]
    own, folder = kind_of(extension.lower()), differ[0] if differ else None
    if len(differ) > 1 or own == "data" or not stems[1][-1].startswith(stems[0][-1]):
        return None
    named = end.strip("._-") or (folder[1] if folder else "")
    if own == kind and not named:  # the same in two forms
        return None
    singular = _PLURAL.fullmatch(named.lower())
    field = own if own != kind else singular[1] if singular else named.lower()
    return Partner(field, folder, end, extension)


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

    @property
    def names_files(self) -> bool:
        """True if the first row names a file."""
        return next(iter(self._rows()), None) is not None

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
        found += [name for name in _TABLES if Files(files.over(Names([name])), Kept())[0].exists()]
    return tuple(found)
