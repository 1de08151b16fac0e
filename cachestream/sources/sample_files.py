"""The bases of sources whose files hold many samples each: the units of the files, whole or in parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SourceError, SourceUnavailableError
from cachestream.listing.names import Names
from cachestream.listing.patterns import COMPRESSED_ENDINGS
from cachestream.schema import IntArray
from cachestream.sources.base import check_unit
from cachestream.sources.decode.images import UNCHANGED, ImageOptions
from cachestream.transport.remote_object import open_stream, size_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestream.listing.file_list import FileList
    from cachestream.sources.fields import Defaults
    from cachestream.transport.stream import Stream

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


class FileUnits:
    """The units of several files in order: file i has `counts[i]` (int64 `[num_files]`) of them.

    With several `rounds`, each has every `rounds`-th unit of each file, and neighbouring files begin with
    different ones. `round_ends` are the numbers of units up to the end of each; () for a single round.
    """

    def __init__(self, counts: npt.ArrayLike, rounds: int = 1) -> None:
        self.counts: IntArray = np.asarray(counts, np.int64)
        self._ends: IntArray = np.cumsum(self.counts)
        self._order: IntArray | None = None
        self.round_ends: tuple[int, ...] = ()
        if rounds > 1:
            files, parts = self.locate(np.arange(len(self)))
            turns = (parts - files) % rounds
            self._order = np.argsort(turns, kind="stable")
            self.round_ends = tuple(np.cumsum(np.bincount(turns, minlength=rounds)).tolist())

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, units: Any) -> Any:
        """Return the place of a unit in the order of the files; or the places of an array of units."""
        return units if self._order is None else self._order[units]

    def locate(self, units: Any) -> tuple[Any, Any]:
        """Return the file of a unit, and the number of the unit in it; or those of an array of units."""
        places = self.place(units)
        files = np.searchsorted(self._ends, places, side="right")
        return files, places - (self._ends[files] - self.counts[files])


class SampleFiles:
    """The base of sources whose files hold many samples each: `kind` begins the fingerprint.

    `options` are the parts of the fingerprint for the options of the source. A subclass calls `_set_units`.
    """

    def __init__(
        self,
        kind: str,
        files: FileList,
        options: Iterable[str],
        defaults: Defaults,
        images: ImageOptions = UNCHANGED,
    ) -> None:
        self._files, self._defaults, self._images = files, defaults, images
        identity = (*files.identity, *options, *images.identity, *defaults.identity)
        self.fingerprint = f"{kind}:" + "|".join(identity)

    def _set_units(self, units: FileUnits, names: Names) -> None:
        """Set the units and their names, which stay valid when files come or go."""
        self._units, self.first_names = units, names
        self.listing_digest = names.digest

    @property
    def num_units(self) -> int:
        return len(self._units)

    def _locate(self, unit: int) -> tuple[int, int]:
        """Return the file of `unit`, and the unit's number in it. Raises SourceError if there is none."""
        check_unit(self, unit, self.num_units)
        index, part = self._units.locate(unit)
        return int(index), int(part)

    def _open(
        self, index: int, start: int = 0, likely_stop: int | None = None
    ) -> AbstractContextManager[Stream]:
        files = self._files
        return open_stream(files.remote, files.path(index), files.where(index), start, likely_stop)

    def _size(self, index: int) -> int:
        files = self._files
        return size_of(files.remote, files.path(index), files.where(index))

    def __repr__(self) -> str:
        files, units = len(self._files), len(self._units)
        parts = f", {units:,} units" if units != files else ""
        return f"<{type(self).__name__} {self._files.shown}, {files:,} files{parts}>"

    def _is_compressed(self, index: int) -> bool:
        """Return whether file `index` has the ending of a compressed one."""
        return self._files.key(index).lower().endswith(tuple(COMPRESSED_ENDINGS))


class CutFiles(SampleFiles):
    """The base of sources that cut files into `num_parts` parts of about equal length in bytes.

    A part begins with the first sample after its first byte, and ends with the last one that begins before
    the next part. The size of a file is asked for once, so that all of its parts are cut alike.
    """

    def __init__(
        self, kind: str, files: FileList, options: Iterable[str], defaults: Defaults, images: ImageOptions
    ) -> None:
        super().__init__(kind, files, options, defaults, images)
        self._sizes: dict[int, int] = {}
        self._cut_into(1)

    def _cut_into(self, num_parts: int) -> None:
        self._num_parts = num_parts
        names, units = self._files.names, FileUnits([num_parts] * len(self._files), num_parts)
        if num_parts > 1:
            files, parts = (one.tolist() for one in units.locate(np.arange(len(units))))
            names = Names(
                f"{names[index]}#{part}/{num_parts}" for index, part in zip(files, parts, strict=True)
            )
        self._set_units(units, names)

    @property
    def round_ends(self) -> tuple[int, ...]:
        """See `DivisibleSource`."""
        return self._units.round_ends

    def parts_for(self, limit_bytes: int) -> int:
        """Return the number of parts to read each file in: see `DivisibleSource`."""
        if len(self._files) < 2:
            return 1
        try:
            with self._open(0, 0, HEAD_BYTES) as stream:
                head = bytes(stream.read(HEAD_BYTES))
            size_bytes = self._cut_size(0)
        except SourceError:
            return 1  # reading the unit will report the error
        most = size_bytes // LEAST_PART_BYTES if self._can_cut(head) else 1
        return parts_for_diversity(limit_bytes, len(self._files), size_bytes, most)

    def _can_cut(self, head: bytes) -> bool:
        """Return whether samples are found after a cut in a file that begins with `head`."""
        raise NotImplementedError

    def divided(self, parts: int) -> Self:
        """Return a source of the same files, each divided in `parts` of about equal length in bytes."""
        made = copy.copy(self)
        made._cut_into(parts)
        return made

    def _cut_size(self, index: int) -> int:
        if index not in self._sizes:
            self._sizes[index] = self._size(index)
        return self._sizes[index]

    def _cut(self, index: int, part: int, grain: int = 1) -> tuple[int, int, int]:
        """Return the first byte of a part of a file and of the next, multiples of `grain`; and its size."""
        size_bytes, count = self._cut_size(index), self._num_parts
        first, last = (size_bytes * i // count // grain * grain for i in (part, part + 1))
        return first, last, size_bytes

    def _check_size(self, index: int, stream: Stream, size_bytes: int) -> None:
        """Raise SourceUnavailableError, so that the part is read again, if the file has another size now.

        `size_bytes` is that by which the part was cut: another thread may have asked for the size anew.
        """
        if stream.size_bytes not in (None, size_bytes):
            self._sizes.pop(index, None)
            where = self._files.where(index)
            raise SourceUnavailableError(f"{where}: the file was replaced while it was read in parts")
