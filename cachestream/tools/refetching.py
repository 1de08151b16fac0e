"""Refetching: the shards of recorded epochs are made again from the remote, byte for byte.

A shard's header names its pass, and the positions of its samples in the order of the pass. The units and the
random generator of each unit follow from these. So a shard comes back identical if the source and the
transform are deterministic. A shard that comes back different is rejected.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cachestream.errors import (
    CacheError,
    CacheFullError,
    ConfigError,
    SampleError,
    SchemaMismatchError,
    SourceUnavailableError,
)
from cachestream.schema import WHOLE, is_held_out, spans_of
from cachestream.shard_format import ShardContent, content_hash
from cachestream.sources.base import DivisibleSource, Source, as_incremental, has_units
from cachestream.sources.token_windows import apply_packing
from cachestream.storage.leases import Lease
from cachestream.storage.locks import lock_file
from cachestream.storage.publish import Publisher
from cachestream.storage.reservations import Owner
from cachestream.storage.shard import Content, Contents
from cachestream.storage.snapshots import sample_counts
from cachestream.storage.telemetry import private_slot
from cachestream.training.manifests import load_manifest
from cachestream.worker.cached_units import Coverage
from cachestream.worker.listings import list_all
from cachestream.worker.order import END, PassPlan, UnitOrder, is_known, load_order
from cachestream.worker.sampling.encode import Table
from cachestream.worker.sampling.packer import MIXED, Packer, counted, majority
from cachestream.worker.sampling.transformer import Transformer, to_records
from cachestream.worker.sampling.unit import Unit
from cachestream.worker.sampling.unit_reader import unit_generator

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache


_LOCK_TIMEOUT_S: Final = 1.0
_READS_AT_ONCE: Final = 16
_GIVE_UP_S: Final = 60.0  # without an answer of the remote
_PAUSE_S: Final = 2.0  # the longest between two attempts

Transform = Callable[..., Any]


@dataclass(slots=True)
class RefetchReport:
    """The numbers of shards that the manifests need (`wanted`), that were `cached`, and that were `brought`
    back.

    `failed` holds the reason for each of the others.
    """

    wanted: int = 0
    cached: int = 0
    brought: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        came = f"{self.cached} were cached, {self.brought} came back, {len(self.failed)} did not"
        return f"{self.wanted} shards: {came}"


class _NotReproducibleError(Exception):
    """A shard cannot be made again, or it differs from the recorded one; the message is the reason."""


def refetch(
    manifest: str | os.PathLike[str] | list[Content],
    cache: Cache,
    source: Source,
    *,
    transform: Transform | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RefetchReport:
    """Bring back the shards that `cache` lacks of the epochs recorded at `manifest`.

    `manifest` is a file, a folder of them, or the result of `wanted_shards`.

    `source` and `transform` must be what the worker had. Needed shards are not evicted meanwhile, others may
    be. No worker may fill the cache at the time. If a worker has filled the cache, a shard fails whose
    samples are in other shards by now, because an epoch would have them twice: refetch into an empty
    directory to replay it. Shards of weighted passes fail.

    Raises ConfigError for another source, CacheError while a worker runs, CacheFullError when the limit is
    too small, SourceUnavailableError and SourceError when the remote does not give the units.
    """
    wanted = manifest if isinstance(manifest, list) else wanted_shards(manifest)
    report = RefetchReport(wanted=len(wanted))
    lock = lock_file(cache.directory.supervisor_lock, timeout_s=_LOCK_TIMEOUT_S)
    if lock is None:
        raise CacheError(f"a worker is filling {cache.path}; stop it first ('cachestream stop {cache.path}')")
    with contextlib.ExitStack() as stack:
        stack.callback(lock.release)
        source, transform = apply_packing(source, transform)
        if (growing := as_incremental(source)) is not None:
            source = list_all(growing, cache)  # with the labels and names that a worker gives
        restorer = _Restorer(cache, source)
        stack.callback(restorer.release)
        missing = restorer.hold_cached(wanted)
        report.cached = len(wanted) - len(missing)
        maker = _Maker(cache, source, transform)
        for done, content in enumerate(missing):
            if on_progress is not None:
                on_progress(done, len(missing))
            try:
                restorer.check_not_held(content, maker)
                restorer.put(content, maker.make(content))
                report.brought += 1
            except _NotReproducibleError as error:
                report.failed.append(f"shard {content.shard_id} ({content.num_samples} samples): {error}")
    return report


def wanted_shards(manifest: str | os.PathLike[str]) -> list[Content]:
    """The shards that the epochs recorded at `manifest` need, each once.

    Raises ConfigError if there are none.
    """
    path = os.path.expanduser(manifest)
    names = [path]
    if os.path.isdir(path):
        names = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name.endswith(".json")]
    found: dict[str, Content] = {}
    for name in names:
        epoch = load_manifest(name)
        for segment in epoch.segments:
            places = [place for place in segment.record.shard_ids.tolist() if place >= 0]
            found.update((epoch.shards[place].hash, epoch.shards[place]) for place in places)
    if not found:
        raise ConfigError(f"{path} holds no manifests of epochs; EpochLoader(record=FOLDER) writes them")
    return list(found.values())


class _Restorer:
    """Publishes shards, and leases them and the needed cached ones until `release`."""

    def __init__(self, cache: Cache, source: Source) -> None:
        self._cache = cache
        self._fingerprint = source.fingerprint
        self._owner = Owner.temporary(cache.directory, "refetch")
        self._publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, self._owner.name)
        self._lease: Lease | None = None
        self._ids: list[int] = []
        self._passes: dict[str, int] = {}
        # The recorded phase: `cache.fill_state()` would take the supervisor's lock, which this process holds,
        # for a running worker. A rebuilt catalogue has no phase, but passes with ids above 0.
        state = cache.filling.state()
        is_rebuilt = state.last_pass is not None and state.last_pass.id > 0
        self._filled_by_worker = state.phase != "none" or is_rebuilt

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()
        self._owner.release()

    def hold_cached(self, wanted: list[Content]) -> list[Content]:
        """Lease the cached shards of `wanted`, and return the others."""
        found = Contents().find(self._cache.path, sample_counts(self._cache.catalogue), wanted)
        self._hold(list(found.values()))
        return [content for content in wanted if content.hash not in found]

    def check_not_held(self, content: Content, maker: _Maker) -> None:
        """Raise _NotReproducibleError if other shards of a cache that a worker filled hold some of the
        samples.

        Raises ConfigError for a cache that was filled from another source.
        """
        maker.plan_of(content)  # raises for what was listed otherwise
        parts = [int(content.fill.get("part", WHOLE))] if self._filled_by_worker else []
        held = self._cache.filling.cached_spans(PassPlan.from_json, parts)
        if held.source not in {None, self._fingerprint}:
            raise ConfigError(
                f"the cache at {self._cache.path} was filled from another source ({held.source}, not "
                f"{self._fingerprint}); refetch into another directory"
            )
        if not self._filled_by_worker:
            return
        covered = Coverage(
            {
                maker.order_of(other): held.spans[0][pass_id]
                for pass_id, other in held.plans.items()
                if pass_id in held.spans[0] and other.is_permutation and maker.has_same_units(other)
            }
        )
        for unit, first, stop in maker.parts_of(content):
            ranges = covered.of(np.array([unit], np.int64))[0]
            if any(start < stop and first < end for start, end in ranges):
                raise _NotReproducibleError(
                    "other shards hold some of its samples by now; refetch into an empty directory to replay "
                    "it"
                )

    def put(self, content: Content, made: ShardContent) -> None:
        """Publish `made`, evicting shards that are not needed."""
        fill, plan = content.fill, content.fill["plan"]
        if plan not in self._passes:
            enter = self._cache.filling.enter_earlier_pass
            self._passes[plan] = enter(self._fingerprint, plan, fill["length"])
        shard_id = self._publisher.publish(
            made, self._passes[plan], spans_of(fill["spans"]), spare_unused=False
        )
        if shard_id is None:
            shortage = self._cache.reservations.shortage(made.data_bytes)
            raise CacheFullError(
                f"no space in {self._cache.path} for another shard that the epochs need: {shortage}"
            )
        self._hold([shard_id])

    def _hold(self, shard_ids: list[int]) -> None:
        self._ids = sorted([*self._ids, *shard_ids])
        ranges = np.repeat(np.array(self._ids, np.int64)[:, None], 2, axis=1)
        before, self._lease = self._lease, self._cache.reservations.hold(ranges)
        if before is not None:
            before.release()


class _Maker:
    """Makes shards again from the remote."""

    def __init__(self, cache: Cache, source: Source, transform: Transform | None) -> None:
        self._cache = cache
        self._source = source
        self._orders: dict[PassPlan, UnitOrder] = {}
        self._divided: dict[PassPlan, Source] = {}
        self._transformer = Transformer(transform, private_slot())

    def plan_of(self, content: Content) -> PassPlan:
        """The pass of a shard.

        Raises ConfigError for another source, _NotReproducibleError where the header names no pass or the
        remote lists other units by now.
        """
        fill, source = content.fill, self._source
        if not {"source", "plan", "length", "spans"} <= fill.keys():
            raise _NotReproducibleError("it does not say where its samples came from")
        if fill["source"] != source.fingerprint:
            raise ConfigError(
                f"the epoch was trained on {fill['source']}, not on {source.fingerprint}: "
                "give that source, and as the transform its pack_tokens() if it was packed"
            )
        plan = PassPlan.from_json(fill["plan"])
        if not self.has_same_units(plan):
            raise _NotReproducibleError("the remote lists other files than when it was sampled")
        return plan

    def _source_of(self, plan: PassPlan) -> Source:
        """The source, divided into parts of units as it was in the pass."""
        source, parts = self._source, max(1, len(plan.segments))
        if not isinstance(source, DivisibleSource) or max(1, len(source.round_ends)) == parts:
            return source
        if plan not in self._divided:
            self._divided[plan] = source.divided(parts)
        return self._divided[plan]

    def has_same_units(self, plan: PassPlan) -> bool:
        """Return whether the units of a pass are those of the source, or the first of them."""
        return has_units(self._source_of(plan), plan.num_units, plan.listing)

    def order_of(self, plan: PassPlan) -> UnitOrder:
        if plan not in self._orders:
            if plan.kind == "weighted":
                raise _NotReproducibleError("its pass was weighted, and the weights are not kept")
            if not is_known(self._cache.directory, plan):
                raise _NotReproducibleError(f"what the {plan.kind} drew for its pass is not kept any more")
            self._orders[plan] = load_order(self._cache.directory, plan)
        return self._orders[plan]

    def parts_of(self, content: Content) -> Iterator[tuple[int, int, int]]:
        """The parts of units in a shard, in order: (unit, first offset, offset after the last)."""
        order = self.order_of(self.plan_of(content))
        for position, offset, last, until in content.fill["spans"]:
            stop = last + (until > 0)
            units = order.units(np.arange(position, stop, dtype=np.int64)).tolist()
            for place, unit in zip(range(position, stop), units, strict=True):
                yield unit, offset if place == position else 0, until if place == last else END

    def make(self, content: Content) -> ShardContent:
        """The shard, read again; raises _NotReproducibleError if it differs."""
        tables, packer, known = self._tables(self.plan_of(content), content), Packer(), self._cache.schema
        if known is None:  # most of the first samples decide, as for a worker
            first = list(itertools.islice(tables, MIXED))
            known = majority(counted([], [(table.schema, 1) for table in first]))
            tables = itertools.chain(first, tables)
        for table in tables:
            with contextlib.suppress(SchemaMismatchError):  # skipped then as now
                packer.add(table, known)
        if not packer.num_samples:
            raise _NotReproducibleError("the source gives none of its samples any more")
        made = packer.content(content.fill)
        if content_hash(made) != content.hash:
            raise _NotReproducibleError(
                f"it came back different ({packer.num_samples} samples): the remote has changed, or the "
                "source or the transform (give the same --transform) is not deterministic"
            )
        return made

    def _tables(self, plan: PassPlan, content: Content) -> Iterator[Table]:
        """The samples of the shard, each as a table of one row; the worker skipped the others, too."""
        for unit, offset, key, sample in self._samples(plan, content):
            if not _belongs_to(content, key):
                continue
            try:
                transformed = self._transformer.apply(plan, unit, offset, sample)
            except (Exception, SystemExit):  # noqa: BLE001,S112
                continue
            with contextlib.suppress(SampleError):
                yield from to_records(transformed, key)

    def _samples(self, plan: PassPlan, content: Content) -> Iterator[tuple[Unit, int, str, Any]]:
        """The samples of a shard as the source gives them, each with its unit and its offset there."""
        parts, read = list(self.parts_of(content)), functools.partial(_read_part, self._source_of(plan), plan)
        threads = ThreadPoolExecutor(min(_READS_AT_ONCE, len(parts)))
        try:
            for samples in threads.map(read, parts):
                yield from samples
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # after an error, what is under way ends alone


def _read_part(
    source: Source, plan: PassPlan, part: tuple[int, int, int]
) -> list[tuple[Unit, int, str, Any]]:
    """The samples from one offset of a unit up to another, read again for a minute if the remote fails.

    Raises _NotReproducibleError for a part that is damaged: it was not when it was sampled.
    """
    number, first, stop = part
    until_s = math.inf
    while True:
        try:
            samples = enumerate(source.read(number, unit_generator(plan, number)))
            wanted = itertools.islice(samples, first, None if stop == END else stop)
            return [(Unit(0, number), offset, key, sample) for offset, (key, sample) in wanted]
        except SampleError as error:
            raise _NotReproducibleError(f"the remote has changed: {error}") from error
        except SourceUnavailableError:
            if time.monotonic() >= until_s:
                raise
            until_s = min(until_s, time.monotonic() + _GIVE_UP_S)
            time.sleep(random.uniform(0.0, _PAUSE_S))


def _belongs_to(content: Content, key: str) -> bool:
    """Return whether the sample with this key was in the shard, which may hold one split alone."""
    fill = content.fill
    if "holdout" not in fill:
        return True
    return is_held_out(key.encode("utf-8", "surrogatepass"), float(fill["holdout"])) == bool(fill["held_out"])
