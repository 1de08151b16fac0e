"""The tar format, read in one pass and in bounded memory: headers, members, and groups of members.

Reads ustar, pax and GNU archives (POSIX.1-2017 "pax", and GNU tar's manual, "Basic Tar Format"). The
standard library's tarfile has half the speed, and reads extended headers of any size into memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from cachestream.sources.api import SampleError, Skipped, Stream, TooLargeError, check_object

BLOCK: Final = 512
MAX_EXTENSION_BYTES: Final = 1 << 20  # of one extended header, in a pax archive
_USTAR: Final = b"ustar"
_USTAR_AT: Final = 257
_ZEROS: Final = bytes(BLOCK)
_FILES: Final = b"0\x007"
_EXTENSIONS: Final = b"xXgLK"
_WITHOUT_DATA: Final = {  # what a member of this kind is where a file belongs
    ord("1"): "a hard link, whose data an earlier member holds: write the tar with --hard-dereference",
    ord("2"): "a symbolic link: write the tar with --dereference",
    **dict.fromkeys(b"34", "a device"),
    ord("5"): "",  # a folder
    ord("6"): "a pipe",
}
MAX_NAME: Final = 4096  # Linux' PATH_MAX
_USED_RECORDS: Final = ("path", "size", "GNU.sparse")  # of pax headers
LOOK_BACK_BYTES: Final = 16 << 10  # for extended headers that precede the first header of a part
SCAN_BYTES: Final = 64 << 10


class TarError(SampleError):
    """The archive is malformed from here on."""


@dataclass(frozen=True, slots=True)
class Header:
    """One header block; `size_bytes` of data follow it."""

    name: bytes
    kind: int
    size_bytes: int
    is_ustar: bool


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive. `offset` is the position of its own header block.

    `is_file`: it has the name of a file. `problem` tells what it is if it cannot be read, such as "a pipe".
    """

    name: str
    size_bytes: int
    offset: int
    is_file: bool
    is_ustar: bool
    problem: str = ""


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: a binary number, too large for octal digits
        if field[0] != 0x80:
            raise TarError("a header with a negative size")
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip()
    if not text:
        return 0
    if not text.isdigit():
        raise TarError("a header with malformed numbers")
    try:
        return int(text, 8)
    except ValueError:
        raise TarError("a header whose numbers are not octal") from None


def _checksum(block: bytes) -> int:
    """Return the sum of all bytes, with spaces in place of the checksum itself."""
    # Most bytes are zeros: without them the sum takes a third of the time.
    return sum(block.translate(None, b"\0")) - sum(block[148:156]) + 8 * 0x20


def parse_header(block: bytes) -> Header | None:
    """Parse a block of 512 bytes; None for a block of zeros. Raises TarError if it is no header."""
    if block == _ZEROS:
        return None
    excess = _checksum(block) - _number(block[148:156])
    # Some old archivers summed signed bytes.
    if excess and excess != 256 * sum(byte > 127 for byte in block[:148] + block[156:]):
        raise TarError("no header where one belongs")
    name = block[:100].split(b"\0", 1)[0]
    if block.startswith(b"ustar\0", _USTAR_AT):
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    kind = block[156]
    return Header(name, kind, _number(block[124:136]), block.startswith(_USTAR, _USTAR_AT))


def _parse_pax(data: bytes) -> dict[str, bytes]:
    """Parse the records of a pax header: each is a length, a space, key=value and a line feed.

    Returns those that are used, with one for all of sparse files: an archive may have any number of others.
    """
    records: dict[str, bytes] = {}
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + 20)
        digits = data[start:space] if space > 0 else b""
        stop = start + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : stop - 1].partition(b"=")
        if not start < stop <= len(data) or not equals or data[stop - 1] != 0x0A:
            raise TarError("a malformed pax header")
        name = "GNU.sparse" if key.startswith(b"GNU.sparse") else key.decode("utf-8", "replace")
        if name in _USED_RECORDS:
            records[name] = value
        start = stop
    return records


def find_header(data: bytes, start: int) -> int | None:
    """Return the offset of the first ustar header in `data[start:]`, or None.

    `start` and the offset are multiples of BLOCK.
    """
    found = data.find(_USTAR, start + _USTAR_AT)
    while found >= 0:
        offset = found - _USTAR_AT
        if offset % BLOCK == 0 and _header_at(data, offset) is not None:
            return offset
        found = data.find(_USTAR, found + 1)
    return None


def first_extended_header(data: bytes, header: int) -> int:
    """Return the offset of the first extended header that belongs to the header at `header`, or `header`."""
    begin = header
    for offset in range(header - BLOCK, -1, -BLOCK):
        found = _header_at(data, offset)
        if found is not None and offset + BLOCK + _padded(found.size_bytes) == begin:
            if found.kind not in _EXTENSIONS:
                break  # the member before
            begin = offset
    return begin


def _header_at(data: bytes, offset: int) -> Header | None:
    block = data[offset : offset + BLOCK]
    if len(block) < BLOCK or not block.startswith(_USTAR, _USTAR_AT):
        return None
    try:
        return parse_header(block)
    except TarError:
        return None


def _padded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


class TarReader:
    """Reads the members of the archive in `stream` from its position on; unread data are skipped."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._global: dict[str, bytes] = {}
        self._unread_bytes = 0  # bytes of this member's data not read yet
        self._padding = 0
        self._seen_member = False
        self.lacks_end_mark = False  # the archive ended after a member, without the end mark

    def next(self) -> Member | None:
        """Return the next member, or None at the mark that ends the archive.

        Some archivers write no mark: the end of the file after a complete member counts as one, too
        (`lacks_end_mark`). Raises TarError if the file ends elsewhere, and for a bad header.
        """
        self._skip(self._unread_bytes + self._padding)
        self._unread_bytes = self._padding = 0
        extended: dict[str, bytes] = {}
        is_boundary = self._seen_member
        while True:
            offset = self._stream.position
            block = bytes(self._stream.read(BLOCK))
            if not block and is_boundary and self._stream.is_whole:
                self.lacks_end_mark = True
                return None
            is_boundary = False
            if len(block) < BLOCK:
                raise _truncated(self._stream.position)
            header = parse_header(block)
            if header is None:
                return None
            if header.kind not in _EXTENSIONS:
                self._seen_member = True
                return self._member(header, {**self._global, **extended}, block, offset)
            data = self._extension(header)
            if header.kind in b"xX":
                extended.update(_parse_pax(data))
            elif header.kind in b"g":
                self._global.update(_parse_pax(data))
            elif header.kind in b"L":
                extended.setdefault("path", data.split(b"\0", 1)[0])

    def _extension(self, header: Header) -> bytes:
        if header.size_bytes > MAX_EXTENSION_BYTES:
            raise TarError(f"an extended header of {header.size_bytes:,} bytes")
        data = bytes(self._stream.read(header.size_bytes))
        if len(data) < header.size_bytes:
            raise _truncated(self._stream.position)
        self._skip(_padded(len(data)) - len(data))
        return data

    def _member(self, header: Header, extended: dict[str, bytes], block: bytes, offset: int) -> Member:
        size_bytes = header.size_bytes
        if "size" in extended:
            if not extended["size"].isdigit() or len(extended["size"]) > 20:
                raise TarError("a malformed pax header")
            size_bytes = int(extended["size"])
        name = extended.get("path", header.name)
        problem = _WITHOUT_DATA.get(header.kind, "")
        is_file = (header.kind in _FILES or bool(problem)) and not name.endswith(b"/")
        if header.kind == ord("S"):
            is_file, problem = True, "a sparse file"
            more = block[482]
            while more:
                block = bytes(self._stream.read(BLOCK))
                more = block[504] if len(block) == BLOCK else 0
        elif is_file and "GNU.sparse" in extended:
            problem = "a sparse file"
        folder = header.kind == 0 and name.endswith(b"/")  # in archives of before 1988
        if header.kind not in _WITHOUT_DATA and not folder:
            self._unread_bytes, self._padding = size_bytes, _padded(size_bytes) - size_bytes
        text = name.decode("utf-8", "surrogateescape")
        return Member(text, self._unread_bytes, offset, is_file, header.is_ustar, problem)

    def data(self) -> memoryview:
        """Return the writable data of the member that `next` returned. Raises TarError if truncated."""
        total = self._stream.size_bytes
        if total is None or self._stream.position + self._unread_bytes <= total:
            data = self._stream.read(self._unread_bytes)
            if len(data) == self._unread_bytes:
                self._unread_bytes = 0
                return data
        raise _truncated(total or self._stream.position)

    def _skip(self, nbytes: int) -> None:
        if nbytes and self._stream.skip(nbytes) < nbytes:
            raise _truncated(self._stream.position)


def _truncated(num_bytes: int) -> TarError:
    return TarError(f"truncated: it ends after {num_bytes:,} bytes")


# --- groups of members, each one sample --------------------------------------------------------


def split_name(name: str) -> tuple[str, str] | None:
    """Split a file's name into its sample's name and its extension: "a/b.seg.PNG" gives "a/b", "seg.png".

    WebDataset's rule: the sample's name ends at the first dot after the last slash. None for files that
    belong to no sample: no extension, hidden, or an entry of WebDataset's own ("__…__").
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
    """Return the reason to refuse `name`, or "". Users may write files by their keys."""
    if len(name) > MAX_NAME:
        return f"a name of {len(name):,} characters"
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        return "a name that leads out of the archive"
    return ""


@dataclass(slots=True)
class Group:
    """The files of one sample by extension; `problem` is the reason why it cannot be used, or ""."""

    key: str
    files: dict[str, memoryview] = field(default_factory=dict)
    nbytes: int = 0
    problem: str = ""

    @property
    def shown_key(self) -> str:
        """The key as valid Unicode, whatever bytes the name holds."""
        return self.key if self.key.isascii() else os.fsencode(self.key).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Cut:
    """The bytes `begin` to `end` (None: the end) of an archive, cut without regard to samples.

    The sample of the first file at or after a cut belongs to the part before the cut. So each part finds
    its own first sample, and all parts together give every sample once.
    """

    begin: int
    end: int | None


def read_groups(stream: Stream, cut: Cut | None = None) -> Iterator[Group | Skipped]:
    """Yield the complete samples of the archive in `stream`, or of a part of it. Raises SampleError at
    damage.

    The sample at a truncation is left out, and so is the last sample of an
    archive without an end mark if it lacks an extension of the sample before: it may be truncated.
    """
    reader = TarReader(stream)
    end = None if cut is None else cut.end
    skip_first = cut is not None and cut.begin > 0  # the first sample belongs to the previous part
    group: Group | None = None
    previous_extensions: frozenset[str] = frozenset()  # the extensions of the sample before
    is_last = False
    for member, key, extension in _sample_files(reader, stream, cut):
        if group is None or group.key != key:
            if group is not None:
                if not skip_first:
                    yield group
                skip_first = False
                previous_extensions = frozenset(group.files)
            if is_last:
                return
            group = Group(key)
        is_last = is_last or (end is not None and member.offset >= end)
        if not skip_first:
            _read_file(group, extension, member, reader, stream)
    if group is None or skip_first:
        pass
    elif reader.lacks_end_mark and not group.problem and not previous_extensions <= group.files.keys():
        yield Skipped(
            f"#{group.shown_key}: truncated: it ends after {stream.position:,} bytes, without the end mark"
        )
    else:
        yield group
    if _is_followed(stream):
        yield Skipped("another archive follows its end mark, and is not read; keep each in a file of its own")


def _is_followed(stream: Stream) -> bool:
    """Return whether another archive follows the end mark, as `cat` joins them."""
    try:
        rest = bytes(stream.read(SCAN_BYTES))
    except SampleError:  # packed data that are damaged after the end mark have cost no sample
        return False
    return find_header(rest, 0) is not None


def _sample_files(reader: TarReader, stream: Stream, cut: Cut | None) -> Iterator[tuple[Member, str, str]]:
    """Yield the members that are files of samples, each with its sample's key and its extension.

    Raises TarError if no file of the archive is one.
    """
    others, example, is_empty = 0, "", True
    while (member := reader.next()) is not None:
        if cut is not None and not member.is_ustar:
            raise TarError("headers without 'ustar' cannot be read in parts; give samples_per_visit=0")
        names = split_name(member.name) if member.is_file else None
        if names is not None:
            is_empty = False
            yield member, *names
        elif member.is_file:
            others, example = others + 1, example or member.name
    if cut is None and others and is_empty:
        raise TarError(
            f"it holds no samples: none of its {others:,} files has a name with an extension, such as "
            f"0001.jpg (the first is {example[:100]!r})"
        )
    if cut is not None and cut.begin > 0 and any(bytes(stream.read(SCAN_BYTES))):
        raise TarError("it holds a tar itself, and cannot be read in parts; give samples_per_visit=0")


def _read_file(group: Group, extension: str, member: Member, reader: TarReader, stream: Stream) -> None:
    """Read a file into its group, or record why the group cannot be used."""
    problem = member.problem and f"its .{extension} is {member.problem}"
    problem = name_problem(member.name) or problem
    if extension in group.files:
        problem = problem or f"two files with the extension .{extension}"
    group.nbytes += member.size_bytes
    try:
        check_object(group.nbytes)
    except TooLargeError as error:
        if stream.size_bytes is None:  # a packed tar: to skip the sample, all of it would be unpacked
            raise TarError(f"#{group.shown_key}, in a packed tar: {error}") from error
        problem = problem or str(error)
    group.problem = group.problem or problem
    if group.problem:
        group.files.clear()
    else:
        group.files[extension] = reader.data()


def seek_member(stream: Stream, begin: int, end: int) -> bool:
    """Advance `stream`, which stands before `begin`, to the first member with a header at or after `begin`.

    Returns False if no such header begins before `end`.
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
            member = first_extended_header(window[: found + BLOCK], found)
            stream.push_back(memoryview(bytearray(window[member:])))
            return origin + found < end
        scanned = origin + len(window) // BLOCK * BLOCK
        drop = max(0, len(window) - LOOK_BACK_BYTES) // BLOCK * BLOCK
        window, origin = window[drop:], origin + drop
    return False
