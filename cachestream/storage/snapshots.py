"""Snapshots: the shards that the next epoch is drawn from, chosen in one transaction, and leased."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.errors import (
    CacheError,
    CacheVersionError,
    CorruptShardError,
    NotEnoughSamplesError,
    SchemaMismatchError,
)
from cachestream.schema import IntArray, Schema, Snapshot, Split
from cachestream.storage.eviction import Room, bytes_to_retire, choose_retiring
from cachestream.storage.filling import WAITS, FillState, fill_state, phase_now
from cachestream.storage.leases import Lease, ranges_of
from cachestream.storage.reservations import room_in
from cachestream.storage.settings import choose_split
from cachestream.storage.shard import MappedShard, shard_path
from cachestream.storage.tables import REPLACED, RETIRING
from cachestream.storage.view import ALL, View

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.catalogue import Catalogue, Revision
    from cachestream.storage.eviction import EvictionPolicy
    from cachestream.storage.leases import LeasedShards
    from cachestream.storage.tables import Tables

logger = logging.getLogger("cachestream")
_REUSE_S: Final = 10.0
_RECENT_LEASES: Final = 8  # more epochs than one loader ever has open


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A snapshot to take: of shards that cover `epoch_size` samples (None: all) of the `split`.

    Of a full cache that is being filled, the `turnover` share retires, as far as `min_samples` remain.
    `own_leases` are the paths of the caller's leases, which end with the previous epoch. `view`: the rows and
    fields of the shards.
    """

    epoch_size: int | None
    turnover: float
    min_samples: int
    own_leases: Collection[str]
    split: Split | None
    view: View = ALL


@dataclass(frozen=True, slots=True, eq=False)
class _CachedShards:
    """The cached shards, int64 arrays `[num_shards]` by ascending id.

    `sizes` are all their samples, and `counts` those of the `split` that the `view` selects. `whole` are the
    ids of these shards and of the replaced ones.
    """

    ids: IntArray
    counts: IntArray
    sizes: IntArray
    uses: IntArray
    split: Split | None
    view: View
    whole: IntArray

    @classmethod
    def of(cls, tables: Tables, split: Split | None, view: View, rows: str = "live") -> _CachedShards:
        columns = "id", "num_samples", "uses", "held_out"
        ids, sizes, uses, held_out = tables.shard_columns(*columns, view=rows)
        counts = sizes
        # A shard published since the count is for the next epoch.
        if view.selects:
            counts = np.maximum(view.counts(ids), 0)
        elif split is not None:
            counts = np.where(held_out < 0, 0, held_out if split.held_out else sizes - held_out)
        whole = np.union1d(ids, list(tables.shard_ids(REPLACED))).astype(np.int64)
        return cls(ids, counts, sizes, uses, split, view, whole)

    def ranges(self, chosen: IntArray) -> IntArray:
        """The ranges `[n, 2]` of ids (first, last) of the shards at the indices `chosen`; a replaced one in
        between, which no epoch is to hold, ends a range.
        """
        return ranges_of(self.whole, np.searchsorted(self.whole, self.ids[chosen]))

    def with_those_passed_over(self, chosen: IntArray) -> IntArray:
        """The indices `chosen`, and those of shards in which the condition selects nothing.

        These count as used, too: an unused shard would not be evicted, and no epoch will use them.
        """
        if not self.view.selects:
            return chosen
        return np.union1d(chosen, np.flatnonzero(self.view.counts(self.ids) == 0))


def select_shards(
    ids: IntArray, counts: IntArray, uses: IntArray, excluded: IntArray, epoch_size: int | None
) -> IntArray:
    """The indices of the shards for an epoch, ascending.

    All shards with samples except `excluded`; or, with a smaller `epoch_size`, the least used first and older
    before newer, until they cover it.
    """
    chosen = np.flatnonzero(~np.isin(ids, excluded) & (counts > 0))
    if epoch_size is None or int(counts[chosen].sum()) <= epoch_size:
        return chosen
    by_use = chosen[np.argsort(uses[chosen], kind="stable")]
    enough = int(np.searchsorted(np.cumsum(counts[by_use]), epoch_size)) + 1
    return np.sort(by_use[:enough])


def take_snapshot(cache: Cache, request: SnapshotRequest) -> tuple[Snapshot, Lease]:
    """Choose and lease the shards of an epoch, and count them as used."""
    split, view, reservations = request.split, request.view, cache.reservations
    count_samples(cache, split, view)  # reads new shards, which the transaction below must not
    ranking = reservations.rank(lambda room: request.turnover > 0 or room.free_bytes < 0, spare_leased=False)
    has_worker = cache.has_worker()
    with cache.catalogue.transaction() as tables:
        usage, leased = reservations.measure(), reservations.leases.live(clear=True)
        fill = fill_state(tables)
        is_filling = phase_now(fill, has_worker) == "filling"
        cached = _CachedShards.of(tables, split, view)
        if not len(cached.ids):
            raise NotEnoughSamplesError(f"the cache at {cache.path} is empty{_why_empty(fill, has_worker)}")
        policy, room = reservations.policy(tables), room_in(tables, usage)
        excluded = _retire(tables, request, cached, policy, ranking, room, leased, is_filling=is_filling)
        chosen = select_shards(cached.ids, cached.counts, cached.uses, excluded, request.epoch_size)
        if view.selects and not len(chosen):
            raise NotEnoughSamplesError(
                f"where= selects 0 of the {int(cached.sizes.sum())} samples in the cache at {cache.path}"
                f"{of_split(split)}; wait for more, or change the condition"
            )
        if split is not None and not len(chosen):
            raise NotEnoughSamplesError(
                f"of the {int(cached.sizes.sum())} samples in the cache at {cache.path}, none is of the "
                f"split '{split.name}' (holdout={split.holdout:g}); wait for more, or hold out another share"
            )
        schema = _mark_used(tables, cached, chosen)
        return _leased(cache, cached, chosen, schema)


def _why_empty(fill: FillState, has_worker: bool) -> str:
    """The end of the sentence that says that a cache is empty: what its worker does, and what to do."""
    wait = (
        "wait for samples with cache.wait(min_samples, timeout_s), or have EpochLoader(min_samples=...) wait"
    )
    if not has_worker:
        return f"; start a worker (cs.start_worker, or 'cachestream worker'), and {wait}"
    if (phase := phase_now(fill, has_worker)) == "filling":
        return f" so far, and its worker is about to fill it; {wait}"
    return f", and its filling is '{phase}': {fill.message or 'the source gave no samples'}"


def restore_snapshot(
    cache: Cache, shard_ids: IntArray, counts: IntArray, split: Split | None, view: View = ALL
) -> tuple[Snapshot, Lease, list[int]]:
    """Lease those of the shards that still exist with these sample `counts`; also return the other ids."""
    count_samples(cache, split, view, "whole")  # reads new shards, which the transaction below must not
    expected = dict(zip(shard_ids.tolist(), counts.tolist(), strict=True))
    with cache.catalogue.transaction() as tables:
        cached = _CachedShards.of(tables, split, view, "whole")
        pairs = zip(cached.ids.tolist(), cached.counts.tolist(), strict=True)
        chosen = np.flatnonzero([expected.get(shard_id) == count for shard_id, count in pairs])
        if not len(chosen):
            raise NotEnoughSamplesError(
                f"none of the {len(expected)} shards of this epoch is cached in {cache.path} any more; "
                "begin a new epoch"
            )
        schema = _mark_used(tables, cached, chosen)
        snapshot, lease = _leased(cache, cached, chosen, schema)
    return snapshot, lease, np.setdiff1d(shard_ids, cached.ids[chosen]).tolist()


def _mark_used(tables: Tables, cached: _CachedShards, chosen: IntArray) -> Schema:
    """Count the `chosen` shards as used, unless their samples are held out, and return the schema of these:
    the fields of the view, with the cache's dtypes.
    """
    if cached.split is None or not cached.split.held_out:
        tables.mark_used(cached.ranges(cached.with_those_passed_over(chosen)))
    assert tables.schema is not None
    # The shapes of these shards, and the dtypes of the cache: an epoch would have floats, and the next one,
    # of other shards, integers.
    return cached.view.fields_of(tables.schema.with_shapes(tables.shapes(cached.ranges(chosen))))


def _leased(cache: Cache, cached: _CachedShards, chosen: IntArray, schema: Schema) -> tuple[Snapshot, Lease]:
    """Lease the `chosen` shards. Requires the catalogue's write lock."""
    lease = cache.reservations.leases.create(cached.ranges(chosen))
    ids, counts = cached.ids[chosen], cached.counts[chosen]
    sizes = None if cached.counts is cached.sizes else cached.sizes[chosen]
    found = Snapshot(cache.cache_id, cache.path, lease.path, schema, ids, counts, cached.split, sizes)
    return cached.view.apply(found), lease


# --- turnover


def _retire(
    tables: Tables,
    request: SnapshotRequest,
    cached: _CachedShards,
    policy: EvictionPolicy,
    ranking: list[int],
    room: Room,
    leased: LeasedShards,
    *,
    is_filling: bool,
) -> IntArray:
    """Choose the shards that retire, and return their ids: the next epoch leaves them out.

    They are the surplus over a limit that was lowered, which otherwise each epoch would hold again, and the
    `turnover` share of a full cache while a worker fills it. Fewer of both retire where the epoch would have
    less than `min_samples`. Those that are retiring already come first, and are live again where they are not
    needed any more; so all trainers leave out the same shards. Shards that other epochs hold come last: they
    may be held for long. The leases of the caller end soon and do not count.

    An epoch without turnover, or of samples that are held out of training, has all shards and retires none.
    """
    # Under "none" a lower limit evicts, but not a disk that other programs fill.
    limit_bytes = tables.settings.size_limit if policy == "none" else room.limit_bytes
    need_bytes = max(0, room.used_bytes - limit_bytes)
    turns_over = request.turnover and (request.split is None or not request.split.held_out)
    if not need_bytes and not turns_over:
        return np.empty(0, np.int64)
    ids, sizes, uses = _in_order_of_eviction(tables, "lru" if policy == "none" else policy, ranking)
    if turns_over and is_filling and policy != "none":
        largest_bytes = int(sizes.max(initial=0))
        share_bytes = bytes_to_retire(room, request.turnover, _remaining_bytes(tables), largest_bytes)
        need_bytes = max(need_bytes, share_bytes)
    is_live = ~np.isin(ids, list(tables.shard_ids(RETIRING)))
    if need_bytes and _has_waited(tables):
        # The filling will soon have replaced what it may replace now, which is in its way no longer then.
        going = sizes[~is_live & (leased.holders(ids) == 0)]
        need_bytes += min(need_bytes, int(going.sum()))
    counts = cached.counts[np.searchsorted(cached.ids, ids)]
    order = np.lexsort([is_live, leased.holders(ids, request.own_leases)])
    kept_samples = int(cached.counts.sum() - counts.sum())
    ids, sizes, uses, counts = (column[order] for column in (ids, sizes, uses, counts))
    retiring = choose_retiring(ids, sizes, uses, counts, need_bytes, request.min_samples, kept_samples)
    tables.keep_retiring()
    tables.retire(retiring.tolist())
    return retiring


def _in_order_of_eviction(tables: Tables, policy: EvictionPolicy, ranking: list[int]) -> list[IntArray]:
    """The ids, bytes and uses of the shards that may be evicted, int64 `[n]` each."""
    columns = tables.shard_columns("id", "size_bytes", "uses", policy="fifo" if callable(policy) else policy)
    if callable(policy):
        place = {shard_id: index for index, shard_id in enumerate(columns[0].tolist())}
        order = np.array([place[shard_id] for shard_id in ranking if shard_id in place], np.int64)
        return [column[order] for column in columns]
    goes = ~np.isin(columns[0], list(tables.held_out_shards()))
    return [column[goes] for column in columns]


def _has_waited(tables: Tables) -> bool:
    """Return True if the filling has waited for an epoch since the last snapshot; note that one has come."""
    waits, before = int(tables.meta("epoch_waits", 0)), int(tables.meta("epoch_waits_seen", 0))
    tables.set_meta("epoch_waits_seen", waits)
    return waits > before or tables.meta("fill_message") == WAITS


def _remaining_bytes(tables: Tables) -> float:
    """The bytes that the rest of the remote will take in the cache; inf if that is not known, or if shards of
    this pass or an earlier one have been evicted since.
    """
    row = tables.last_pass()
    if row is None or row.length == 0:
        return 0.0
    lost = len(tables.passes()) > 1 or int(tables.meta("evicted_shards", 0)) > row.evicted_before
    if lost or row.length is None or not row.positions_done:
        return math.inf
    return tables.totals()[2] * (row.length - row.positions_done) / row.positions_done


# --- what is held out


def count_held_out(cache: Cache, split: Split, rows: str = "live") -> None:
    """Count the held-out samples of shards made before the cache held any out, by reading them once.

    `rows`: the view of the catalogue with these shards.
    """
    choose_split(cache, split.name, split.holdout)  # the cache may have been cleared meanwhile
    with cache.catalogue.reading() as tables:
        ids, held_out = tables.shard_columns("id", "held_out", view=rows)
    counts: dict[int, int] = {}
    for shard_id in ids[held_out < 0].tolist():
        try:
            shard = MappedShard(shard_path(cache.path, shard_id))
            counts[shard_id] = len(Split("held-out", split.holdout).rows(shard.key_hashes()))
        except CorruptShardError as error:  # quarantining a shard evicted meanwhile does nothing
            cache.quarantine(shard_id, str(error))
    if counts:
        with cache.catalogue.transaction() as tables:
            statement = "UPDATE shards SET held_out = ? WHERE id = ? AND held_out IS NULL"
            tables.executemany(statement, [(count, shard_id) for shard_id, count in counts.items()])


def count_samples(cache: Cache, split: Split | None, view: View = ALL, rows: str = "live") -> int:
    """Count the samples of `split` (None: all) that `view` selects in the shards of the catalogue's view
    `rows`, each shard once, and return the number of those that are live.
    """
    if view.selects:
        if split is not None:
            choose_split(cache, split.name, split.holdout)  # the cache may have been cleared meanwhile
        return view.evaluate(cache, split, rows)
    if split is None:
        return cache.num_samples
    count_held_out(cache, split, rows)
    with cache.catalogue.reading() as tables:
        held_out = tables.held_out()[0]
        return held_out if split.held_out else tables.totals()[1] - held_out


def weigh_shards(cache: Cache, weights: Mapping[int, float]) -> None:
    """Record the mean weights of shards by id, if the cache evicts by them."""
    if cache.eviction != "least-weight":
        return
    with cache.catalogue.reading() as tables:
        known = dict(tables.execute("SELECT id, weight FROM live").fetchall())
    changed = {shard_id: weight for shard_id, weight in weights.items() if known.get(shard_id) != weight}
    if changed:  # otherwise no commit: it would keep the snapshot from being reused
        with cache.catalogue.transaction() as tables:
            pairs = [(weight, shard_id) for shard_id, weight in changed.items()]
            tables.executemany("UPDATE shards SET weight = ? WHERE id = ?", pairs)


def of_split(split: Split | None) -> str:
    """The words for `split` in a message."""
    return "" if split is None else f" of the split '{split.name}'"


def sample_counts(catalogue: Catalogue) -> dict[int, int]:
    """The number of samples of each cached shard, by its id."""
    with catalogue.reading() as tables:
        ids, counts = tables.shard_columns("id", "num_samples")
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def shard_uses(catalogue: Catalogue) -> tuple[IntArray, IntArray, IntArray]:
    """The ids of the cached shards, their samples, and the epochs that used each, int64 `[n]` each."""
    with catalogue.reading() as tables:
        ids, counts, uses = tables.shard_columns("id", "num_samples", "uses")
    return ids, counts, uses


@dataclass(slots=True)
class _LastSnapshot:
    """The last snapshot, with a lease of its own.

    `revision`: the state of the catalogue in which the snapshot may be reused until `until_s`; None if it
    does not hold all shards. `uncounted`: the reuses that the catalogue does not know of yet.
    """

    snapshot: Snapshot
    lease: Lease
    revision: Revision | None
    until_s: float
    uncounted: int = 0


class ReusableSnapshots:
    """The snapshots of one reader: the last one is reused while nothing changes. Used by one thread.

    Epochs of a few milliseconds are shorter than the time to make a lease, which is a file, a lock, and a
    transaction. A snapshot is therefore reused for ten seconds while no worker runs
    and nothing was committed: a new one would hold the same shards. Its reuses are counted together, at the
    next snapshot or by `settle`. A process that is killed loses the uses of some seconds, but not their
    order: all shards were used alike.

    The last one is also used again if no new one can be taken, as on a full disk or a locked catalogue.
    """

    def __init__(
        self,
        cache: Cache,
        clock: Callable[[], float] = time.monotonic,
        split: Split | None = None,
        view: View = ALL,
    ) -> None:
        self._cache = cache
        self._split = split
        self._view = view
        self._clock = clock
        self._last: _LastSnapshot | None = None
        self._warned = False  # that the last snapshot is used again
        self._recent_leases: list[str] = []  # paths of the leases of the last epochs

    def take(self, epoch_size: int | None, turnover: float, min_samples: int = 0) -> tuple[Snapshot, Lease]:
        """As `Cache.take_snapshot`."""
        try:
            return self._take(epoch_size, turnover, min_samples)
        except (SchemaMismatchError, CacheVersionError):
            raise
        except CacheError as error:
            if (last := self._last) is None or (lease := last.lease.again()) is None:
                raise
            if not self._warned:
                logger.warning(
                    "%s: no new snapshot can be taken (%s); until one can, epochs are drawn from the last "
                    "one",
                    *(self._cache.path, str(error)),  # not the error, whose frames hold maps
                )
                self._warned = True
            return last.snapshot, lease

    def close(self) -> None:
        """Release the snapshot, and enforce the cache's limit."""
        self.settle()
        if os.path.exists(self._cache.catalogue.path):
            self._enforce_limit()

    def settle(self) -> None:
        """Count the uses that are not yet counted, and release the snapshot."""
        last, self._last = self._last, None
        if last is not None:
            last.lease.release()
            self._count_uses(last)

    def _take(self, epoch_size: int | None, turnover: float, min_samples: int) -> tuple[Snapshot, Lease]:
        cache, last = self._cache, self._last
        is_reusable = epoch_size is None and not cache.has_worker()
        if last is not None:
            if is_reusable and (lease := self._reuse(last)) is not None:
                return last.snapshot, lease
            last.revision = None
            self._count_uses(last)
        if is_reusable:
            self._enforce_limit()  # the shards of the epoch before last may be evicted now
        before = cache.catalogue.revision()
        snapshot, lease = cache.take_snapshot(
            epoch_size, turnover, min_samples, self._recent_leases, self._split, self._view
        )
        self._recent_leases = [*self._recent_leases[1 - _RECENT_LEASES :], lease.path]
        revision = None
        # What the snapshot leaves out will be evicted soon.
        if is_reusable and snapshot.num_shards == cache.num_shards:
            now = cache.catalogue.revision()
            revision = now if now == before.after_one() else None
        mine, until_s = lease.again(), self._clock() + _REUSE_S
        self._last = None if mine is None else _LastSnapshot(snapshot, mine, revision, until_s)
        self._warned = False
        if last is not None:
            last.lease.release()
        return snapshot, lease

    def _reuse(self, last: _LastSnapshot) -> Lease | None:
        """Another lease on the `last` snapshot, if a new one would be the same."""
        if self._clock() > last.until_s or self._cache.catalogue.revision() != last.revision:
            return None
        lease = last.lease.again()
        last.uncounted += lease is not None
        return lease

    def _count_uses(self, last: _LastSnapshot) -> None:
        times = last.uncounted
        trains = self._split is None or not self._split.held_out
        # A cache that was removed gets no new catalogue.
        if trains and times and os.path.exists(self._cache.catalogue.path):
            ids = last.snapshot.shard_ids
            with self._cache.catalogue.transaction() as tables:
                tables.mark_used(ranges_of(ids, np.arange(len(ids))), times)
        last.uncounted = 0

    def _enforce_limit(self) -> None:
        """Enforce the limit where no worker does. An error is ignored: the next snapshot tries again."""
        if not self._cache.has_worker():
            with suppress(CacheError):
                self._cache.enforce_limit()
