"""The open shard and its publication, by a thread, while the next shard is packed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cachestream import tracing
from cachestream.config import format_size
from cachestream.errors import CacheFullError, SampleError, SchemaMismatchError
from cachestream.schema import HELD_OUT, TRAIN, WHOLE, Schema, Span, is_held_out, span_array
from cachestream.shard_format import ShardContent
from cachestream.storage.os_errors import DiskFailedError, translated_disk_errors
from cachestream.storage.progress import PassRow
from cachestream.storage.publish import Publisher, UnitProgress
from cachestream.storage.reservations import disk_footprint
from cachestream.storage.settings import MIN_LIMIT_BYTES
from cachestream.storage.tables import FailureRow
from cachestream.storage.telemetry import NO_SPACE, WRITING, Slot, board_text
from cachestream.transport.remote_errors import redact_text
from cachestream.worker.job import Job
from cachestream.worker.order import END
from cachestream.worker.sampling.encode import Table
from cachestream.worker.sampling.packer import Packer

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

BEAT_S: Final = 0.25  # between two signs of life while a shard is waited for
_REASON_CHARS: Final = 300
_SPACE_WAITS_S: Final = (0.02, 1.0)  # the first and the longest
_LEASES_S: Final = 0.05  # between two looks at the leases


class StartAgainError(Exception):
    """The open shard does not fit the cache any more: a new process is to read its samples again."""


class PendingProgress:
    """The progress of units since the last commit, to be committed with the open shard."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[int, int]] = {}
        self._failures: dict[tuple[str, str], tuple[int, str]] = {}
        self._spans: list[list[tuple[int, int]]] = []  # start and stop of each
        self.ends: dict[int, int] = {}  # position → number of samples in the shard, up to its last one
        self.cleared_suspects: list[int] = []  # positions that were read without a crash, or given up
        # Samples that were packed, dropped or skipped, and units that failed without killing a process.
        self.done = 0

    @property
    def is_empty(self) -> bool:
        return not self._claims and not self._failures

    @property
    def spans(self) -> list[Span]:
        """The samples of the open shard, with those that were dropped or skipped."""
        return [Span(start, stop) for start, stop in self._spans]

    def add_samples(self, claim_id: int, position: int, start: int, stop: int) -> None:
        """Note that the samples at the offsets `start` to `stop` of a unit are packed, dropped or skipped."""
        self._claims[claim_id] = (position, stop)
        self.done += stop - start
        self._extend((position, start), (position, stop))

    def finish_unit(self, claim_id: int, position: int, rest: Sequence[tuple[int, int]]) -> None:
        """Note that the unit at `position` is done, and has no further samples in the ranges `rest`.

        The open shard counts as holding these ranges of offsets besides the added samples, and no others: a
        span over samples in another shard would hide their loss when that shard is evicted.
        """
        self._claims[claim_id] = (position + 1, 0)
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

    def for_pass(self, pass_id: int) -> UnitProgress:
        """The progress as it is committed."""
        failures = tuple(
            FailureRow(kind, reason, count, example)
            for (kind, reason), (count, example) in self._failures.items()
        )
        claims = tuple((claim_id, *done) for claim_id, done in self._claims.items())
        return UnitProgress(pass_id, claims, tuple(self.cleared_suspects), failures)


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


class BackgroundPublisher:
    """Publishes one shard at a time, in the order they are sent, so that progress only moves forward."""

    def __init__(self, job: Job, cache: Cache, slot: Slot, *, owner: str, stop: threading.Event) -> None:
        self._job, self._cache, self._slot, self._stop = job, cache, slot, stop
        self.storage = Publisher(cache.directory, cache.catalogue, cache.reservations, owner)
        self._thread = futures.ThreadPoolExecutor(1, "publish")
        self._sent: futures.Future[None] | None = None
        self._spare = Packer(), Packer()  # of the shard before the one that is being published
        self._gave_up = False
        self.published = 0
        self.schema: Schema | None = cache.schema

    def send(self, shard: OpenShard) -> OpenShard:
        """Publish `shard` in the background; returns an empty shard.

        Waits until the shard before is published, and raises its error: CacheError (CatalogueReplacedError)
        or StartAgainError.
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
            return  # later progress would pass over the shard that was given up
        spans = shard.progress.spans
        fill = {"source": self._job.fingerprint, "plan": shard.row.plan, "length": shard.row.length}
        if self._job.transform:
            fill["transform"] = self._job.transform
        is_shared = self._job.cluster is not None and self._job.cluster.group
        ends = {"ends": list(shard.progress.ends.items())} if is_shared else {}
        contents = shard.contents({**fill, **ends, "spans": span_array(spans).tolist()})
        try:
            self._commit(contents, spans, shard.progress.for_pass(shard.row.id))
        except SchemaMismatchError as error:
            # Another process published samples of another schema first: the samples of this shard do not fit,
            # and samples that were skipped because of them may fit.
            raise StartAgainError from error
        except SampleError as error:
            shard.progress.count_skipped("sample", error, "the only sample of a shard", shard.num_samples)
            self._commit([], spans, shard.progress.for_pass(shard.row.id))
        # What the writer has decided for the first samples meanwhile holds until the cache has a schema.
        self.schema = self._cache.schema or self.schema
        if not self._gave_up:
            self._slot["committed"] += shard.progress.done
        shard.packer.clear()
        shard.held_out.clear()
        ended_s = time.monotonic()
        self._slot["publish_s"] += ended_s - begun_s
        tracing.add("publish", begun_s, ended_s)

    def _commit(self, contents: list[ShardContent], spans: list[Span], progress: UnitProgress) -> None:
        """Publish `contents` with `progress` as soon as there is space, unless the process stops before that.

        Raises if there can never be enough space.
        """
        wait_s, longest_s = _SPACE_WAITS_S
        while not self._try(contents, spans, progress):
            for content in contents:
                self._check_fits(content)
            self._slot["state"] = NO_SPACE
            begun_s = time.monotonic()
            if self._wait_for_space(begun_s + wait_s):
                self._gave_up = True
                return
            ended_s = time.monotonic()
            self._slot["space_wait_s"] += ended_s - begun_s
            tracing.add("wait for space", begun_s, ended_s)
            wait_s = min(longest_s, 2 * wait_s)
        self.published += bool(contents)
        self._slot["written_bytes"] += sum(content.data_bytes for content in contents)

    def _try(self, contents: list[ShardContent], spans: list[Span], progress: UnitProgress) -> bool:
        """Publish once; False if there is no space, or the disk fails: either may be over soon."""
        self._slot["state"] = WRITING
        refusal = ""
        try:
            if contents:
                may_evict = self._job.when_full == "evict"
                return self.storage.publish(contents, spans, progress, may_evict=may_evict) is not None
            self.storage.commit(progress)
            return True
        except (CacheFullError, DiskFailedError) as error:
            refusal = str(error)
            return False
        finally:
            self._show_refusal(refusal)

    def _wait_for_space(self, until_s: float) -> bool:
        """Wait until `until_s`, or until an epoch begins or ends, which may make room.

        True if the process is to stop.
        """
        leases = self._cache.directory.leases
        with translated_disk_errors(leases):
            seen_ns = os.stat(leases).st_mtime_ns
            while (left_s := until_s - time.monotonic()) > 0 and os.stat(leases).st_mtime_ns == seen_ns:
                if self._stop.wait(min(left_s, _LEASES_S)):
                    return True
        return self._stop.is_set()

    def _show_refusal(self, refusal: str) -> None:
        """Show the error of the disk on the board, which needs no space, and once in the log."""
        if refusal and not self._slot["refusal"]:
            sys.stderr.write(f"{refusal}; trying again\n")
        self._slot["refusal"] = board_text(refusal)

    def _check_fits(self, content: ShardContent) -> None:
        """Raise unless a shard of this size can ever fit the cache."""
        limit_bytes = self._cache.size_limit
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
