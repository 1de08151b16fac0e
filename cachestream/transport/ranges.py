"""Parts of one file: the requested bytes and few others, all of one version.

Near parts share a request, large ones take several at once; each is reported to `metering` as it arrives.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from cachestream.errors import SampleError
from cachestream.transport import metering
from cachestream.transport.answers import Facts, Span, Version, ask_s3, ask_web
from cachestream.transport.local import LocalParts
from cachestream.transport.range_requests import ATTEMPTS, PART_BYTES, RemoteParts, submit
from cachestream.transport.remote import CALL_S, Remote, for_bytes_s, in_time
from cachestream.transport.remote_errors import backoff_delays, judge

T = TypeVar("T")

GAP_BYTES: Final = 64 << 10  # about as many as arrive in the time that one more request takes


def merge_spans(spans: Sequence[Span], gap_bytes: int = GAP_BYTES) -> list[tuple[Span, list[int]]]:
    """Merge near spans; return the merged spans in order, each with the indices of the `spans` inside it."""
    merged: list[tuple[Span, list[int]]] = []
    for position in sorted(range(len(spans)), key=spans.__getitem__):
        start, stop = spans[position]
        if merged and start - merged[-1][0][1] <= gap_bytes:
            (first, last), members = merged[-1]
            merged[-1] = ((first, max(last, stop)), [*members, position])
        else:
            merged.append(((start, stop), [position]))
    return merged


def patiently(look: Callable[[], T]) -> T:
    """Call `look` and return its result; try up to `ATTEMPTS` times while the remote is unavailable."""
    delays = backoff_delays(random)
    for _ in range(ATTEMPTS - 1):
        try:
            return look()
        except Exception as error:
            if judge(error) != "unavailable":
                raise
        metering.wait(next(delays))
    return look()


class RangedFile:
    """Random access to the file `path`, which messages call `shown`. Thread-safe and picklable.

    `facts` are those of the version that is read. After they are set to None, the current version is read.
    Raises the driver's errors (see `remote_errors.map_errors`), ChangedError if the file was replaced since
    the first read, and SampleError for bytes beyond its end.
    """

    def __init__(self, remote: Remote, path: str, shown: str) -> None:
        self._remote = remote
        self.path = path
        self.shown = shown
        self._version = Version()
        self._local = LocalParts(path, shown, self._version)
        self._parts = RemoteParts(remote, path, shown, self._version)

    @property
    def facts(self) -> Facts | None:
        return self._version.facts

    @facts.setter
    def facts(self, facts: Facts | None) -> None:
        self._version.facts = facts

    def head(self, nbytes: int) -> memoryview:
        """Return the first `nbytes`, or the whole file if it is shorter."""
        if self._parts.answers_tell_facts:
            return memoryview(self._parts.request(f"bytes=0-{nbytes - 1}"))[:nbytes]
        return self.read(0, min(self.look().size_bytes, nbytes))

    def tail(self, nbytes: int) -> memoryview:
        """Return the last `nbytes`, or the whole file if it is shorter."""
        if self._parts.answers_tell_facts:
            return memoryview(self._parts.request_tail(nbytes))[-nbytes:]
        size = self.look().size_bytes
        return self.read(max(0, size - nbytes), size)

    def look(self) -> Facts:
        """Return the size and the version; the remote is asked only if nothing was read yet."""
        if self.facts is None:
            self.facts = self._local.look_up() if self._remote.is_local else self._parts.look_up()
        return self.facts

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` up to, not including, `stop`."""
        return self.read_spans([(start, stop)])[0]

    def read_spans(
        self, spans: Sequence[Span], outs: Sequence[memoryview] | None = None, *, sparse: bool = False
    ) -> Sequence[memoryview]:
        """Return the bytes of each span (start, stop), in `outs`, of the same sizes, if they are given.

        `sparse`: only few of the bytes will be used, and none written to; local files are mapped then.
        """
        facts = self.facts
        if facts is not None and spans:
            end = max(stop for _, stop in spans)
            if end > facts.size_bytes:
                raise SampleError(f"{self.shown}: truncated: {facts.size_bytes} of at least {end} bytes")
        if self._remote.is_local:
            return self._local.read(spans, outs, sparse)
        found: list[memoryview] = [memoryview(b"")] * len(spans)
        groups = merge_spans(spans)
        for (span, members), data in zip(
            groups, self._parts.fetch([span for span, _ in groups]), strict=True
        ):
            for position in members:
                start, stop = spans[position]
                found[position] = data[start - span[0] : stop - span[0]]
                if outs is not None:
                    outs[position][:] = found[position]
        return found if outs is None else outs

    def read_into(self, start: int, out: memoryview) -> None:
        """Read the bytes from `start` on into `out`, in parts, several at once.

        For drivers that are asynchronous, and a file of which a part was read before.
        """
        self._parts.fetch_into(start, out)


async def fetch_object(
    remote: Remote, path: str, start: int | None = None, stop: int | None = None
) -> bytes | memoryview:
    """Return the bytes of `path`, or those from `start` (negative: from the end) up to `stop`.

    Awaited on the caller's own loop, while the filesystem works on its own; several calls may be under way.
    Raises the driver's errors. Not for local files.
    """
    filesystem = remote.filesystem()
    if not filesystem.async_impl:
        data: bytes | memoryview = remote.call(lambda one: one.cat_file(path, start=start, end=stop))
    else:
        answers_tell_facts = remote.is_s3 or remote.is_web
        deadline_s = for_bytes_s(PART_BYTES) if answers_tell_facts else CALL_S
        request = in_time(_object(remote, filesystem, path, start, stop), deadline_s)
        likely = min(remote.likely_bytes(), PART_BYTES)
        metering.asking(likely if start is None or stop is None else stop - start)
        data = await asyncio.wrap_future(submit(filesystem, request))
        if start is None and stop is None:
            remote.saw_object(len(data))
    metering.fetched(len(data))
    return data


async def _object(
    remote: Remote, filesystem: Any, path: str, start: int | None, stop: int | None
) -> bytes | memoryview:
    if not (remote.is_s3 or remote.is_web):
        found: bytes = await filesystem._cat_file(path, start=start, end=stop)
        return found
    header = ""
    if start is not None or stop is not None:
        last = "" if stop is None else stop - 1
        header = f"bytes={start}" if start is not None and start < 0 else f"bytes={start or 0}-{last}"
    ask = ask_s3 if remote.is_s3 else ask_web
    answer = await ask(filesystem, path, header, remote.most_bytes)
    if start is not None and start < 0:
        return answer.data[start:]
    first = (start or 0) - answer.start
    return answer.data[first : None if stop is None else stop - answer.start]
