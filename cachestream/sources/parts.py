"""Files that are read in parts, so that a small cache holds samples of many of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cachestream.errors import SourceUnavailableError
from cachestream.listing.names import Names
from cachestream.transport.object import size_of

if TYPE_CHECKING:
    from cachestream.listing.file_list import FileList
    from cachestream.transport.stream import Stream

MANY_FILES: Final = 64
EXPANSION: Final = 2
LEAST_PART_BYTES: Final = 256 << 10  # to read a part fetches up to 16 KiB and half a sample beyond its bytes


def parts_for_diversity(limit_bytes: int, num_files: int, file_bytes: int, most: int) -> int:
    """Return the fewest parts per file, up to `most`, so that `limit_bytes` hold parts of `MANY_FILES` files.

    `EXPANSION` allows for samples that are larger than in their file (decoded images), and for the last round
    in the cache, which is seldom whole, as rounds are shuffled.
    """
    wanted = EXPANSION * file_bytes * min(num_files, MANY_FILES)
    return max(1, min(most, -(-wanted // max(1, limit_bytes)))) if num_files > 1 else 1


@dataclass(frozen=True, slots=True)
class Parts:
    """The units of `files` that are each cut into `count` parts of about equal length in bytes.

    Every round reads one part of each file, and different parts of neighbouring files. The size of a file is
    asked for once, so that all of its parts are cut alike.
    """

    files: FileList
    count: int = 1
    _sizes: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.files) * self.count

    @property
    def round_ends(self) -> tuple[int, ...]:
        """See `DivisibleSource`."""
        size = len(self.files)
        return tuple(range(size, len(self) + 1, size)) if self.count > 1 else ()

    def locate(self, unit: int) -> tuple[int, int]:
        """Return the file of a unit, and the part of it to read."""
        turn, index = divmod(unit, len(self.files))
        return index, (turn + index) % self.count

    def size(self, index: int) -> int:
        """Return the size of a file in bytes. Raises the errors of `size_of`."""
        if index not in self._sizes:
            self._sizes[index] = size_of(self.files.remote, self.files.path(index), self.files.where(index))
        return self._sizes[index]

    def cut(self, index: int, part: int, grain: int = 1) -> tuple[int, int]:
        """Return the first byte of a part of a file, and of the next part.

        A sample belongs to the part that its first byte lies in. Cuts are at multiples of `grain`.
        """
        first, last = (self.size(index) * i // self.count // grain * grain for i in (part, part + 1))
        return first, last

    def check(self, index: int, stream: Stream) -> None:
        """Raise SourceUnavailableError, so that the part is read again, if a file was replaced since it was cut."""
        if stream.size_bytes not in (None, self._sizes[index]):
            del self._sizes[index]
            where = self.files.where(index)
            raise SourceUnavailableError(f"{where}: the file was replaced while it was read in parts")

    @property
    def names(self) -> Names:
        """Names of the units that stay valid when files come or go, for this number of parts."""
        names = self.files.names
        if self.count == 1:
            return names

        def named() -> Iterator[str]:
            for unit in range(len(self)):
                index, part = self.locate(unit)
                yield f"{names[index]}#{part}/{self.count}"

        return Names(named())
