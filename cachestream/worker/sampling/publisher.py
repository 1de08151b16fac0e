"""The open shard and its publication, by a thread, while the next shard is packed.

A sampling process writes the file; its supervisor reserves the space before, and publishes it after.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Final

from cachestream import tracing
from cachestream.config import format_size
from cachestream.errors import CacheFullError, CacheLockedError, SampleError, SchemaMismatchError
from cachestream.schema import HELD_OUT, TRAIN, WHOLE, Schema, Span, is_held_out, span_array
from cachestream.shard_format import ShardContent, encode_header
from cachestream.storage.layout import Directory
from cachestream.storage.os_errors import DiskFailedError
from cachestream.storage.progress import PassRow
from cachestream.storage.publish import Reserved, WrittenShard, write_shard
from cachestream.storage.reservations import disk_footprint
from cachestream.storage.settings import MIN_LIMIT_BYTES
from cachestream.storage.tables import FailureRow
from cachestream.storage.telemetry import NO_SPACE, WRITING, Slot, board_text
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.job import Job
from cachestream.worker.order import END
from cachestream.worker.sampling.encode import Table
from cachestream.worker.sampling.messages import News, Publication
from cachestream.worker.sampling.packer import Packer

BEAT_S: Final = 0.25  # between two signs of life while a shard is waited for
_REASON_CHARS: Final = 300
_DISK_WAITS_S: Final = (0.02, 1.0)  # the first and the longest, after an error of the disk


class StartAgainError(Exception):
    """The open shard does not fit the cache any more: a new process is to read its samples again."""


class PendingProgress:
    """The progress of units since the last commit, to be committed with the open shard."""

    def __init__(self) -> None:
        self._advanced: dict[int, int] = {}  # position → the offset before which all is done
        self._finished: list[int] = []
        self._failures: dict[tuple[str, str], tuple[int, str]] = {}
        self._spans: list[list[tuple[int, int]]] = []  # start and stop of each
        self.ends: dict[int, int] = {}  # position → number of samples in the shard, up to its last one
        # Samples that were packed, dropped or skipped, and units that failed without killing a process.
        self.done = 0

    @property
    def is_empty(self) -> bool:
        return not self._advanced and not self._finished and not self._failures

    @property
    def spans(self) -> tuple[Span, ...]:
        """The samples of the open shard, with those that were dropped or skipped."""
        return tuple(Span(start, stop) for start, stop in self._spans)

    def add_samples(self, position: int, start: int, stop: int) -> None:
        """Note that the samples at the offsets `start` to `stop` of a unit are packed, dropped or skipped."""
        self._advanced[position] = stop
        self.done += stop - start
        self._extend((position, start), (position, stop))

    def finish_unit(self, position: int, rest: Sequence[tuple[int, int]]) -> None:
        """Note that the unit at `position` is done, and has no further samples in the ranges `rest`.

        The open shard counts as holding these ranges of offsets besides the added samples, and no others: a
        span over samples in another shard would hide their loss when that shard is evicted.
        """
        self._advanced.pop(position, None)
        self._finished.append(position)
        for start, stop in rest:
            self._extend((position, start), (position + 1, 0) if stop == END else (position, stop))

    def _extend(self, start: tuple[int, int], stop: tuple[int, int]) -> None:
        if self._spans and self._spans[-1][1] == start:
            self._spans[-1][1] = stop
        else:
            self._spans.append([start, stop])

    def count_skipped(self, kind: str, error: BaseException, example: str, count: int = 1) -> None:
        """Count samples that were skipped because of `error`.

        Most messages begin with the place ("s3://bucket/a.jpg: truncated"). The place becomes the example, so
        that errors of one reason are counted together.
        """
        text, example = redact_text(str(error).strip()) or "no message", redact_text(example)
        place, colon, rest = text.partition(": ")
        if colon and rest and kind == "sample" and ("/" in place or place == example):
            text, example = rest, place
        name = "" if kind in ("sample", "schema", "quarantined") else f"{type(error).__name__}: "
        reason = f"{name}{text}"[:_REASON_CHARS]
        before, first = self._failures.get((kind, reason), (0, example))
        self._failures[kind, reason] = (before + count, first)

    def publication(self, row: PassRow, shards: Sequence[WrittenShard]) -> Publication:
        """The message that has the supervisor publish `shards` with this progress."""
        failures = tuple(
            FailureRow(kind, reason, count, example)
            for (kind, reason), (count, example) in self._failures.items()
        )
        return Publication(
            row.id,
            tuple(shards),
            self.spans,
            tuple(self._finished),
            tuple(self._advanced.items()),
            failures,
        )


@dataclass(frozen=True, slots=True)
class Holdout:
    """The `share` of the samples that is held out, in shards of their own; None if none are.

    `comes_once`: each sample comes at most once in the pass. `is_full`: held-out samples take all of their
    part of the limit.
    """

    share: float | None = None
    comes_once: bool = True
    is_full: bool = False

    def split_of(self, key: bytes) -> int:
        """The split of the sample `key`, where samples are held out."""
        assert self.share is not None
        return HELD_OUT if is_held_out(key, self.share) else TRAIN


class OpenShard:
    """Samples that are not published yet, and the progress to be committed with them.

    The packers are those of an earlier shard, whose memory is used again: `packer` for all samples, or for
    those of the train split, and `held_out` for the others.
    """

    def __init__(self, packer: Packer, held_out: Packer) -> None:
        self.packer, self.held_out = packer, held_out
        self.holdout = Holdout()
        # The splits of which samples were left out because other shards hold them.
        self.left_out: set[int] = set()
        self.taken = 0  # samples that were packed, or are held back
        self.progress = PendingProgress()
        self.row: PassRow | None = None
        self.since_s: float | None = None

    @property
    def is_empty(self) -> bool:
        return not self.num_samples and self.progress.is_empty

    @property
    def num_samples(self) -> int:
        return self.packer.num_samples + self.held_out.num_samples

    @property
    def size_bytes(self) -> int:
        return self.packer.size_bytes + self.held_out.size_bytes

    @property
    def schema(self) -> Schema | None:
        """The schema of the samples so far, which further samples have to fit; None without samples."""
        packer = self.packer if self.packer.num_samples else self.held_out
        return packer.schema if packer.num_samples else None

    def pack(self, table: Table, known: Schema | None) -> None:
        """Add samples, each to the shard of its split; raises as `Packer.add`."""
        if self.holdout.share is None:
            self.packer.add(table, known)
            return
        splits = [self.holdout.split_of(key) for key in table.keys]
        for split, packer in ((TRAIN, self.packer), (HELD_OUT, self.held_out)):
            rows = [row for row, one in enumerate(splits) if one == split]
            if rows:
                packer.add(table if len(rows) == len(table) else table.take(rows), known)

    def contents(self, fill: dict[str, Any]) -> list[ShardContent]:
        """The shards to be published together: none, one, or one for each split."""
        if self.holdout.share is None:
            return [self.packer.content(fill)] if self.packer.num_samples else []
        packers = {HELD_OUT: self.held_out, TRAIN: self.packer}
        packers = {split: packer for split, packer in packers.items() if packer.num_samples}
        found = []
        for split, packer in packers.items():
            is_whole = len(packers) == 1 and not self.left_out - {split}
            entries = {
                "holdout": self.holdout.share,
                "held_out": packer.num_samples if split == HELD_OUT else 0,
                "part": WHOLE if is_whole else split,
            }
            found.append(packer.content(entries | fill))  # spans come last in a manifest
        return found

    def clear(self) -> None:
        """Have the packers ready for another shard."""
        self.packer.clear()
        self.held_out.clear()


class BackgroundPublisher:
    """Publishes one shard at a time, in the order they are sent."""

    def __init__(self, job: Job, link: SupervisorLink, slot: Slot, news: News, stop: threading.Event) -> None:
        self._job, self._link, self._slot, self._stop = job, link, slot, stop
        self._news = news
        self._directory = Directory(job.root)
        self._thread = futures.ThreadPoolExecutor(1, "publish")
        self._sent: futures.Future[None] | None = None
        self._spare = Packer(), Packer()  # of the shard before the one that is being published
        self._gave_up = False
        self.published = 0

    def send(self, shard: OpenShard) -> OpenShard:
        """Publish `shard` in the background; returns an empty shard.

        Waits until the shard before is published, and raises its error: CacheError, StartAgainError, or
        SupervisorGoneError.
        """
        self.wait()
        empty = OpenShard(*self._spare)
        self._spare = shard.packer, shard.held_out
        self._sent = self._thread.submit(self._publish, shard)
        return empty

    def wait(self) -> None:
        """Wait until nothing is being published; raises the error of the last shard."""
        while self._sent is not None:
            self._slot["beat_s"] = time.monotonic()
            # Not result(timeout=…): a TimeoutError of the disk (ETIMEDOUT) would look like its own.
            if futures.wait([self._sent], timeout=BEAT_S).done:
                self._sent.result()
                self._sent = None

    def _publish(self, shard: OpenShard) -> None:
        begun_s = time.monotonic()
        assert shard.row is not None
        if self._gave_up:
            shard.clear()
            return  # the process is to stop: another one reads these samples again
        spans = shard.progress.spans
        fill = {"source": self._job.fingerprint, "plan": shard.row.plan, "length": shard.row.length}
        fill |= {name: text for name in ("data", "transform") if (text := getattr(self._job, name))}
        is_shared = self._job.cluster is not None and self._job.cluster.group
        ends = {"ends": list(shard.progress.ends.items())} if is_shared else {}
        contents = shard.contents({**fill, **ends, "spans": span_array(spans).tolist()})
        try:
            if not self._put(contents, shard):
                self._gave_up = True
                shard.clear()
                return
        except SchemaMismatchError as error:
            # The samples of this shard do not fit; those that were skipped because of them may fit.
            raise StartAgainError from error
        except SampleError as error:
            shard.progress.count_skipped("sample", error, "the only sample of a shard", shard.num_samples)
            self._put([], shard)
        self._slot["committed"] += shard.progress.done
        shard.clear()
        ended_s = time.monotonic()
        self._slot["publish_s"] += ended_s - begun_s
        tracing.add("publish", begun_s, ended_s)

    def _put(self, contents: list[ShardContent], shard: OpenShard) -> bool:
        """Write and publish `contents` with the progress of `shard`; False if the process is to stop before
        that.

        A disk that is full or fails may recover: then all is tried again. Raises if there can never be enough
        space.
        """
        assert shard.row is not None
        headers = [encode_header(content) for content in contents]
        sizes = [len(header) + content.data_bytes for header, content in zip(headers, contents, strict=True)]
        pause_s, longest_s = _DISK_WAITS_S
        while True:
            for content in contents:
                self._check_fits(content)
            reserved = self._reserve(sizes) if contents else []
            if reserved is None:
                return False
            try:
                written = self._write(reserved, headers, contents)
                self._link.ask("publish", shard.progress.publication(shard.row, written))
            except (CacheFullError, CacheLockedError, DiskFailedError) as error:
                self._show_refusal(str(error))
                self._slot["state"] = NO_SPACE
                if self._stop.wait(pause_s):
                    return False
                pause_s = min(longest_s, 2 * pause_s)
            else:
                self._show_refusal("")
                self.published += bool(contents)
                self._slot["written_bytes"] += sum(content.data_bytes for content in contents)
                return True

    def _write(
        self, reserved: list[Reserved], headers: list[bytes], contents: list[ShardContent]
    ) -> list[WrittenShard]:
        self._slot["state"] = WRITING
        try:
            return [
                write_shard(self._directory, *one) for one in zip(reserved, headers, contents, strict=True)
            ]
        except BaseException:
            self._link.ask("cancel", tuple(reserved))
            raise

    def _reserve(self, sizes: list[int]) -> list[Reserved] | None:
        """Have the supervisor reserve space; None if the process is to stop before there is some."""
        begun_s = since_s = time.monotonic()
        self._slot["state"] = WRITING

        def goes_on() -> bool:
            nonlocal since_s
            now_s = time.monotonic()
            if self._slot["state"] != WRITING:  # the supervisor has found no space
                self._slot["space_wait_s"] += now_s - since_s
            since_s = now_s
            return not self._stop.is_set()

        reserved: list[Reserved] | None = self._link.ask("reserve", tuple(sizes), beat=goes_on, every_s=0.1)
        if since_s > begun_s:
            tracing.add("wait for space", begun_s, time.monotonic())
        return reserved

    def _show_refusal(self, refusal: str) -> None:
        """Show the error of the disk on the board, which needs no space, and once in the log."""
        if refusal and not self._slot["refusal"]:
            sys.stderr.write(f"{refusal}; trying again\n")
        self._slot["refusal"] = board_text(refusal)

    def _check_fits(self, content: ShardContent) -> None:
        """Raise unless a shard of this size can ever fit the cache."""
        limit_bytes = self._news.status.limit_bytes
        if disk_footprint(content.data_bytes) <= limit_bytes // 2:
            return
        if content.num_samples > 1:
            raise StartAgainError
        check_size(content.data_bytes, limit_bytes)


def check_size(nbytes: int, limit_bytes: int) -> None:
    """Raise SampleError if even an empty cache of `limit_bytes` has no room for one sample of `nbytes`."""
    if disk_footprint(nbytes) > limit_bytes - MIN_LIMIT_BYTES // 2:
        raise SampleError(
            f"one sample of {format_size(nbytes)} is larger than the limit of "
            f"{format_size(limit_bytes)} allows; raise the limit or crop it in the transform"
        )
