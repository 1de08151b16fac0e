"""A file as a stream: read forward only, each byte once, in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from cachestream.transport import object_limit
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.remote_errors import map_errors

_EMPTY: Final = memoryview(b"")


class Stream:
    """The bytes of one file, each once. Not thread-safe; `close` releases connections and files.

    `size_bytes` is the size of the whole file, None while it is unknown. `position` is the offset of the byte
    that `read` returns next. Errors are those of `remote_errors.map_errors`: SampleError for a file that
    cannot be read, SourceUnavailableError for a remote that does not answer.
    """

    def __init__(self, where: str, secrets: Iterable[str] = (), start: int = 0) -> None:
        self.where = where
        self.size_bytes: int | None = None
        self.position = start
        self._secrets = tuple(secrets)
        self._piece = _EMPTY
        self._ended = False

    @property
    def is_whole(self) -> bool:
        """True if the file was read to its end, and its size is known."""
        return self.position == self.size_bytes

    def _next_piece(self) -> memoryview:
        """Return the next bytes, in memory that the stream does not reuse; empty at the end."""
        raise NotImplementedError

    def _jump(self, nbytes: int) -> None:
        """Skip the next `nbytes`, all of which are inside the file; may read them."""
        raise NotImplementedError

    def close(self) -> None:
        """Release connections and files; the stream must not be read again."""

    def _fill(self) -> bool:
        """Fetch the next piece; return False at the end."""
        if not self._ended:
            with map_errors(self.where, one_of_many=True, secrets=self._secrets):
                self._piece = self._next_piece()
            self._ended = not len(self._piece)
        return not self._ended

    def read(self, nbytes: int) -> memoryview:
        """Return the next `nbytes`, writable; fewer only at the end. Bytes of one piece are not copied."""
        piece = self._piece
        if len(piece) >= nbytes:
            self._piece = piece[nbytes:]
            self.position += nbytes
            return piece[:nbytes]
        parts, have = [piece], len(piece)
        self._piece = _EMPTY
        while have < nbytes and self._fill():
            part = self._piece[: nbytes - have]
            self._piece = self._piece[len(part) :]
            parts.append(part)
            have += len(part)
        self.position += have
        return join(parts, have)

    def read_whole(self) -> memoryview:
        """Return the rest of the file, writable. Raises SampleError above the limit for one object."""
        most = object_limit.limit_bytes()
        self.push_back(self.take())  # after the first piece the size is known, if the server sends it
        data = self.read(most + 1) if (self.size_bytes or 0) <= most else memoryview(b"")
        with map_errors(self.where, one_of_many=True):
            object_limit.check(max(len(data), self.size_bytes or 0))
        return data

    def take(self) -> memoryview:
        """Return the next bytes that are in memory, or else the next piece; empty only at the end."""
        if not len(self._piece):
            self._fill()
        piece, self._piece = self._piece, _EMPTY
        self.position += len(piece)
        return piece

    def skip(self, nbytes: int) -> int:
        """Skip the next `nbytes`; return how many there were."""
        left = nbytes
        while left > 0:
            if not len(self._piece):
                inside = 0 if self.size_bytes is None else min(left, self.size_bytes - self.position)
                if inside >= PIECE_BYTES:
                    with map_errors(self.where, one_of_many=True, secrets=self._secrets):
                        self._jump(inside)
                    self.position += inside
                    left -= inside
                    continue
                if not self._fill():
                    break
            gone = min(left, len(self._piece))
            self._piece = self._piece[gone:]
            self.position += gone
            left -= gone
        return nbytes - left

    def push_back(self, data: memoryview) -> None:
        """Put back `data`, which was read last, to be read again."""
        rest = self._piece
        self._piece = join([data, rest], len(data) + len(rest))
        self.position -= len(data)
        self._ended = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where} at {self.position:,} of {self.size_bytes}>"


def join(parts: list[memoryview], nbytes: int) -> memoryview:
    """Return `parts`, of `nbytes` together, as one; a single one is not copied."""
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    whole = np.empty(nbytes, np.uint8).data
    have = 0
    for part in parts:
        whole[have : have + len(part)] = part
        have += len(part)
    return whole


class StreamFile(io.RawIOBase):
    """A stream with the methods of a file that cannot seek. Closing it leaves the stream open."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def read(self, nbytes: int = -1) -> bytes:
        return bytes(self._stream.read(nbytes) if nbytes >= 0 else self._stream.read_whole())

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        data = self._stream.read(len(out))
        out[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        return True
