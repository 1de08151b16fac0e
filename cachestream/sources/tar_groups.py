"""Groups of files in a tar, each group one sample, in a whole tar or in a part of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cachestream.errors import SampleError
from cachestream.sources.tar_format import BLOCK, Member, TarError, TarReader, begin_of_member, find_header
from cachestream.transport import bounds
from cachestream.transport.stream import Stream

MAX_NAME: Final = 4096  # Linux' PATH_MAX
MAX_REASON: Final = 800
LOOK_BACK_BYTES: Final = 16 << 10  # for the extended headers of the member at a part's begin
SCAN_BYTES: Final = 64 << 10


def split_name(name: str) -> tuple[str, str] | None:
    """The sample that a file belongs to, and its extension in lower case: "a/b.seg.PNG" is "a/b", "seg.png".

    WebDataset's rule: the name ends at the first dot after the last slash. None for what is no part
    of a sample: names without an extension, hidden files, and WebDataset's own "__…__" entries.
    """
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not stem or not extension:
        return None
    first = name.partition("/")[0]
    if first.startswith("__") and first.endswith("__") and len(first) >= 4:
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def name_problem(name: str) -> str:
    """Why `name` is not accepted, or "". Nothing is ever written under it, but others may use keys as paths."""
    if len(name) > MAX_NAME:
        return f"a name of {len(name):,} characters"
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        return "a name that leads out of the archive"
    return ""


@dataclass(slots=True)
class Group:
    """The files of one sample that were read, by extension; `problem` says why it cannot be used."""

    key: str
    files: dict[str, memoryview] = field(default_factory=dict)
    nbytes: int = 0
    problem: str = ""

    @property
    def shown_key(self) -> str:
        """The key as text that can be encoded, whatever bytes the name was made of."""
        return self.key if self.key.isascii() else os.fsencode(self.key).decode("utf-8", "replace")


class Problems:
    """What could not be used of one archive, to be told at its end: what is good comes first."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._first = ""
        self._count = 0

    def add(self, reason: str) -> None:
        if len(reason) > MAX_REASON:  # a name may be long
            reason = f"{reason[: MAX_REASON // 2]}…{reason[-MAX_REASON // 2 :]}"
        self._first = self._first or reason
        self._count += 1

    def raise_any(self) -> None:
        """Raise a SampleError that tells how many problems there were, and the first."""
        if self._count == 1:
            first = self._first
            raise SampleError(first if first.startswith(self._where) else f"{self._where}: {first}")
        if self._count:
            error = SampleError(f"{self._where}: {self._count:,} problems, the first: {self._first}")
            error.lost = self._count
            raise error


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an archive that is cut where it falls: bytes `begin` to `end` (None: its end).

    The sample that has the first file at or after a cut belongs to the part before, however much of
    it lies behind. So each part finds by itself where it begins, and all parts together give every
    sample once.
    """

    begin: int
    end: int | None


def read_groups(stream: Stream, problems: Problems, part: Part | None = None) -> Iterator[Group]:
    """The samples of the archive in `stream`, or of a part of it, each one whole.

    What is not usable goes to `problems`; the sample at a sudden end is left out. So is the last of
    an archive without an end mark if it lacks a file that the sample before has: it may have been cut there.
    """
    reader = TarReader(stream)
    end = None if part is None else part.end
    others = part is not None and part.begin > 0  # the first sample belongs to the part before
    group: Group | None = None
    usual: frozenset[str] = frozenset()  # the extensions of the sample before
    is_last = False
    try:
        for member, key, extension in _files(reader, stream, part):
            if group is None or group.key != key:
                if group is not None:
                    if not others:
                        yield group
                    others = False
                    usual = frozenset(group.files)
                if is_last:
                    return
                group = Group(key)
            is_last = is_last or (end is not None and member.offset >= end)
            if not others:
                _add(group, extension, member, reader, stream)
    except (TarError, SampleError) as error:
        problems.add(str(error))
        return
    if group is None or others:
        return
    if reader.is_unmarked and not group.problem and not usual <= group.files.keys():
        problems.add(
            f"#{group.shown_key}: truncated: it ends after {stream.position:,} bytes, without the end mark"
        )
    else:
        yield group


def _files(reader: TarReader, stream: Stream, part: Part | None) -> Iterator[tuple[Member, str, str]]:
    """The members that are files of samples, each with its sample's key and its extension."""
    while (member := reader.next()) is not None:
        if part is not None and not member.is_ustar:
            raise TarError("headers without 'ustar' cannot be read in parts; give samples_per_visit=0")
        names = split_name(member.name) if member.is_file else None
        if names is not None:
            yield member, *names
    if part is not None and part.begin > 0 and any(bytes(stream.read(SCAN_BYTES))):
        raise TarError("it holds a tar itself, and cannot be read in parts; give samples_per_visit=0")


def _add(group: Group, extension: str, member: Member, reader: TarReader, stream: Stream) -> None:
    """Read a file into its group, if it can be used."""
    problem = member.problem and f"its .{extension} is a {member.problem} file"
    problem = name_problem(member.name) or problem
    if extension in group.files:
        problem = problem or f"two files with the extension .{extension}"
    group.nbytes += member.size_bytes
    try:
        bounds.check(group.nbytes)
    except bounds.TooLargeError as error:
        if stream.size_bytes is None:  # to leave it out would mean to unpack all of it
            raise TarError(f"#{group.shown_key}, in a packed tar: {error}") from error
        problem = problem or str(error)
    group.problem = group.problem or problem
    if group.problem:
        group.files.clear()
    else:
        group.files[extension] = reader.data()


def seek_member(stream: Stream, begin: int, end: int) -> bool:
    """Bring `stream`, which stands a little before `begin`, to the first member whose header is there or after.

    False if none begins before `end`.
    """
    origin = stream.position
    window = bytes(stream.read(begin - origin))
    scanned = begin
    while scanned < end:
        more = stream.read(max(BLOCK, min(SCAN_BYTES, end - scanned)))
        if len(more) < BLOCK:
            return False
        window += bytes(more)
        found = find_header(window, scanned - origin)
        if found is not None:
            member = begin_of_member(window[: found + BLOCK], found)
            stream.push_back(memoryview(bytearray(window[member:])))
            return origin + found < end
        scanned = origin + len(window) // BLOCK * BLOCK
        drop = max(0, len(window) - LOOK_BACK_BYTES) // BLOCK * BLOCK
        window, origin = window[drop:], origin + drop
    return False
