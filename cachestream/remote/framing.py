"""The records in a TFRecord file: how it is packed, where each record lies, and whether its checksums fit.

(tensorflow/core/lib/io/record_writer.h: length, its checksum, the record, its checksum.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.remote import bounds
from cachestream.remote.grouping import Problems
from cachestream.remote.stream import Stream
from cachestream.remote.unpack import UnpackedStream

__all__ = ["HEAD_BYTES", "MAX_RECORD_BYTES", "Checksum", "Records", "read_records", "unpacked_records"]

MAX_RECORD_BYTES: Final = 2 << 30  # as protobuf has it
TOGETHER_BYTES: Final = 512 << 10
SMALL_BYTES: Final = 32 << 10  # records that are on the average no larger come together
_HEAD: Final = struct.Struct("<QI")
HEAD_BYTES: Final = _HEAD.size
_TAIL_BYTES: Final = 4
Checksum = Callable[[bytes], int]


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Records that follow one another: `data` from starts[i] to stops[i] holds record `number` + i of its file."""

    number: int
    data: bytes
    starts: list[int]
    stops: list[int]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[bytes]:
        return (self.data[start:stop] for start, stop in zip(self.starts, self.stops, strict=True))


def unpacked_records(stream: Stream, kind: str | None, checksum: Checksum | None) -> Stream:
    """`stream`, or what is packed in it by `kind`: "gzip", "zlib", None, or "auto": as it begins."""
    if kind == "auto":
        head = stream.read(HEAD_BYTES)
        stream.push_back(head)
        kind = _compression_of(bytes(head), checksum)
    return stream if kind is None else UnpackedStream(stream, kind)


def read_records(stream: Stream, checksum: Checksum | None, problems: Problems) -> Iterator[Records]:
    """The records that are whole, in their order: small ones as many together as have come, others one by one."""
    number = 0
    while True:
        piece = stream.take()
        ends = _ends(piece)
        together = len(ends) > 1 and ends[-1] <= SMALL_BYTES * len(ends)
        if together:
            whole = yield from _together(number, piece, ends, checksum, problems)
            number += whole
            piece = piece[ends[whole - 1] if whole else 0 :]
        stream.push_back(piece)
        # With the record that the piece ends in, or whose length is damaged.
        for _ in range(1 if together else len(ends) + 1):
            record = _next(stream, number, checksum, problems)
            if record is None:
                return
            if len(record):
                yield record
            number += 1


def _ends(piece: memoryview) -> list[int]:
    """Where each record ends that lies in `piece` as a whole."""
    ends: list[int] = []
    at, most = 0, min(len(piece), TOGETHER_BYTES)
    while at + HEAD_BYTES <= most:
        length, _ = _HEAD.unpack_from(piece, at)
        at += HEAD_BYTES + length + _TAIL_BYTES
        if at > most:
            break
        ends.append(at)
    return ends


def _together(
    number: int, piece: memoryview, ends: list[int], checksum: Checksum | None, problems: Problems
) -> Generator[Records, None, int]:
    """The records that end at `ends` of `piece`, but for damaged ones; returns how many precede a damaged length."""
    data = bytes(piece[: ends[-1]])
    heads = [0, *ends[:-1]]
    starts, stops = [head + HEAD_BYTES for head in heads], [end - _TAIL_BYTES for end in ends]
    whole, damaged = len(ends), []
    if checksum is not None:
        lengths = _fit(
            data, [checksum(data[head : head + 8]) for head in heads], [head + 8 for head in heads]
        )
        whole = whole if lengths.all() else int(lengths.argmin())
        contents = [checksum(data[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        damaged = np.flatnonzero(~_fit(data, contents, stops)[:whole]).tolist()
    first = 0
    for bad in [*damaged, whole]:
        if bad > first:
            yield Records(number + first, data, starts[first:bad], stops[first:bad])
        if bad < whole:
            problems.add(f"record {number + bad}: its checksum does not fit")
        first = bad + 1
    return whole


def _fit(data: bytes, crcs: list[int], places: list[int]) -> npt.NDArray[np.bool_]:
    """Whether the checksums stored at `places` are those of `crcs`."""
    every = np.lib.stride_tricks.sliding_window_view(np.frombuffer(data, np.uint8), 4)
    stored = every[places].view("<u4").reshape(-1)
    fits: npt.NDArray[np.bool_] = _masked(np.array(crcs, np.uint32)) == stored
    return fits


def _next(stream: Stream, number: int, checksum: Checksum | None, problems: Problems) -> Records | None:
    """The next record; none where it is damaged, None at the end of what can be read."""
    head = bytes(stream.read(HEAD_BYTES))
    if not head:
        if isinstance(stream, UnpackedStream) and not stream.is_whole:
            problems.add(f"record {number}: the compressed file ends early")
        return None
    if len(head) < HEAD_BYTES:
        problems.add(f"record {number}: the file ends in the middle of its length")
        return None
    length, length_crc = _HEAD.unpack(head)
    if checksum is not None and _masked(checksum(head[:8])) != length_crc:
        problems.add(f"record {number}: the checksum of its length does not fit: this is no TFRecord, or damaged from here on")  # fmt: skip
        return None
    if length > MAX_RECORD_BYTES:
        problems.add(f"record {number}: a length of {length} bytes: this is no TFRecord, or damaged from here on")  # fmt: skip
        return None
    try:
        bounds.check(length)
    except bounds.TooLargeError as error:
        problems.add(f"record {number}: {error}")
        whole = length + _TAIL_BYTES
        return Records(number, b"", [], []) if stream.skip(whole) == whole else None
    record = bytes(stream.read(length))
    tail = bytes(stream.read(_TAIL_BYTES))
    if len(tail) < _TAIL_BYTES:
        problems.add(f"record {number}: the file ends in the middle of it")
        return None
    if checksum is not None and _masked(checksum(record)) != int.from_bytes(tail, "little"):
        problems.add(f"record {number}: its checksum does not fit")
        return Records(number, b"", [], [])
    return Records(number, record, [0], [length])


def _masked(crc: Any) -> Any:
    """`crc`, or uint32 of many, as TFRecords store it (tensorflow/core/lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _compression_of(head: bytes, checksum: Checksum | None) -> str | None:
    """How a file that begins with `head` is packed. A length may look like any magic number: it has a checksum."""
    if len(head) == HEAD_BYTES and checksum is not None:
        _, crc = _HEAD.unpack(head)
        if _masked(checksum(head[:8])) == crc:
            return None
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    # A first record of fewer than 16 MB has zeros where zlib has data.
    is_zlib = head[:1] == b"\x78" and int.from_bytes(head[:2], "big") % 31 == 0 and any(head[3:8])
    return "zlib" if is_zlib else None
