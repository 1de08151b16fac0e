"""Copies of the shards of other caches: asked for, checked, and published within the limit of this cache.

A shard of which this cache holds some units already is published without these.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import CacheError, CorruptShardError
from cachestream.schema import WHOLE, Span, span_array, spans_of
from cachestream.shard_format import LENGTH_BYTES, ShardContent, ShardData, encode_header, header_bytes
from cachestream.storage.cache import Cache
from cachestream.storage.filling import overlapping
from cachestream.storage.publish import Reserved, write_shard
from cachestream.storage.telemetry import FETCHING, NO_SPACE, Board
from cachestream.worker.cached_units import held_elsewhere, positions_in, positions_of
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.cluster.directory import Copy
from cachestream.worker.job import Job
from cachestream.worker.messages import Import, Publication, SharedPass
from cachestream.worker.order import PassPlan

ANSWER_S: Final = 10.0  # without an answer of the group for so long the cache goes on alone
_AT_ONCE: Final = 4  # copies under way
_AVOID_S: Final = 10.0  # a cache that did not give a shard is not asked
_COPY_S, _COPY_BYTES_PER_S = 15.0, 1 << 20  # a copy that is slower is given up
_MOST_ATTEMPTS: Final = 3  # to copy a shard; then its samples are made
_LINE_CHARS: Final = 200


@dataclass(slots=True)
class _Fetch:
    """A shard under way, into a reservation of this cache."""

    copy: Copy
    holder: str
    reserved: Reserved
    until_s: float


class Copier:
    """Copies shards of other caches into `cache`, several at a time.

    `arrived`: the contents of those that have come, until the caller clears it. `refused`: those that this
    cache cannot have. `has_room` is False once a shard of an earlier pass did not fit: none is evicted for
    those.
    """

    def __init__(self, ray: Any, job: Job, cache: Cache, link: SupervisorLink) -> None:
        self._ray, self._job, self._cache, self._link = ray, job, cache, link
        self._slot = Board(cache.directory.worker_file("board")).sharing_slot
        self._plan = ""  # of the current pass
        self._wanted: list[Copy] = []
        self._servers: Mapping[str, Any] = {}
        self._fetches: dict[Any, _Fetch] = {}
        # The time until which each cache is avoided; afterwards it is asked for one shard at a time.
        self._avoid_s: dict[str, float] = {}
        self._attempts: Counter[str] = Counter()  # failed ones, of each shard
        self.refused: list[str] = []
        self.arrived: set[str] = set()
        self.has_room = True

    def close(self) -> None:
        """Give up what is under way."""
        for fetch in self._fetches.values():
            self._cancel(fetch)

    def want(self, copies: Sequence[Copy], servers: Mapping[str, Any], plan: str) -> None:
        """Copy `copies` from `servers` from now on; `plan` is that of the current pass."""
        self._wanted, self._servers, self._plan = list(copies), servers, plan
        if not self._wanted:
            self._slot["state"] = FETCHING

    def run(self, until_s: float, held: Collection[str]) -> bool:
        """Copy until `until_s`, but no shards with the contents `held`; False if there is nothing to do."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._begin(held)
            if not self._fetches:
                return False
            ready, _ = self._ray.wait(list(self._fetches), num_returns=1, timeout=left_s)
            for ref in ready:
                self._take(ref)
        self._give_up_late()
        return True

    def _begin(self, held: Collection[str]) -> None:
        now_s = time.monotonic()
        while self._wanted and len(self._fetches) < _AT_ONCE:
            copy = self._wanted.pop(0)
            under_way = {fetch.copy.content for fetch in self._fetches.values()}
            asked = {fetch.holder for fetch in self._fetches.values()} & self._avoid_s.keys()
            is_here = copy.content in held or copy.content in self.arrived or copy.content in under_way
            holders = [
                one
                for one in copy.holders
                if one[0] in self._servers and one[0] not in asked and self._avoid_s.get(one[0], 0.0) < now_s
            ]
            if is_here or not holders:
                continue
            is_earlier = self._is_earlier(copy)
            if is_earlier and self._wants_nothing_of(copy):
                self.refused.append(copy.content)
                continue
            reserved = self._reserve(copy.nbytes, may_evict=not is_earlier)
            self._slot["state"] = NO_SPACE if reserved is None else FETCHING
            if reserved is None:
                self.has_room = self.has_room and not is_earlier
                self._wanted.clear()  # no space: asked again at the next report
                return
            holder, shard_id = random.choice(holders)
            until_s = now_s + _COPY_S + copy.nbytes / _COPY_BYTES_PER_S
            ref = self._servers[holder].read.remote(shard_id)
            self._fetches[ref] = _Fetch(copy, holder, reserved, until_s)

    def _is_earlier(self, copy: Copy) -> bool:
        """True for a shard of an earlier pass of this cache's share."""
        plan = PassPlan.from_json(copy.plan)
        return copy.plan != self._plan and plan.precedes(PassPlan.from_json(self._plan))

    def _wants_nothing_of(self, copy: Copy) -> bool:
        plan, current = PassPlan.from_json(copy.plan), PassPlan.from_json(self._plan)
        return self._unwanted(plan, current, copy.spans) >= set(positions_of(copy.spans).tolist())

    def _unwanted(self, plan: PassPlan, current: PassPlan, spans: Sequence[Span]) -> set[int]:
        """The positions of `spans` in the pass `plan` whose samples this cache holds, or makes in the pass
        `current`.
        """
        cached = self._cache.filling.cached_spans(PassPlan.from_json, (WHOLE,))
        positions = positions_of(spans)
        unwanted = held_elsewhere(cached, plan, positions)
        if len(twice := overlapping(cached.of(plan), spans)):
            unwanted |= [len(overlapping(twice, _at(position, spans))) > 0 for position in positions.tolist()]
        if plan.precedes(current):
            shared: SharedPass = self._link.ask("shared_pass")
            unwanted |= shared.is_making(positions_in(current, plan, positions))
        return set(positions[unwanted].tolist())

    def _reserve(self, nbytes: int, *, may_evict: bool) -> Reserved | None:
        """Reserve space for a shard before it is asked for; None if there is none now."""
        may_evict = may_evict and self._job.when_full == "evict"
        reserved: list[Reserved] | None = self._link.ask("reserve_now", (nbytes,), may_evict)
        return reserved[0] if reserved else None

    def _take(self, ref: Any) -> None:
        """Publish a shard that has arrived, or avoid the cache that did not give it."""
        fetch = self._fetches.pop(ref)
        try:
            self._publish(fetch, self._ray.get(ref, timeout=ANSWER_S))
        except CorruptShardError as error:
            self._drop(fetch, error)
            for holder, shard_id in fetch.copy.holders:
                if holder == fetch.holder and holder in self._servers:
                    self._servers[holder].check.remote(shard_id)
        except (self._ray.exceptions.RayError, CacheError) as error:
            self._drop(fetch, error)

    def _give_up_late(self) -> None:
        now_s = time.monotonic()
        for ref in [ref for ref, fetch in self._fetches.items() if now_s > fetch.until_s]:
            self._ray.cancel(ref)
            self._drop(self._fetches.pop(ref), "it takes too long")

    def _cancel(self, fetch: _Fetch) -> None:
        self._link.ask("cancel", (fetch.reserved,))

    def _drop(self, fetch: _Fetch, reason: object) -> None:
        """Give up a copy, and avoid its holder for a while; after some attempts the samples are made here."""
        sys.stderr.write(f"no shard from {fetch.holder}: {last_line(reason)}\n")
        if not isinstance(reason, CorruptShardError | FileNotFoundError):  # it may well give others
            self._avoid_s[fetch.holder] = time.monotonic() + _AVOID_S
        self._cancel(fetch)
        content = fetch.copy.content
        self._attempts[content] += 1
        if self._attempts[content] >= min(_MOST_ATTEMPTS, 1 + len(fetch.copy.holders)):
            del self._attempts[content]
            self.refused.append(content)

    def _publish(self, fetch: _Fetch, data: npt.NDArray[np.uint8]) -> None:
        """Publish the samples of a shard that this cache lacks."""
        shard = _checked(data, fetch.copy)
        shared: SharedPass = self._link.ask("shared_pass")
        text, pass_id = str(shard.fill["plan"]), shared.row.id
        plan, current = PassPlan.from_json(text), PassPlan.from_json(shared.row.plan)
        if not (plan == current or plan.precedes(current)):
            self._cancel(fetch)  # of a pass that has not begun here
            return
        if plan != current:
            pass_id = self._link.ask("earlier", self._job.fingerprint, text, shard.fill["length"])
        found = without(shard, self._unwanted(plan, current, fetch.copy.spans))
        if found is None:
            self._cancel(fetch)
            self.refused.append(fetch.copy.content)
            return
        content, spans = found
        positions = positions_in(current, plan, positions_of(spans))
        written = write_shard(self._cache.directory, fetch.reserved, encode_header(content), content)
        publication = Publication(pass_id, (written,), spans)
        self._link.ask("import", Import(publication, positions))
        self.arrived.add(fetch.copy.content)
        self._avoid_s.pop(fetch.holder, None)
        self._attempts.pop(fetch.copy.content, None)


def last_line(reason: object) -> str:
    """The last line of a message; errors of remote tasks come with their traceback."""
    return (str(reason).strip().splitlines() or [type(reason).__name__])[-1][:_LINE_CHARS]


def without(shard: ShardData, positions: Collection[int]) -> tuple[ShardContent, tuple[Span, ...]] | None:
    """The content and the spans of `shard` without the samples at `positions`.

    None if nothing is left, or if the shard does not tell which samples these are.
    """
    spans = spans_of(shard.fill["spans"])
    if not positions:
        return shard.content(), spans
    ends = np.array(shard.fill.get("ends", ()), np.int64).reshape(-1, 2)
    counts, stays = np.diff(ends[:, 1], prepend=0), ~np.isin(ends[:, 0], list(positions))
    rows = np.flatnonzero(np.repeat(stays, np.maximum(0, counts)))
    if not len(rows) or counts.min() < 0 or counts.sum() != shard.num_samples:
        return None
    spans = tuple(span for one in spans for span in _cut(one, positions))
    head = {name: value for name, value in shard.fill.items() if name != "spans"}
    head |= {"ends": np.column_stack([ends[stays, 0], np.cumsum(counts[stays])]).tolist(), "is_part": True}
    fill = head | {"spans": span_array(spans).tolist()}  # spans come last in a manifest
    return shard.take(rows, fill), spans


def _at(position: int, spans: Sequence[Span]) -> list[Span]:
    """The parts of `spans` that lie in one position."""
    start, stop = (position, 0), (position + 1, 0)
    parts = (Span(max(start, span.start), min(stop, span.stop)) for span in spans)
    return [part for part in parts if part.start < part.stop]


def _cut(span: Span, positions: Collection[int]) -> Iterator[Span]:
    """The parts of `span` between `positions`."""
    start = span.start
    for position in sorted(positions):
        if span.start[0] <= position <= span.stop[0]:
            if start < (position, 0):
                yield Span(start, (position, 0))
            start = position + 1, 0
    if start < span.stop:
        yield Span(start, span.stop)


def _checked(data: npt.NDArray[np.uint8], copy: Copy) -> ShardData:
    """The shard of a file that has come from another cache.

    Raises CorruptShardError unless all checksums match, and it is the shard that was asked for.
    """
    try:
        stop = LENGTH_BYTES + header_bytes(data[:LENGTH_BYTES].tobytes(), len(data))
        shard = ShardData(data[LENGTH_BYTES:stop].tobytes(), data)
        shard.check()
        if shard.content_hash != copy.content:
            raise ValueError("it is another shard")
    except ValueError as error:
        raise CorruptShardError(f"the shard {copy.content} came damaged: {error}") from error
    return shard
