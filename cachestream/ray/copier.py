"""Copies of the shards of other caches: asked for, checked, and published within the limit of this cache.

Of each shard, the cache takes the units that wait for the group, and of which it holds nothing yet.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import CacheError, CorruptShardError
from cachestream.ray.group import GroupView, HeldShard, parsed
from cachestream.ray.supervision import ANSWER_S, SharedPass
from cachestream.schema import WHOLE, Span, span_array, spans_of
from cachestream.shard_format import LENGTH_BYTES, ShardContent, ShardData, encode_header, header_bytes
from cachestream.storage.cache import Cache
from cachestream.storage.filling import overlapping
from cachestream.storage.publish import Reserved, write_shard
from cachestream.storage.telemetry import FETCHING, NO_SPACE, Board
from cachestream.worker.cached_units import held_elsewhere, positions_in, positions_of
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan
from cachestream.worker.sampling.messages import Publication

_AT_ONCE: Final = 4  # copies under way
_AVOID_S: Final = 10.0  # a cache that did not give a shard is not asked
_COPY_S, _COPY_BYTES_PER_S = 15.0, 1 << 20  # a copy that is slower is given up
_MOST_ATTEMPTS: Final = 3  # to copy a shard; then its samples are made
_LINE_CHARS: Final = 200


@dataclass(slots=True)
class _Fetch:
    """A shard under way into a reservation of this cache, without the samples at `unwanted` positions."""

    shard: HeldShard
    unwanted: Collection[int]
    holder: str
    reserved: Reserved
    until_s: float


class Copier:
    """Copies shards of other caches into `cache`, several at a time.

    `has_room` is False once a shard of an earlier pass did not fit: none is evicted for those.
    """

    def __init__(self, ray: Any, job: Job, cache: Cache, link: SupervisorLink) -> None:
        self._ray, self._job, self._cache, self._link = ray, job, cache, link
        self._slot = Board(cache.directory.worker_file("board")).sharing_slot
        self._view = GroupView()
        self._wanted: list[HeldShard] = []
        self._fetches: dict[Any, _Fetch] = {}
        self._avoid_s: dict[str, float] = {}  # the time until which each cache is not asked
        self._attempts: Counter[str] = Counter()  # failed ones, of each shard
        self.has_room = True

    def close(self) -> None:
        """Give up what is under way."""
        for fetch in self._fetches.values():
            self._cancel(fetch)

    def want(self, shards: Sequence[HeldShard], view: GroupView) -> None:
        """Copy `shards` of `view` from now on, the first ones first."""
        self._wanted, self._view = list(shards), view
        if not shards:
            self._slot["state"] = FETCHING

    def run(self, until_s: float) -> bool:
        """Copy until `until_s`; False if there is nothing to do."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._begin()
            if not self._fetches:
                return False
            ready, _ = self._ray.wait(list(self._fetches), num_returns=1, timeout=left_s)
            for ref in ready:
                self._take(ref)
        self._give_up_late()
        return True

    def _begin(self) -> None:
        now_s = time.monotonic()
        while self._wanted and len(self._fetches) < _AT_ONCE:
            shard = self._wanted.pop(0)
            holders = [one for one in self._view.holders(shard) if self._avoid_s.get(one[0], 0.0) < now_s]
            if not holders or self._is_under_way(shard):
                continue
            shared: SharedPass = self._link.ask("shared_pass")
            is_wanted = self._is_wanted(shard, shared)
            if not is_wanted.any():
                self._view.refused.add(shard.content)
                continue
            is_earlier = shard.plan != shared.row.plan
            may_evict = self._job.when_full == "evict" and not is_earlier
            reserved: list[Reserved] | None = self._link.ask("reserve_now", (shard.nbytes,), may_evict)
            self._slot["state"] = FETCHING if reserved else NO_SPACE
            if not reserved:
                self.has_room = self.has_room and not is_earlier
                self._wanted.clear()  # asked again at the next report
                return
            holder, shard_id = random.choice(holders)
            ref = self._view.servers[holder].read.remote(shard_id)
            until_s = now_s + _COPY_S + shard.nbytes / _COPY_BYTES_PER_S
            unwanted = set(positions_of(shard.spans)[~is_wanted].tolist())
            self._fetches[ref] = _Fetch(shard, unwanted, holder, reserved[0], until_s)

    def _is_under_way(self, shard: HeldShard) -> bool:
        """True if samples of `shard` are being copied."""
        coming = [fetch.shard for fetch in self._fetches.values() if fetch.shard.plan == shard.plan]
        return bool(len(overlapping(span_array(span for one in coming for span in one.spans), shard.spans)))

    def _is_wanted(self, shard: HeldShard, shared: SharedPass) -> npt.NDArray[np.bool_]:
        """For each position of `shard` in its pass: True if the unit waits for the group in the current pass,
        and this cache holds nothing of these samples.
        """
        plan, current, positions = parsed(shard.plan), parsed(shared.row.plan), positions_of(shard.spans)
        if not (plan == current or plan.precedes(current)):
            return np.zeros(len(positions), np.bool_)  # of a pass that has not begun here
        is_wanted = shared.is_undecided(positions_in(current, plan, positions))
        cached = self._cache.filling.cached_spans(PassPlan.from_json, (WHOLE,))
        is_wanted &= ~held_elsewhere(cached, plan, positions)
        if len(held := overlapping(cached.of(plan), shard.spans)):
            is_wanted &= [not len(overlapping(held, _at(one, shard.spans))) for one in positions.tolist()]
        return is_wanted

    def _take(self, ref: Any) -> None:
        """Publish a shard that has arrived, or avoid the cache that did not give it."""
        fetch = self._fetches.pop(ref)
        try:
            self._publish(fetch, self._ray.get(ref, timeout=ANSWER_S))
        except CorruptShardError as error:
            self._drop(fetch, error)
            for holder, shard_id in self._view.holders(fetch.shard):
                if holder == fetch.holder:
                    self._view.servers[holder].check.remote(shard_id)
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
        content = fetch.shard.content
        self._attempts[content] += 1
        if self._attempts[content] >= min(_MOST_ATTEMPTS, 1 + len(self._view.holders(fetch.shard))):
            del self._attempts[content]
            self._view.refused.add(content)

    def _publish(self, fetch: _Fetch, data: npt.NDArray[np.uint8]) -> None:
        """Publish the samples of a shard that this cache wants; one that wants others by now asks again."""
        shard = _checked(data, fetch.shard.content)
        found = without(shard, fetch.unwanted)
        if found is None:
            self._cancel(fetch)
            self._view.refused.add(fetch.shard.content)
            return
        shared: SharedPass = self._link.ask("shared_pass")
        plan, current, pass_id = parsed(fetch.shard.plan), parsed(shared.row.plan), shared.row.id
        if plan != current:
            text, length = fetch.shard.plan, shard.fill["length"]
            pass_id = self._link.ask("earlier", self._job.fingerprint, text, length)
        content, spans = found
        positions = positions_in(current, plan, positions_of(spans))
        written = write_shard(self._cache.directory, fetch.reserved, encode_header(content), content)
        if not self._link.ask("import", Publication(pass_id, (written,), spans), positions):
            self._cancel(fetch)
        self._attempts.pop(fetch.shard.content, None)


def last_line(reason: object) -> str:
    """The last line of a message; errors of remote tasks come with their traceback."""
    return (str(reason).strip().splitlines() or [type(reason).__name__])[-1][:_LINE_CHARS]


def without(shard: ShardData, positions: Collection[int]) -> tuple[ShardContent, tuple[Span, ...]] | None:
    """The content and the spans of `shard` without the samples at `positions`.

    None if nothing is left, or if the shard does not tell which samples these are.
    """
    spans = spans_of(shard.fill["spans"])
    if not positions:
        return shard.take(np.arange(shard.num_samples), shard.fill), spans
    ends = np.array(shard.fill.get("ends", ()), np.int64).reshape(-1, 2)
    counts, stays = np.diff(ends[:, 1], prepend=0), ~np.isin(ends[:, 0], list(positions))
    rows = np.flatnonzero(np.repeat(stays, np.maximum(0, counts)))
    if not len(rows) or counts.min() < 0 or counts.sum() != shard.num_samples:
        return None
    spans = tuple(span for one in spans for span in _cut(one, positions))
    head = {name: value for name, value in shard.fill.items() if name != "spans"}
    head |= {"ends": np.column_stack([ends[stays, 0], np.cumsum(counts[stays])]).tolist()}
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


def _checked(data: npt.NDArray[np.uint8], content: str) -> ShardData:
    """The shard of a file that has come from another cache.

    Raises CorruptShardError unless all checksums match, and it is the shard that was asked for.
    """
    try:
        stop = LENGTH_BYTES + header_bytes(data[:LENGTH_BYTES].tobytes(), len(data))
        shard = ShardData(data[LENGTH_BYTES:stop].tobytes(), data)
        shard.check()
        if shard.content_hash != content:
            raise ValueError("it is another shard")
    except ValueError as error:
        raise CorruptShardError(f"the shard {content} came damaged: {error}") from error
    return shard
