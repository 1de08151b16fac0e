"""Tar archives in one pass: headers to members, in bounded memory, whatever the bytes are.

Reads ustar, pax and GNU archives (POSIX.1-2017 "pax", and GNU tar's manual, "Basic Tar Format"). The
standard library's tarfile reads extended headers of any size into memory, and at half the speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cachestream.transport.stream import Stream

BLOCK: Final = 512
MAX_EXTENSION_BYTES: Final = 1 << 20  # of one extended header, in a pax archive
_USTAR: Final = b"ustar"
_USTAR_AT: Final = 257
_ZEROS: Final = bytes(BLOCK)
_FILES: Final = b"0\x007"
_EXTENSIONS: Final = b"xXgLK"
_WITHOUT_DATA: Final = b"123456"  # links, devices, folders, pipes


class TarError(ValueError):
    """The archive makes no sense from here on."""


class TruncatedTarError(TarError):
    """The archive ends before its end."""


@dataclass(frozen=True, slots=True)
class Header:
    """One header block: `size_bytes` is that of the data that follow."""

    name: bytes
    kind: int
    size_bytes: int
    is_ustar: bool


@dataclass(frozen=True, slots=True)
class Member:
    """A file, folder, link or device in an archive. `offset` is that of its own header block.

    `problem` says why a file cannot be read as it is.
    """

    name: str
    size_bytes: int
    offset: int
    is_file: bool
    is_ustar: bool
    problem: str = ""


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: binary, for what octal digits cannot say
        if field[0] != 0x80:
            raise TarError("a header with a negative size")
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0", 1)[0].strip()
    if not text:
        return 0
    if not text.isdigit():
        raise TarError("a header whose numbers are none")
    try:
        return int(text, 8)
    except ValueError:
        raise TarError("a header whose numbers are not octal") from None


def _checksum(block: bytes) -> int:
    """The sum of all bytes, those of the checksum itself taken for spaces."""
    return sum(block) - sum(block[148:156]) + 8 * 0x20


def parse_header(block: bytes) -> Header | None:
    """The header in a block of 512 bytes; None for a block of zeros. Raises TarError for anything else."""
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
    """The records of a pax header: each its length, a space, key=value and a line feed."""
    records: dict[str, bytes] = {}
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + 20)
        digits = data[start:space] if space > 0 else b""
        stop = start + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : stop - 1].partition(b"=")
        if not start < stop <= len(data) or not equals or data[stop - 1] != 0x0A:
            raise TarError("a malformed pax header")
        records[key.decode("utf-8", "surrogateescape")] = value
        start = stop
    return records


def find_header(data: bytes, start: int) -> int | None:
    """Where the first ustar header at or after `start` begins in `data`; both at multiples of a block."""
    found = data.find(_USTAR, start + _USTAR_AT)
    while found >= 0:
        offset = found - _USTAR_AT
        if offset % BLOCK == 0 and _header_at(data, offset) is not None:
            return offset
        found = data.find(_USTAR, found + 1)
    return None


def begin_of_member(data: bytes, header: int) -> int:
    """Where the extended headers begin that belong to the header at `header` in `data`; else `header`."""
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
    """The members of the archive in `stream`, from where it stands; what is not read of one is skipped."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._global: dict[str, bytes] = {}
        self._left = 0  # bytes of this member's data not read yet
        self._padding = 0
        self._begun = False
        self.is_unmarked = False  # it ended after a member, without the mark

    def next(self) -> Member | None:
        """The next member, or None at the mark that ends the archive.

        Some archivers write no mark: the end of a whole file after a whole member is one, too
        (`is_unmarked`). Raises TruncatedTarError where the file ends elsewhere, TarError where no header is.
        """
        self._skip(self._left + self._padding)
        self._left = self._padding = 0
        extended: dict[str, bytes] = {}
        is_boundary = self._begun
        while True:
            offset = self._stream.position
            block = self._stream.read(BLOCK)
            if not block and is_boundary and self._stream.is_whole:
                self.is_unmarked = True
                return None
            is_boundary = False
            if len(block) < BLOCK:
                raise TruncatedTarError(f"truncated: it ends after {self._stream.position:,} bytes")
            header = parse_header(bytes(block))
            if header is None:
                return None
            if header.kind not in _EXTENSIONS:
                self._begun = True
                return self._member(header, {**self._global, **extended}, bytes(block), offset)
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
            raise TruncatedTarError(f"truncated: it ends after {self._stream.position:,} bytes")
        self._skip(_padded(len(data)) - len(data))
        return data

    def _member(self, header: Header, extended: dict[str, bytes], block: bytes, offset: int) -> Member:
        size_bytes = header.size_bytes
        if "size" in extended:
            if not extended["size"].isdigit() or len(extended["size"]) > 20:
                raise TarError("a malformed pax header")
            size_bytes = int(extended["size"])
        name = extended.get("path", header.name)
        is_file = header.kind in _FILES and not name.endswith(b"/")
        problem = ""
        if header.kind == ord("S"):
            is_file, problem = True, "sparse"
            more = block[482]
            while more:
                block = bytes(self._stream.read(BLOCK))
                more = block[504] if len(block) == BLOCK else 0
        elif is_file and any(key.startswith("GNU.sparse") for key in extended):
            problem = "sparse"
        folder = header.kind == 0 and name.endswith(b"/")  # as archives of before 1988 have them
        if header.kind not in _WITHOUT_DATA and not folder:
            self._left, self._padding = size_bytes, _padded(size_bytes) - size_bytes
        text = name.decode("utf-8", "surrogateescape")
        return Member(text, self._left, offset, is_file, header.is_ustar, problem)

    def data(self) -> memoryview:
        """The data of the member that `next` returned, writable. Raises TruncatedTarError."""
        total = self._stream.size_bytes
        if total is None or self._stream.position + self._left <= total:
            data = self._stream.read(self._left)
            if len(data) == self._left:
                self._left = 0
                return data
        raise TruncatedTarError(f"truncated: it ends after {total or self._stream.position:,} bytes")

    def _skip(self, nbytes: int) -> None:
        total = self._stream.size_bytes
        if total is not None and self._stream.position + nbytes > total:
            raise TruncatedTarError(f"truncated: it ends after {total:,} bytes")
        if nbytes and self._stream.skip(nbytes) < nbytes:
            raise TruncatedTarError(f"truncated: it ends after {self._stream.position:,} bytes")
