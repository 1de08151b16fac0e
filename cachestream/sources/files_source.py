"""The source of the files of one format: all that formats share, and that no format does by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from cachestream.errors import CacheStreamError, ConfigError, SampleError, SourceError
from cachestream.listing.file_list import FileList
from cachestream.listing.names import Names
from cachestream.schema import IntArray
from cachestream.sources.base import Item, Problems, Rows, Skipped, check_unit, in_own_context, one_by_one
from cachestream.sources.fields import Defaults, repeated
from cachestream.sources.file_units import FileUnits
from cachestream.sources.format import File, Files, Format, Kept, Part
from cachestream.sources.hive import FolderColumns
from cachestream.transport import object_limit
from cachestream.transport.local_files import is_on_disk

if TYPE_CHECKING:
    from typing_extensions import Self

AT_ONCE: Final = 16  # files that are looked at when a source is opened
MANY_FILES: Final = 64
EXPANSION: Final = 2
LEAST_PART_BYTES: Final = 256 << 10  # to read a part fetches up to 16 KiB and half a sample beyond its bytes
HEAD_BYTES: Final = 512  # looked at to tell whether files can be cut


def parts_for_diversity(limit_bytes: int, num_files: int, file_bytes: int, most: int) -> int:
    """Return the fewest parts per file, up to `most`, so that `limit_bytes` hold parts of `MANY_FILES` files.

    `EXPANSION` allows for samples that are larger than in their file (decoded images), and for the last round
    in the cache, which is seldom whole, as rounds are shuffled.
    """
    wanted = EXPANSION * file_bytes * min(num_files, MANY_FILES)
    return max(1, min(most, -(-wanted // max(1, limit_bytes)))) if num_files > 1 else 1


class FilesSource:
    """The samples of files of one format; a unit is a file, or a part of one. See `Source`,
    `DivisibleSource`.

    urls: what `format` finds files by, or a FileList. storage_options are passed to fsspec's driver. fields:
    a default for each optional field.

    Files are listed once, here, and looked at as far as their format needs it to name their parts. Parts are
    numbered in rounds, each with about the same share of every file, where a cache is too small for 64 whole
    files (for all, where there are fewer).
    """

    reads: ClassVar[type[Format]]  # of a public class for one format

    def __init__(
        self,
        format: Format,  # noqa: A002
        urls: Any,
        storage_options: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.format, self._defaults, self._kept = format, Defaults(fields), Kept()
        owner = type(self).__name__
        self._files = urls if isinstance(urls, FileList) else format.find(urls, storage_options, owner)
        columns = format.folder_columns()
        self._folders = None if columns is None else FolderColumns(self._files, *columns)
        of_folders = () if self._folders is None else self._folders.names
        format.check(Files(self._files, self._kept), of_folders)
        self.fingerprint = f"{format.name}:" + "|".join(self._identity())
        self.made_with = "".join(f"|{part}" for part in (*format.images.identity, *self._defaults.identity))
        self._set_parts()

    def _identity(self) -> tuple[str, ...]:
        """Return the parts of the fingerprint."""
        options = (*self.format.identity, *(() if self._folders is None else self._folders.identity))
        return (
            *self._files.identity,
            *options,
            *self.format.images.identity,
            *self._defaults.identity,
        )

    # --- units

    def _set_parts(self) -> None:
        """Ask the format for the parts of all files, and number them."""
        files, names = Files(self._files, self._kept), self._files.names
        self._own_parts: IntArray | None = None  # of each file; None: files are whole, or cut
        if type(self.format).parts is Format.parts:
            self._cut_into(self.format.num_cuts(files))
            return
        first = self.format.parts(files[0])  # wrong options fail here, before all other files are asked
        with ThreadPoolExecutor(AT_ONCE) as pool:
            rest = pool.map(lambda index: self.format.parts(files[index]), range(1, len(files)))
            parts = [list(one) for one in (first, *rest)]
        self._own_parts = np.array([len(one) for one in parts], np.int64)
        named = (
            f"{name}#{part}" if part else name for name, own in zip(names, parts, strict=True) for part in own
        )
        self._part_names = Names(named)
        self._number_parts(1)

    def _number_parts(self, rounds: int) -> None:
        """Number the format's own parts in so many rounds."""
        assert self._own_parts is not None
        units, names = FileUnits(self._own_parts, rounds), self._part_names
        if not len(units):
            raise ConfigError(f"{self._files.shown}: there are no samples in the files")
        if rounds > 1:
            names = Names(names[place] for place in units.place(np.arange(len(units))).tolist())
        self._set_units(units, names)

    def _cut_into(self, num_parts: int) -> None:
        names = self._files.names
        if num_parts == 1:
            self._set_units(None, names)
            return
        units = FileUnits([num_parts] * len(names), num_parts)
        files, parts = (one.tolist() for one in units.locate(np.arange(len(units))))
        of_parts = (f"{names[index]}#{part}/{num_parts}" for index, part in zip(files, parts, strict=True))
        self._set_units(units, Names(of_parts))

    def _set_units(self, units: FileUnits | None, names: Names) -> None:
        """Set the units (None: a file each) and their names, which stay valid when files come or go."""
        self._units, self._names = units, names

    @property
    def first_names(self) -> Names:
        """The names of the units."""
        return self._names

    @property
    def listing_digest(self) -> str:
        """A digest of the names of all units known so far, and of the labels of a manifest."""
        labels = self._files.labels
        return self._names.digest + ("" if labels is None else labels.digest)

    @property
    def num_units(self) -> int:
        """The number of units."""
        return len(self._names)

    def _locate(self, unit: int) -> tuple[File, Part]:
        """Return the file of `unit`, and its part. Raises SourceError if there is none."""
        check_unit(self, unit, len(self._names))
        if self._units is None:
            return File(self._files, unit, self._kept), Part(0, 1)
        index, number = map(int, self._units.locate(unit))
        # The name of a unit is that of its file, and that of the part.
        name = "" if self._own_parts is None else self._names[unit][len(self._files.names[index]) + 1 :]
        return File(self._files, index, self._kept), Part(number, int(self._units.counts[index]), name)

    @property
    def is_on_disk(self) -> bool:
        """True if the files lie on a disk of this machine."""
        return self._files.remote.is_local and len(self._files) > 0 and is_on_disk(self._files.path(0))

    # --- rounds

    @property
    def round_ends(self) -> tuple[int, ...]:
        """See `DivisibleSource`."""
        return () if self._units is None else self._units.round_ends

    def parts_for(self, limit_bytes: int) -> int:
        """Return the number of parts to read each file in: see `DivisibleSource`."""
        if len(self._files) < 2:
            return 1
        try:
            most, file_bytes = self._divisible()
        except SourceError:
            return 1  # reading the unit will report the error
        return parts_for_diversity(limit_bytes, len(self._files), file_bytes, most)

    def _divisible(self) -> tuple[int, int]:
        """Return the most parts that files can be read in, and the size of one, in bytes."""
        if self._own_parts is not None:
            largest = int(self._own_parts.argmax())
            most = int(self._own_parts[largest])
            return most, most * self.format.part_bytes(
                File(self._files, largest, self._kept)
            ) if most > 1 else 0
        files = Files(self._files, self._kept)
        if self._has_whole_files or self._units is not None or any(file.is_compressed for file in files):
            return 1, 0
        with files[0].stream(0, HEAD_BYTES) as stream:
            head = bytes(stream.read(HEAD_BYTES))
        if not self.format.can_cut(head):
            return 1, 0
        size_bytes = files[0].size()
        return size_bytes // LEAST_PART_BYTES, size_bytes

    @property
    def _has_whole_files(self) -> bool:
        """True if no file of the format is ever read in parts."""
        return self._own_parts is None and type(self.format).can_cut is Format.can_cut

    def divided(self, parts: int) -> Self:
        """Return a source of the same samples, with each file read in `parts`, where the format can do
        that.
        """
        if self._has_whole_files:
            return self
        made = copy.copy(self)
        if self._own_parts is None:
            made._cut_into(parts)
            return made
        made._number_parts(parts)
        return made

    # --- samples

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the samples of a unit in order. Raises as `Source.read`."""
        return one_by_one(self.read_rows(unit, rng))

    @in_own_context
    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        """Yield the same samples, in columns where the format has them so."""
        file, part = self._locate(unit)
        problems, prefix = Problems(file.where), self.format.prefix(file, part)
        with object_limit.applied(self._files.remote.max_object_bytes):
            try:
                found = self.format.read(file, part, rng)
                if self._folders is not None and (own := self._folders.of(file.index)):
                    found = _with_fields(found, own)
                for item in found:
                    if isinstance(item, Skipped):
                        problems.add(item.reason, item.count)
                    else:
                        yield self._finished(item, prefix)
            except SampleError as error:
                self._kept.drop(file.index)
                problems.add(str(error), error.lost)
            except CacheStreamError:
                self._kept.drop(file.index)
                raise
        problems.raise_any()

    def _finished(self, item: Rows | tuple[str | int, Any], prefix: str) -> Rows | tuple[str, Any]:
        """Return a sample, or several, with whole keys and the defaults of the fields that are missing."""
        if isinstance(item, Rows):
            keys = [f"{prefix}{name}" for name in item.keys] if prefix else item.keys
            return self._defaults.fill_rows(Rows(keys, item.fields))
        return f"{prefix}{item[0]}", self._defaults.fill(item[1])

    # --- in messages

    def __repr__(self) -> str:
        files, units, nouns = len(self._files), len(self._names), self.format.nouns
        parts = f", {units:,} {nouns[1]}s" if units != files else ""
        return f"<{type(self).__name__} {self._files.shown}, {files:,} {nouns[0]}s{parts}{self._size()}>"

    def _size(self) -> str:
        """Return what else `repr` tells of the size, such as ", 7 rows"."""
        return ""


def _with_fields(found: Iterator[Item], own: Mapping[str, Any]) -> Iterator[Item]:
    """Yield what a format yields with the fields `own`, which folders name; those of the file win."""
    for item in found:
        if isinstance(item, Skipped):
            yield item
            continue
        fields = item.fields if isinstance(item, Rows) else item[1]
        missing = {name: value for name, value in own.items() if name not in fields}
        null = next((name for name, value in missing.items() if value is None), None)
        if null is not None:
            yield Skipped(f"column '{null}' is null", len(item.keys) if isinstance(item, Rows) else 1)
        elif isinstance(item, Rows):
            columns = {name: repeated(value, len(item.keys)) for name, value in missing.items()}
            yield Rows(item.keys, {**item.fields, **columns})
        else:
            yield item[0], {**item[1], **missing}
