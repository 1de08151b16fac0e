"""Copies of the shards of other caches: asked for, checked, and published within the limit of this cache."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import CacheError, CacheFullError, CacheLockedError, CorruptShardError
from cachestream.schema import WHOLE, Span
from cachestream.shard_format import LENGTH_BYTES, ShardContent, ShardData, header_bytes
from cachestream.storage.cache import Cache
from cachestream.storage.filling import is_open
from cachestream.storage.os_errors import DiskFailedError
from cachestream.storage.publish import CatalogueReplacedError, Publisher, UnitProgress
from cachestream.storage.reservations import Owner
from cachestream.storage.telemetry import FETCHING, NO_SPACE, Board
from cachestream.worker.cluster.directory import Copy, Range
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan
from cachestream.worker.sampling.cached_units import holds_units

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
    reserved: int
    until_s: float


class Copier:
    """Copies shards of other caches into `cache`, several at a time.

    `arrived`: the contents of those that have come, until the caller clears it. `refused`: those that this
    cache cannot have. `exchanged` counts those of other partitions.
    """

    def __init__(self, ray: Any, job: Job, cache: Cache) -> None:
        self._ray, self._job, self._cache = ray, job, cache
        self._owner = Owner.temporary(cache.directory, "copy")
        self._slot = Board(cache.directory.worker_file("board")).sharing_slot
        self._publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, self._owner.name)
        self._wanted: list[Copy] = []
        self._servers: Mapping[str, Any] = {}
        self._fetches: dict[Any, _Fetch] = {}
        self._avoid_s: dict[str, float] = {}  # a cache that is here is asked for one shard at a time
        self._attempts: Counter[str] = Counter()  # failed ones, of each shard
        self.refused: list[str] = []
        self.arrived: set[str] = set()
        self.exchanged = 0

    def close(self) -> None:
        """Give up what is under way."""
        for fetch in self._fetches.values():
            self._cancel(fetch)
        self._owner.release()

    def want(self, copies: Sequence[Copy], servers: Mapping[str, Any], making: Sequence[Range]) -> None:
        """Copy `copies` from `servers` from now on, and nothing of the positions `making`."""
        for ref in [ref for ref, fetch in self._fetches.items() if fetch.copy.touches(making)]:
            self._cancel(self._fetches.pop(ref))  # it would come for nothing
        self._wanted = [copy for copy in copies if not copy.touches(making)]
        self._servers = servers
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
            reserved = self._reserve(copy.nbytes)
            self._slot["state"] = NO_SPACE if reserved is None else FETCHING
            if reserved is None:
                self._wanted.clear()  # no space: asked again at the next report
                return
            holder, shard_id = random.choice(holders)
            until_s = now_s + _COPY_S + copy.nbytes / _COPY_BYTES_PER_S
            ref = self._servers[holder].read.remote(shard_id)
            self._fetches[ref] = _Fetch(copy, holder, reserved, until_s)

    def _reserve(self, nbytes: int) -> int | None:
        """Reserve space for a shard before it is asked for; None if there is none now."""
        reservations, may_evict = self._cache.reservations, self._job.when_full == "evict"
        try:
            return reservations.reserve(reservations.footprint(nbytes), self._owner.name, may_evict=may_evict)
        except (CacheFullError, CacheLockedError, DiskFailedError):
            return None

    def _take(self, ref: Any) -> None:
        """Publish a shard that has arrived, or avoid the cache that did not give it."""
        fetch = self._fetches.pop(ref)
        try:
            self._publish(fetch, self._ray.get(ref, timeout=ANSWER_S))
        except CatalogueReplacedError:
            raise
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
        self._cache.reservations.cancel(fetch.reserved, self._owner.name)

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
        content, spans = _checked(data, fetch.copy)
        shared, source = self._cache.filling.shared_pass(), self._job.fingerprint
        assert shared is not None
        text = str(content.fill["plan"])
        plan, is_foreign = PassPlan.from_json(text), False
        pass_id = shared.row.id
        if text != shared.row.plan:
            is_foreign = plan.partition not in (None, self._job.partition)
            if not is_foreign:  # of a pass that is over here
                self._cancel(fetch)
                return
            pass_id = self._cache.filling.enter_earlier_pass(source, text, content.fill["length"])
        if holds_units(self._cache.filling.cached_spans(PassPlan.from_json, (WHOLE,)), plan, spans):
            self._cancel(fetch)
            self.refused.append(fetch.copy.content)
            return
        progress = UnitProgress(pass_id)
        is_wanted = partial(is_open, pass_id=pass_id, spans=spans, is_shared=not is_foreign)
        shard_ids = self._publisher.publish(
            [content], spans, progress, reserved=[fetch.reserved], only_if=is_wanted
        )
        self.arrived.add(fetch.copy.content)
        self._avoid_s.pop(fetch.holder, None)
        self._attempts.pop(fetch.copy.content, None)
        self.exchanged += is_foreign and shard_ids is not None


def last_line(reason: object) -> str:
    """The last line of a message; errors of remote tasks come with their traceback."""
    return (str(reason).strip().splitlines() or [type(reason).__name__])[-1][:_LINE_CHARS]


def spans_of(values: Sequence[Sequence[int]]) -> tuple[Span, ...]:
    """The spans in the header of a shard."""
    return tuple(Span((int(a), int(b)), (int(c), int(d))) for a, b, c, d in values)


def _checked(data: npt.NDArray[np.uint8], copy: Copy) -> tuple[ShardContent, tuple[Span, ...]]:
    """The content of a shard file that has come from another cache, and its spans.

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
    return shard.content(), spans_of(shard.fill["spans"])
