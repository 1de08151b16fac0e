"""Parallel requests for parts of one remote file; each part is reported to `metering` as it arrives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from cachestream.errors import SampleError
from cachestream.transport import metering
from cachestream.transport.answers import Answer, Facts, Span, Version, ask_s3, ask_web, facts_of_info
from cachestream.transport.remote import CALL_S, Remote, for_bytes_s, result_of
from cachestream.transport.remote_errors import ChangedError, backoff_delays, classify, judge

T = TypeVar("T")

PART_BYTES: Final = 4 << 20
PARALLEL: Final = 4
ATTEMPTS: Final = 4


class RemoteParts:
    """Parts of the remote file `path`, of one `version`, which the first answer sets.

    Thread-safe and picklable. Raises the errors of `RangedFile`.
    """

    def __init__(self, remote: Remote, path: str, shown: str, version: Version) -> None:
        self._remote, self._path, self._shown, self._version = remote, path, shown, version

    @property
    def answers_tell_facts(self) -> bool:
        """True if every answer holds the size and the version of the whole file."""
        return self._remote.is_s3 or self._remote.is_web

    def look_up(self) -> Facts:
        """Return the current size and version of the file."""
        if self.answers_tell_facts:
            self.request("bytes=0-0")
            assert self._version.facts is not None
            return self._version.facts
        return facts_of_info(self._remote.info(self._path))

    def request(self, range_header: str) -> bytes | memoryview:
        """Return the bytes that the server sends for one range; none if the file is empty."""
        found = self._request_if_any(range_header)
        if found is None:
            self._version.note(Answer(0, b"", Facts(0, "")))
            return b""
        return found

    def _request_if_any(self, range_header: str) -> bytes | memoryview | None:
        """Return the bytes that the server sends for one range; None if the range is beyond the end."""
        filesystem = self._remote.filesystem()
        try:
            answer: Answer = result_of(
                submit(filesystem, self._ask(filesystem, range_header)), for_bytes_s(PART_BYTES)
            )
        except Exception as error:
            if classify(error) != "range":
                raise
            return None
        self._version.note(answer)
        return answer.data

    def request_tail(self, nbytes: int) -> bytes | memoryview:
        """Return the last `nbytes`, or the whole file if it is shorter."""
        found = self._request_if_any(f"bytes=-{nbytes}")
        # Some servers refuse a suffix longer than the file; the first `nbytes` are the file then.
        return self.request(f"bytes=0-{nbytes - 1}") if found is None else found

    def fetch(self, spans: Sequence[Span]) -> list[memoryview]:
        """Return the bytes of each span."""
        filesystem = self._remote.filesystem()
        if not filesystem.async_impl:
            return self._read_opened(spans)
        outs = [np.empty(stop - start, np.uint8).data for start, stop in spans]
        self._fetch_all(filesystem, spans, outs)
        return outs

    def fetch_into(self, start: int, out: memoryview) -> None:
        """Fetch the bytes from `start` on into `out`, of a file of which a part was read before."""
        self._fetch_all(self._remote.filesystem(), [(start, start + len(out))], [out], begun=True)

    # --- requests

    def _fetch_all(
        self, filesystem: Any, spans: Sequence[Span], outs: Sequence[memoryview], begun: bool = False
    ) -> None:
        """Fetch `spans` into `outs`, in order, with `PARALLEL` requests under way.

        A request that fails after another one succeeded (or before, if `begun`) is retried here. If the first
        one fails, the caller retries, with the back-off of the whole unit.
        """
        pending: deque[tuple[Span, memoryview, concurrent.futures.Future[Answer]]] = deque()
        part_bytes = PART_BYTES if self.answers_tell_facts else min(PART_BYTES, self._remote.pieces.nbytes)
        todo = deque(_split(spans, outs, metering.at_most(part_bytes)))
        succeeded, failures, delays = begun, 0, backoff_delays(random)
        try:
            while pending or todo:
                while todo and len(pending) < PARALLEL:
                    span, out = todo.popleft()
                    metering.asking(len(out))
                    pending.append((span, out, submit(filesystem, self._ask_part(filesystem, span, out))))
                span, out, future = pending[0]
                try:
                    answer = result_of(future, for_bytes_s(len(out)) if self.answers_tell_facts else CALL_S)
                except Exception as error:
                    if isinstance(error, TimeoutError):
                        self._remote.pieces.was_late()
                    failures, kind = failures + 1, judge(error)
                    if kind == "range" and self._version.facts is not None:
                        raise ChangedError("the file is shorter now") from None
                    if kind != "unavailable" or not succeeded or failures >= ATTEMPTS:
                        raise
                    metering.wait(next(delays))
                    pending[0] = span, out, submit(filesystem, self._ask_part(filesystem, span, out))
                    continue
                pending.popleft()
                succeeded, failures = True, 0
                self._version.note(answer)
                self._place(answer, span, out)
        finally:
            for _, _, future in pending:
                future.cancel()

    async def _ask_part(self, filesystem: Any, span: Span, out: memoryview) -> Answer:
        start, stop = span
        if self.answers_tell_facts:
            return await self._ask(filesystem, f"bytes={start}-{stop - 1}", out)
        data: bytes = await filesystem._cat_file(self._path, start=start, end=stop)
        return Answer(start, data, None)

    async def _ask(self, filesystem: Any, range_header: str, out: memoryview | None = None) -> Answer:
        ask = ask_s3 if self._remote.is_s3 else ask_web
        most = max(0 if out is None else len(out), self._remote.most_bytes)
        return await ask(filesystem, self._path, range_header, most, out)

    def _place(self, answer: Answer, span: Span, out: memoryview) -> None:
        """Copy the bytes of `span` into `out`, unless they are there: the answer may be the whole file."""
        if answer.data is out:
            return
        start, stop = span
        data = answer.data[start - answer.start : stop - answer.start]
        if len(data) != stop - start:
            raise self._truncated(answer.start + len(answer.data), stop)
        out[:] = data

    def _read_opened(self, spans: Sequence[Span]) -> list[memoryview]:
        remote, found = self._remote, list[memoryview]()
        file = remote.call(lambda filesystem: filesystem.open(self._path, "rb", cache_type="none"))
        try:
            for start, stop in spans:
                remote.call(partial(_seek, file, start))
                data = bytearray()
                while len(data) < stop - start and (piece := remote.read(file, stop - start - len(data))):
                    data += piece
                if len(data) < stop - start:
                    raise self._truncated(start + len(data), stop)
                found.append(memoryview(data))
        finally:
            remote.close(file)
        return found

    def _truncated(self, have: int, want: int) -> SampleError:
        return SampleError(f"{self._shown}: ends after {have} of at least {want} bytes")


def _seek(file: Any, start: int, _filesystem: Any) -> None:
    file.seek(start)


def _split(
    spans: Sequence[Span], outs: Sequence[memoryview], part_bytes: int
) -> Iterator[tuple[Span, memoryview]]:
    """Yield each part that is one request, and the part of an out that it goes to."""
    for (start, stop), out in zip(spans, outs, strict=True):
        for cut in range(start, stop, part_bytes):
            end = min(cut + part_bytes, stop)
            yield (cut, end), out[cut - start : end - start]


def submit(filesystem: Any, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Run `coroutine` on the loop of `filesystem`."""
    return asyncio.run_coroutine_threadsafe(coroutine, filesystem.loop)
