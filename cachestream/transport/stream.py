"""A remote file as a stream: forward only, each byte once, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from cachestream.transport import bounds
from cachestream.transport.remote_errors import map_errors

PIECE_BYTES: Final = 1 << 20
_EMPTY: Final = memoryview(b"")


class Stream:
    """Bytes of one file, each once. Used by one thread at a time; `close` lets go of what it holds.

    `size_bytes` is that of the whole file, None while unknown; `position` is the place of the byte
    that `read` gives next. Errors are those of `retry.map_errors`: SampleError for a file that
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
        """Whether all of the file was read, and is known to be all."""
        return self.position == self.size_bytes

    def _next_piece(self) -> memoryview:
        """Some bytes more, in memory that is not used again; empty at the end."""
        raise NotImplementedError

    def _jump(self, nbytes: int) -> None:
        """Leave out `nbytes` that come next, all of them inside the file; may read them."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of connections and files; the stream is not read again."""

    def _fill(self) -> bool:
        """Get a piece; False at the end."""
        if not self._ended:
            with map_errors(self.where, one_of_many=True, secrets=self._secrets):
                self._piece = self._next_piece()
            self._ended = not len(self._piece)
        return not self._ended

    def read(self, nbytes: int) -> memoryview:
        """The next `nbytes`, writable; fewer at the end of the file alone. Without a copy where they lie together."""
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
        return _join(parts, have)

    def read_whole(self) -> memoryview:
        """All the rest, writable; raises SampleError where that is above the bound for one object."""
        most = bounds.most_bytes()
        self.push_back(self.take())  # the size is known by then, if it is told
        data = self.read(most + 1) if (self.size_bytes or 0) <= most else memoryview(b"")
        with map_errors(self.where, one_of_many=True):
            bounds.check(max(len(data), self.size_bytes or 0))
        return data

    def take(self) -> memoryview:
        """What is there already of the bytes that come next, or the next piece of them; empty at the end alone."""
        if not len(self._piece):
            self._fill()
        piece, self._piece = self._piece, _EMPTY
        self.position += len(piece)
        return piece

    def skip(self, nbytes: int) -> int:
        """Leave out the next `nbytes`, and say how many there were."""
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
        """Let `data`, which was read last, come again."""
        rest = self._piece
        self._piece = _join([data, rest], len(data) + len(rest))
        self.position -= len(data)
        self._ended = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where} at {self.position:,} of {self.size_bytes}>"


def _join(parts: list[memoryview], nbytes: int) -> memoryview:
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    whole = np.empty(nbytes, np.uint8).data
    have = 0
    for part in parts:
        whole[have : have + len(part)] = part
        have += len(part)
    return whole
