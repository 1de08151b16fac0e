"""Parts of one local file, read straight into place, or mapped where few of their bytes will be looked at."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cachestream.errors import SampleError
from cachestream.mapping import FileMap
from cachestream.remote import pulse
from cachestream.remote.answers import Facts, Version
from cachestream.remote.mapped import mapped_spans
from cachestream.remote.parts import Span
from cachestream.remote.retry import ChangedError

__all__ = ["LocalParts"]

READ_BYTES: Final = 4 << 20
REPORT_BYTES: Final = 1 << 20


class LocalParts:
    """Reads `path`, of the version that `version` tells. Thread-safe and picklable."""

    def __init__(self, path: str, shown: str, version: Version) -> None:
        self._path, self._shown, self._version = path, shown, version
        self._map: tuple[Facts, FileMap] | None = None  # swapped as one: other threads read meanwhile

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def look_up(self) -> Facts:
        """The size and the version that the file has now."""
        fd = _open(self._path)
        try:
            return _facts_of(os.fstat(fd))
        finally:
            os.close(fd)

    def read(
        self, spans: Sequence[Span], outs: Sequence[memoryview] | None, sparse: bool
    ) -> Sequence[memoryview]:
        """The bytes of each span, as `RangedFile.read_spans` has it."""
        fd = _open(self._path)
        unreported = 0
        try:
            now = _facts_of(os.fstat(fd))
            if self._version.facts is None:
                self._version.facts = now
            elif now != self._version.facts:
                raise ChangedError("the file was replaced")
            if outs is None and sparse and all(stop <= now.size_bytes for _, stop in spans):
                nbytes = sum(stop - start for start, stop in spans)
                pulse.asking(nbytes)
                found = self._mapped_spans(fd, now, spans)
                if found is not None:
                    pulse.fetched(nbytes)
                    return found
            if outs is None:
                outs = [np.empty(stop - start, np.uint8).data for start, stop in spans]
            for (start, _), out in zip(spans, outs, strict=True):
                have = 0
                pulse.asking(len(out))
                while have < len(out):
                    got = os.preadv(fd, [out[have : have + READ_BYTES]], start + have)
                    if got == 0:
                        raise SampleError(
                            f"{self._shown}: ends after {start + have} of at least {start + len(out)} bytes"
                        )
                    have += got
                    unreported += got
                    if unreported >= REPORT_BYTES:
                        pulse.fetched(unreported)
                        unreported = 0
        finally:
            os.close(fd)
        pulse.fetched(unreported)
        return outs

    def _mapped_spans(self, fd: int, now: Facts, spans: Sequence[Span]) -> list[memoryview] | None:
        """The bytes of `spans` without a copy; None where the file cannot be mapped."""
        mapped = self._map
        if mapped is None or mapped[0] != now:
            try:
                mapped = now, FileMap(fd, now.size_bytes)
            except OSError:
                return None
            self._map = mapped
        return mapped_spans(mapped[1], spans)


def _open(path: str) -> int:
    # O_NONBLOCK: to open a named pipe would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SampleError(f"{path}: not a regular file")
    return fd


def _facts_of(status: os.stat_result) -> Facts:
    return Facts(status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")
