"""Decompression of streams as they are read: gzip, bzip2, xz, and zstd if zstandard is installed."""

from __future__ import annotations

import bz2
import importlib
import importlib.util
import lzma
import zlib
from typing import Any, Final

from cachestream.errors import ConfigError, SampleError
from cachestream.listing.patterns import COMPRESSED_ENDINGS
from cachestream.transport import metering
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.stream import Stream

MEMORY_BYTES: Final = 256 << 20  # limit of one decompressor; a header may ask for 4 GiB
_INPUT_BYTES: Final = 256 << 10
_ZSTD_STEPS: Final = (32, 4 << 10)  # bytes of input at a time, at least and at most
_MAGICS: Final[dict[str, bytes]] = {
    "gzip": b"\x1f\x8b\x08",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
    "zstd": b"\x28\xb5\x2f\xfd",
}
_BLOCK_OR_END: Final = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # what follows "BZh9" in bzip2


class _Gzip:
    """Gives zlib's decompressor the interface of those in bz2 and lzma."""

    def __init__(self, wbits: int) -> None:
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


class _Zstd:
    """Gives zstandard's decompressor the same interface.

    It takes no `max_length`. So it gets a little input at a time, 4 KiB at most, which may unpack to 128 MiB,
    and less as long as much comes of it.
    """

    def __init__(self) -> None:
        zstandard: Any = importlib.import_module("zstandard")
        self._inner = zstandard.ZstdDecompressor(max_window_size=MEMORY_BYTES // 2).decompressobj()
        self._tail = memoryview(b"")
        self._step = _ZSTD_STEPS[0]

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + bytes(self._tail)

    @property
    def needs_input(self) -> bool:
        return not self._tail and not self.eof

    def decompress(self, data: bytes, max_length: int) -> bytes:
        self._tail = self._tail or memoryview(data)
        (least, most), found, nbytes = _ZSTD_STEPS, list[bytes](), 0
        while self._tail and nbytes < max_length and not self.eof:
            found.append(self._inner.decompress(self._tail[: self._step]))
            self._tail = self._tail[self._step :]
            nbytes += len(found[-1])
            is_much = len(found[-1]) > max_length
            self._step = max(least, self._step // 2) if is_much else min(most, 2 * self._step)
        return b"".join(found)


def require_decompressor(path: str) -> None:
    """Raise ConfigError if `path` has the extension of a compression that no installed library reads."""
    endings = tuple(ending for ending, kind in COMPRESSED_ENDINGS.items() if kind == "zstd")
    if path.lower().endswith(endings) and not _has_zstandard():
        raise ConfigError(f"{path}: to read zstd, install it: pip install zstandard")


def _has_zstandard() -> bool:
    return importlib.util.find_spec("zstandard") is not None


def decompressed(stream: Stream, *, required: bool = False) -> Stream:
    """Return `stream`, which stands at its first byte; decompressed if it begins with a known magic number.

    Raises SampleError if compression is `required`, and it does not.
    """
    head = stream.read(10)
    stream.push_back(head)
    start = bytes(head)
    for kind, magic in _MAGICS.items():
        # A tar begins with a file's name, which may be "BZh…".
        if start.startswith(magic) and (kind != "bzip2" or start[4:] in _BLOCK_OR_END):
            if kind == "zstd" and not _has_zstandard():
                raise SampleError(f"{stream.where}: packed by zstd; to read it: pip install zstandard")
            return DecompressedStream(stream, kind)
    if required:
        raise SampleError(f"{stream.where}: it is not compressed, as the index says it is")
    return stream


def _make_decompressor(kind: str) -> Any:
    """Return a decompressor with the interface of those in bz2 and lzma."""
    if kind in ("gzip", "zlib"):
        return _Gzip(31 if kind == "gzip" else zlib.MAX_WBITS)
    if kind == "bzip2":
        return bz2.BZ2Decompressor()
    if kind == "zstd":
        return _Zstd()
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY_BYTES)


class DecompressedStream(Stream):
    """Decompresses `inner` by `kind` ("gzip", "zlib", "bzip2", "xz", "zstd"). The caller closes `inner`.

    Raises SampleError where the compressed data end early, as unpacked lines or records would look complete.
    """

    def __init__(self, inner: Stream, kind: str) -> None:
        super().__init__(inner.where)
        self._inner = inner
        self._kind = kind
        self._decompressor = _make_decompressor(kind)

    @property
    def is_whole(self) -> bool:
        """True if the compressed data are complete: their own end was read, not only the file's."""
        return bool(self._decompressor.eof)

    def _next_piece(self) -> memoryview:
        """Return about PIECE_BYTES at most, however well they are packed; empty at the end."""
        found = b""
        while not found:
            decompressor = self._decompressor
            if decompressor.eof:  # padding may follow, and another compressed stream
                data = decompressor.unused_data.lstrip(b"\0")
                while not data:
                    padding = bytes(self._inner.read(_INPUT_BYTES))
                    if not padding:
                        return memoryview(b"")
                    data = padding.lstrip(b"\0")
                self._decompressor = decompressor = _make_decompressor(self._kind)
            elif decompressor.needs_input:
                data = bytes(self._inner.read(_INPUT_BYTES))
                if not data:
                    end = f"it ends after {self._inner.position:,} bytes"
                    raise SampleError(f"{self.where}: the compressed file is truncated: {end}")
            else:
                data = b""
            found = decompressor.decompress(data, PIECE_BYTES)
            metering.fetched(0)  # a sign of life: few bytes may unpack to many
        return memoryview(bytearray(found))
