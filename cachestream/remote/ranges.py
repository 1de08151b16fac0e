"""Parts of one remote file: the bytes that are asked for and few others, all of one version of it.

Neighbouring parts come in one request, large ones in several at once; each is reported to `pulse` as
it arrives. Local files are read straight into place.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import stat
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from cachestream.errors import SampleError
from cachestream.mapping import FileMap
from cachestream.remote import pulse
from cachestream.remote.answers import Answer, Facts, ask_s3, ask_web
from cachestream.remote.filesystem import Remote
from cachestream.remote.hedge import first_answer
from cachestream.remote.mapped import mapped_spans
from cachestream.remote.retry import ChangedError, backoff_delays, classify, judge
from cachestream.remote.versions import version_of
from cachestream.remote.waiting import result_of

__all__ = ["Facts", "RangedFile", "fetch_object", "merge_spans", "patiently"]

T = TypeVar("T")
Span = tuple[int, int]

GAP_BYTES: Final = 64 << 10  # what a request costs in time would carry about as many bytes
PART_BYTES: Final = 4 << 20
PARALLEL: Final = 4
PART_TIMEOUT_S: Final = 300.0  # a stalled connection is noticed sooner, by the driver
ATTEMPTS: Final = 4
REPORT_BYTES: Final = 1 << 20


def merge_spans(spans: Sequence[Span], gap_bytes: int = GAP_BYTES) -> list[tuple[Span, list[int]]]:
    """Spans that cover `spans` in order, each with the positions of those inside; near ones become one."""
    merged: list[tuple[Span, list[int]]] = []
    for position in sorted(range(len(spans)), key=spans.__getitem__):
        start, stop = spans[position]
        if merged and start - merged[-1][0][1] <= gap_bytes:
            (first, last), members = merged[-1]
            merged[-1] = ((first, max(last, stop)), [*members, position])
        else:
            merged.append(((start, stop), [position]))
    return merged


def _cuts(start: int, stop: int) -> list[Span]:
    """The parts that are asked for one by one."""
    part_bytes = pulse.at_most(PART_BYTES)
    return [(cut, min(cut + part_bytes, stop)) for cut in range(start, stop, part_bytes)]


def patiently(look: Callable[[], T]) -> T:
    """What `look` returns; tried up to four times, with full-jitter pauses, while the remote is away."""
    delays = backoff_delays(random)
    for _ in range(ATTEMPTS - 1):
        try:
            return look()
        except Exception as error:
            if judge(error) != "unavailable":
                raise
        pulse.wait(next(delays))
    return look()


class RangedFile:
    """Random access to `path`, which messages call `shown`. Raises the driver's errors (see
    `retry.map_errors`), ChangedError for a file that was replaced since the first read, and
    SampleError for bytes beyond its end.

    `facts` are those of the version read; setting them to None takes the file as it is now.
    Thread-safe and picklable.
    """

    def __init__(self, remote: Remote, path: str, shown: str) -> None:
        self._remote = remote
        self.path = path
        self.shown = shown
        self.facts: Facts | None = None
        self._map: tuple[Facts, FileMap] | None = None  # swapped as one: other threads read meanwhile

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None}

    def head(self, nbytes: int) -> memoryview:
        """The first `nbytes`, or all there are."""
        if self._tells_all():
            return memoryview(self._one(f"bytes=0-{nbytes - 1}"))[:nbytes]
        return self.read(0, min(self.look().size_bytes, nbytes))

    def tail(self, nbytes: int) -> memoryview:
        """The last `nbytes`, or all there are."""
        if self._tells_all():
            return memoryview(self._one(f"bytes=-{nbytes}"))[-nbytes:]
        size = self.look().size_bytes
        return self.read(max(0, size - nbytes), size)

    def look(self) -> Facts:
        """The size and the version; asks the remote only if nothing was read yet."""
        if self.facts is None:
            self.facts = self._look_up()
        return self.facts

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` up to, not with, `stop`."""
        return self.read_spans([(start, stop)])[0]

    def read_spans(
        self, spans: Sequence[Span], outs: Sequence[memoryview] | None = None, *, sparse: bool = False
    ) -> Sequence[memoryview]:
        """The bytes of each span (start, stop); into `outs`, of the same sizes, where they are given.

        `sparse`: few of them will be looked at, and none be written to; local files are mapped then.
        """
        facts = self.facts
        if facts is not None and spans:
            end = max(stop for _, stop in spans)
            if end > facts.size_bytes:
                raise SampleError(f"{self.shown}: truncated: {facts.size_bytes} of at least {end} bytes")
        if self._remote.is_local:
            return self._read_local(spans, outs, sparse)
        found: list[memoryview] = [memoryview(b"")] * len(spans)
        groups = merge_spans(spans)
        for (span, members), data in zip(groups, self._fetch([span for span, _ in groups]), strict=True):
            for position in members:
                start, stop = spans[position]
                found[position] = data[start - span[0] : stop - span[0]]
                if outs is not None:
                    outs[position][:] = found[position]
        return found if outs is None else outs

    def read_into(self, start: int, out: memoryview) -> None:
        """The bytes from `start` on into `out`, in parts of which several are on their way at once.

        For asynchronous filesystems, and a file of which something was read before.
        """
        filesystem, stop = self._remote.filesystem(), start + len(out)
        cuts = _cuts(start, stop)
        for (first, last), data in zip(cuts, self._arrive(filesystem, cuts, begun=True), strict=True):
            out[first - start : last - start] = data

    # --- local

    def _read_local(
        self, spans: Sequence[Span], outs: Sequence[memoryview] | None, sparse: bool
    ) -> Sequence[memoryview]:
        fd = _open(self.path)
        unreported = 0
        try:
            now = _facts_of(os.fstat(fd))
            if self.facts is None:
                self.facts = now
            elif now != self.facts:
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
                    got = os.preadv(fd, [out[have : have + PART_BYTES]], start + have)
                    if got == 0:
                        raise self._truncated(start + have, start + len(out))
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

    # --- remote

    def _tells_all(self) -> bool:
        """Whether an answer tells the size and the version of the whole file."""
        return self._remote.is_s3 or self._remote.is_web

    def _look_up(self) -> Facts:
        if self._remote.is_local:
            fd = _open(self.path)
            try:
                return _facts_of(os.fstat(fd))
            finally:
                os.close(fd)
        if self._tells_all():
            self._one("bytes=0-0")
            assert self.facts is not None
            return self.facts
        filesystem = self._remote.filesystem()
        if filesystem.async_impl:
            info = result_of(_submit(filesystem, filesystem._info(self.path)), PART_TIMEOUT_S)
        else:
            info = filesystem.info(self.path)
        return Facts(int(info["size"]), "|".join(version_of(info)))

    def _one(self, range_header: str) -> bytes:
        """The bytes that the server sends for one range; none where the file is empty."""
        filesystem = self._remote.filesystem()
        try:
            answer: Answer = result_of(
                _submit(filesystem, self._request(filesystem, range_header, 0)), PART_TIMEOUT_S
            )
        except Exception as error:
            if classify(error) != "range":
                raise
            answer = Answer(0, b"", Facts(0, ""))
        self._note(answer)
        return answer.data

    def _note(self, answer: Answer) -> None:
        pulse.fetched(len(answer.data))
        if self.facts is None:
            self.facts = answer.facts
        elif answer.facts is not None and answer.facts != self.facts:
            raise ChangedError(f"version {self.facts.version} became {answer.facts.version}")

    def _fetch(self, spans: Sequence[Span]) -> list[memoryview]:
        filesystem = self._remote.filesystem()
        if not filesystem.async_impl:
            return list(self._read_opened(filesystem, spans))
        buffers: list[memoryview] = []
        parts: list[tuple[int, Span]] = []
        for number, (start, stop) in enumerate(spans):
            cuts = _cuts(start, stop)
            parts.extend((number, cut) for cut in cuts)
            # One part's own bytes serve as they are; several are put together.
            buffers.append(np.empty(stop - start, np.uint8).data if len(cuts) > 1 else memoryview(b""))
        for (number, (first, last)), data in zip(
            parts, self._arrive(filesystem, [span for _, span in parts]), strict=True
        ):
            start, stop = spans[number]
            if (first, last) == (start, stop):
                buffers[number] = memoryview(data)
            else:
                buffers[number][first - start : last - start] = data
        return buffers

    def _arrive(self, filesystem: Any, spans: Sequence[Span], begun: bool = False) -> Iterator[bytes]:
        """The bytes of `spans`, in order; a few requests ahead of the consumer.

        A request that fails after others came through (or had before, if `begun`) is tried again here; what never began is
        retried from outside, with the whole unit's back-off.
        """
        pending: deque[tuple[Span, concurrent.futures.Future[Answer]]] = deque()
        todo = deque(spans)
        came, failures, delays = begun, 0, backoff_delays(random)
        try:
            while pending or todo:
                while todo and len(pending) < PARALLEL:
                    span = todo.popleft()
                    pulse.asking(span[1] - span[0])
                    pending.append((span, _submit(filesystem, self._part(filesystem, span))))
                span, future = pending[0]
                try:
                    answer = result_of(future, PART_TIMEOUT_S)
                except Exception as error:
                    failures, kind = failures + 1, judge(error)
                    if kind == "range" and self.facts is not None:
                        raise ChangedError("the file is shorter now") from None
                    if kind != "unavailable" or not came or failures >= ATTEMPTS:
                        raise
                    pulse.wait(next(delays))
                    pending[0] = (span, _submit(filesystem, self._part(filesystem, span)))
                    continue
                pending.popleft()
                came, failures = True, 0
                self._note(answer)
                yield self._cut(answer, span)
        finally:
            for _, future in pending:
                future.cancel()

    async def _part(self, filesystem: Any, span: Span) -> Answer:
        start, stop = span
        if self._tells_all():
            wanted = self._request(filesystem, f"bytes={start}-{stop - 1}", stop - start)
            return await asyncio.wait_for(wanted, PART_TIMEOUT_S)
        data: bytes = await asyncio.wait_for(
            first_answer(
                self._remote.hedge,
                stop - start,
                lambda: filesystem._cat_file(self.path, start=start, end=stop),
            ),
            PART_TIMEOUT_S,
        )
        return Answer(start, data, None)

    async def _request(self, filesystem: Any, range_header: str, nbytes: int) -> Answer:
        ask = ask_s3 if self._remote.is_s3 else ask_web
        return await first_answer(
            self._remote.hedge, nbytes, lambda: ask(filesystem, self.path, range_header)
        )

    def _cut(self, answer: Answer, span: Span) -> bytes:
        """The bytes of `span`: a server without ranges sends all of the file."""
        start, stop = span
        data = answer.data[start - answer.start : stop - answer.start]
        if len(data) != stop - start:
            raise self._truncated(answer.start + len(answer.data), stop)
        return data

    def _read_opened(self, filesystem: Any, spans: Sequence[Span]) -> Iterator[memoryview]:
        with filesystem.open(self.path, "rb", cache_type="none") as file:
            for start, stop in spans:
                file.seek(start)
                data = bytearray()
                while piece := file.read(min(PART_BYTES, stop - start - len(data))):
                    data += piece
                    pulse.fetched(len(piece))
                if len(data) < stop - start:
                    raise self._truncated(start + len(data), stop)
                yield memoryview(data)

    def _truncated(self, have: int, want: int) -> SampleError:
        return SampleError(f"{self.shown}: ends after {have} of at least {want} bytes")


async def fetch_object(remote: Remote, path: str, start: int | None = None, stop: int | None = None) -> bytes:
    """The bytes of `path`, or those from `start` (negative: from the end) up to `stop`.

    Awaited on a loop of the caller's own, while the filesystem works on its own loop; several may be
    under way. Raises the driver's errors. Not for local files.
    """
    filesystem = remote.filesystem()
    if not filesystem.async_impl:
        data: bytes = filesystem.cat_file(path, start=start, end=stop)
    else:
        request = asyncio.wait_for(_object(remote, filesystem, path, start, stop), PART_TIMEOUT_S)
        likely = min(remote.likely_bytes(), PART_BYTES)
        pulse.asking(likely if start is None or stop is None else stop - start)
        data = await asyncio.wrap_future(_submit(filesystem, request))
        if start is None and stop is None:
            remote.saw_object(len(data))
    pulse.fetched(len(data))
    return data


async def _object(remote: Remote, filesystem: Any, path: str, start: int | None, stop: int | None) -> bytes:
    if not (remote.is_s3 or remote.is_web):
        found: bytes = await filesystem._cat_file(path, start=start, end=stop)
        return found
    header = ""
    if start is not None or stop is not None:
        last = "" if stop is None else stop - 1
        header = f"bytes={start}" if start is not None and start < 0 else f"bytes={start or 0}-{last}"
    ask = ask_s3 if remote.is_s3 else ask_web
    nbytes = stop - start if start is not None and stop is not None else 0
    answer = await first_answer(remote.hedge, nbytes, lambda: ask(filesystem, path, header))
    if start is not None and start < 0:
        return answer.data[start:]
    first = (start or 0) - answer.start
    return answer.data[first : None if stop is None else stop - answer.start]


def _submit(filesystem: Any, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    return asyncio.run_coroutine_threadsafe(coroutine, filesystem.loop)


def _open(path: str) -> int:
    # O_NONBLOCK: to open a named pipe would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SampleError(f"{path}: not a regular file")
    return fd


def _facts_of(status: os.stat_result) -> Facts:
    return Facts(status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")
