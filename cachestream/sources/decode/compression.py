"""Compressed streams unpacked as they are read: gzip, bzip2, xz, and zstd where zstandard is installed."""

from __future__ import annotations

import bz2
import importlib
import importlib.util
import lzma
import zlib
from typing import Any, Final, Protocol

from cachestream.errors import ConfigError, SampleError
from cachestream.transport import metering
from cachestream.transport.stream import PIECE_BYTES, Stream

MEMORY_BYTES: Final = 256 << 20  # of a decompressor; a header may ask for 4 GiB
_INPUT_BYTES: Final = 256 << 10
_MAGICS: Final[dict[str, bytes]] = {
    "gzip": b"\x1f\x8b\x08",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
    "zstd": b"\x28\xb5\x2f\xfd",
}
ENDINGS: Final[dict[str, str]] = {
    **dict.fromkeys((".gz", ".tgz"), "gzip"),
    **dict.fromkeys((".bz2", ".tbz2", ".tbz"), "bzip2"),
    **dict.fromkeys((".xz", ".txz"), "xz"),
    **dict.fromkeys((".zst", ".tzst"), "zstd"),
}
_BLOCK_OR_END: Final = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # what follows "BZh9" in bzip2


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Gzip:
    """zlib's object with the interface that those of bz2 and lzma have."""

    def __init__(self, wbits: int = 31) -> None:
        self._inner = zlib.decompressobj(wbits=wbits)
        self._tail = b""
        self.eof = False
        self.unused_data = b""

    @property
    def needs_input(self) -> bool:
        return not self._tail and not self.eof

    def decompress(self, data: bytes, max_length: int) -> bytes:
        found = self._inner.decompress(self._tail + data, max_length)
        self._tail, self.eof = self._inner.unconsumed_tail, self._inner.eof
        self.unused_data = self._inner.unused_data
        return found


def require_unpacker(path: str) -> None:
    """Raise ConfigError if `path` ends as files do that nothing installed here can unpack."""
    for ending, kind in ENDINGS.items():
        if kind == "zstd" and path.lower().endswith(ending) and not _has_zstandard():
            raise ConfigError(f"{path}: to read zstd, install it: pip install zstandard")


def _has_zstandard() -> bool:
    return importlib.util.find_spec("zstandard") is not None


def unpacked(stream: Stream) -> Stream:
    """`stream`, or what is packed in it, as its first bytes tell. It stands at its first byte."""
    head = stream.read(10)
    stream.push_back(head)
    start = bytes(head)
    for kind, magic in _MAGICS.items():
        # A tar begins with a file's name, which may be "BZh…".
        if start.startswith(magic) and (kind != "bzip2" or start[4:] in _BLOCK_OR_END):
            return _ZstdStream(stream) if kind == "zstd" else UnpackedStream(stream, kind)
    return stream


def _make(kind: str) -> _Unpacker:
    if kind in ("gzip", "zlib"):
        return _Gzip(31 if kind == "gzip" else zlib.MAX_WBITS)
    if kind == "bzip2":
        return bz2.BZ2Decompressor()
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY_BYTES)


class UnpackedStream(Stream):
    """What `kind` ("gzip", "zlib", "bzip2", "xz") packed into `inner`, which whoever opened it must close."""

    def __init__(self, inner: Stream, kind: str) -> None:
        super().__init__(inner.where)
        self._inner = inner
        self._kind = kind
        self._unpacker = _make(kind)

    @property
    def is_whole(self) -> bool:
        """Whether what was packed has come to its own end, and not only its file."""
        return self._unpacker.eof

    def _next_piece(self) -> memoryview:
        """At most PIECE_BYTES, however small what they are packed in; empty at the end, also a sudden one."""
        found, data = b"", b""
        while not found:
            unpacker = self._unpacker
            if unpacker.eof:  # another archive may follow, or padding
                data = unpacker.unused_data or bytes(self._inner.read(_INPUT_BYTES))
                if not data.strip(b"\0"):
                    return memoryview(b"")
                self._unpacker = unpacker = _make(self._kind)
            elif unpacker.needs_input:
                data = bytes(self._inner.read(_INPUT_BYTES))
                if not data:
                    return memoryview(b"")
            else:
                data = b""
            found = unpacker.decompress(data, PIECE_BYTES)
            metering.fetched(0)  # much may come of few bytes fetched
        return memoryview(bytearray(found))


class _ZstdStream(Stream):
    """`inner` must be closed by whoever opened it."""

    def __init__(self, inner: Stream) -> None:
        super().__init__(inner.where)
        if not _has_zstandard():
            raise SampleError(f"{inner.where}: packed by zstd; to read it: pip install zstandard")
        zstandard: Any = importlib.import_module("zstandard")
        decompressor = zstandard.ZstdDecompressor(max_window_size=MEMORY_BYTES // 2)
        self._reader = decompressor.stream_reader(_ReadOnlyFile(inner), _INPUT_BYTES, read_across_frames=True)

    def _next_piece(self) -> memoryview:
        found = self._reader.read(PIECE_BYTES)
        metering.fetched(0)
        return memoryview(bytearray(found))


class _ReadOnlyFile:
    """A stream with the one method of a file that zstandard uses."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def read(self, nbytes: int) -> bytes:
        return bytes(self._stream.read(nbytes))
