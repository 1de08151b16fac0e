"""Samples that are cached from earlier passes and listings, which need not be fetched again."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.listing.names import Names, StoredNames
from cachestream.schema import IntArray, Span
from cachestream.storage.progress import PassRow
from cachestream.worker.job import Job
from cachestream.worker.listings import Listings, lists_units_of
from cachestream.worker.order import END, Offsets, PassPlan, UnitOrder, intersection, is_known, order_file

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.filling import CachedSpans


class EarlierNames:
    """The places of names in an earlier listing; takes 16 bytes of memory for each of its names."""

    def __init__(self, names: Names) -> None:
        self._names = names
        hashes = np.fromiter(map(_hash, names), np.uint64, len(names))
        self._places = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._places]

    def places(self, names: list[str]) -> IntArray:
        """The place of each of `names`; -1 for a name that is missing, or is there more than once."""
        hashes = np.fromiter(map(_hash, names), np.uint64, len(names))
        first, after = (np.searchsorted(self._hashes, hashes, side) for side in ("left", "right"))
        found = np.full(len(names), -1, np.int64)
        for index in np.flatnonzero(after - first == 1).tolist():
            place = int(self._places[first[index]])
            if self._names[place] == names[index]:
                found[index] = place
        return found


class EarlierOrder:
    """The order of a pass over an earlier listing, for the units of the listing `names`."""

    def __init__(self, order: UnitOrder, earlier: EarlierNames, names: Names) -> None:
        self._order, self._earlier, self._names = order, earlier, names

    def positions(self, units: IntArray) -> IntArray:
        """The positions of `units` in that pass; -1 for units that were not part of it."""
        return self._order.positions(self._earlier.places([self._names[unit] for unit in units.tolist()]))


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(name))


AnyOrder = UnitOrder | EarlierOrder


def merge_spans(spans: IntArray) -> IntArray:
    """Sort `spans`, int64 `[n, 4]` as `span_array`, and join those that touch or overlap."""
    if not len(spans):
        return spans
    places, ranks = np.unique(spans.reshape(-1, 2), axis=0, return_inverse=True)
    starts, stops = ranks.reshape(-1, 2).T
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(stops[order])
    firsts = np.flatnonzero(np.append(True, starts[1:] > reached[:-1]))
    lasts = np.append(firsts[1:], len(spans)) - 1
    return np.hstack([places[starts[firsts]], places[reached[lasts]]])


class _PassCoverage:
    """The spans of one pass, looked up by position."""

    def __init__(self, order: AnyOrder, spans: IntArray) -> None:
        self._order = order
        merged = merge_spans(spans)
        # Ranges of positions that are covered from their first sample to their last.
        self._starts, self._stops = merged[:, 0] + (merged[:, 1] > 0), merged[:, 2]
        self._partial: dict[int, list[tuple[int, int]]] = {}
        for first, offset, last, until in merged[(merged[:, 1] > 0) | (merged[:, 3] > 0)].tolist():
            if offset:
                self._partial.setdefault(first, []).append((offset, until if first == last else END))
            if until and (first != last or not offset):
                self._partial.setdefault(last, []).append((0, until))

    def add(self, units: IntArray, found: list[list[tuple[int, int]]]) -> None:
        positions = self._order.positions(units)
        index = np.searchsorted(self._starts, positions, side="right") - 1
        whole = (
            (index >= 0) & (positions < self._stops[np.maximum(index, 0)])
            if len(self._starts)
            else index >= 0
        )
        for i, position in enumerate(positions.tolist()):
            if whole[i]:
                found[i].append((0, END))
            found[i].extend(self._partial.get(position, ()))


class Coverage:
    """The samples of each unit that the cache holds, from any pass."""

    def __init__(self, passes: Mapping[UnitOrder, IntArray] | Mapping[AnyOrder, IntArray]) -> None:
        self._passes = [_PassCoverage(order, spans) for order, spans in passes.items()]

    def of(self, units: IntArray) -> list[Offsets]:
        """For each unit, the ranges [start, stop) of sample offsets that are cached."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(len(units))]
        for covered in self._passes:
            covered.add(units, found)
        return [tuple(ranges) for ranges in found]


def positions_of(spans: Sequence[Span]) -> IntArray:
    """The positions in which `spans` lie."""
    return np.concatenate([np.arange(span.start[0], span.stop[0] + (span.stop[1] > 0)) for span in spans])


def positions_in(current: PassPlan, plan: PassPlan, positions: IntArray) -> IntArray:
    """The positions in the pass `current` of the units at `positions` of the pass `plan`.

    Both have named orders that are permutations of the same units.
    """
    return positions if plan == current else UnitOrder(current).positions(UnitOrder(plan).units(positions))


def held_elsewhere(
    cached: CachedSpans[PassPlan], plan: PassPlan, positions: IntArray
) -> npt.NDArray[np.bool_]:
    """For each of `positions` of the pass `plan`: True if shards of other passes hold samples of its unit, or
    may hold them.
    """
    others = {
        other: cached.spans[0][pass_id]
        for pass_id, other in cached.plans.items()
        if other != plan and pass_id in cached.spans[0]
    }
    if not others:
        return np.zeros(len(positions), np.bool_)
    units_of = plan.num_units, plan.listing
    if any(
        one.is_drawn or not one.is_permutation or (one.num_units, one.listing) != units_of for one in others
    ):
        return np.ones(len(positions), np.bool_)
    found = Coverage({UnitOrder(one): held for one, held in others.items()})
    return np.array([bool(ranges) for ranges in found.of(UnitOrder(plan).units(positions))], np.bool_)


_COVERAGE_AGE_S: Final = 10.0  # at least, between two looks at what is cached
_MOST_SHARE: Final = 0.05  # of the supervisor's time that these looks may take


class KnownOrders:
    """The orders of the current pass and of passes whose shards are still cached.

    What is cached is looked at once in a while: what is evicted meanwhile counts as cached until the next
    look, and comes again in a later pass.
    """

    def __init__(self, job: Job, cache: Cache) -> None:
        self._job, self._cache = job, cache
        self._is_shared = job.cluster is not None and bool(job.cluster.group)  # copies come besides
        self._listings = Listings(cache.directory)
        self._orders: dict[PassPlan, UnitOrder] = {}
        self._earlier_names: dict[str, EarlierNames] = {}
        self._coverage: list[Coverage] = []
        self._load_at_s = 0.0

    def of(self, plan: PassPlan) -> UnitOrder:
        order = self._orders.get(plan)
        if order is None:
            if not plan.is_permutation:  # no other order is asked for beside it
                self._orders.clear()
            drawn = None
            if plan.is_drawn:
                drawn = np.load(order_file(self._cache.directory, plan), mmap_mode="r")
            weights = self._job.weights if plan.kind == "weighted" else None
            order = self._orders[plan] = UnitOrder(plan, weights, drawn)
        return order

    def look_again(self) -> None:
        """Look for cached samples again at the next call of `cached`: others have come."""
        self._load_at_s = 0.0

    def cached(self, row: PassRow, plan: PassPlan, units: IntArray) -> list[tuple[Offsets, ...]]:
        """For each of `units`, the ranges of its offsets that are cached.

        Where samples are held out, the ranges of the train split and of the held-out split follow.
        """
        now_s = time.monotonic()
        if plan.is_permutation and now_s >= self._load_at_s:
            self._coverage = self._load(row, plan)
            age_s = max(_COVERAGE_AGE_S, (time.monotonic() - now_s) / _MOST_SHARE)
            self._load_at_s = now_s + age_s if self._coverage else math.inf
        found = [coverage.of(units) for coverage in self._coverage]
        if len(found) < 2:
            return [(ranges,) for ranges in (found[0] if found else [()] * len(units))]
        return [(intersection(*parts), *parts) for parts in zip(*found, strict=True)]

    def _load(self, current_row: PassRow, current: PassPlan) -> list[Coverage]:
        held = self._cache.filling.cached_spans(PassPlan.from_json)
        is_first = current_row.evicted_before >= 0 and set().union(*held.spans) <= {current_row.id}
        if is_first and not self._is_shared:
            return []  # nothing of it is cached but what its own progress says
        known = {current, *held.plans.values()}
        self._orders = {plan: order for plan, order in self._orders.items() if plan in known}
        listings = {listing.path for listing in self._listings.earlier()}
        self._earlier_names = {path: names for path, names in self._earlier_names.items() if path in listings}
        return [self._coverage_of(spans, held.plans, current) for spans in held.spans]

    def _coverage_of(
        self, spans: dict[int, IntArray], plans: dict[int, PassPlan], current: PassPlan
    ) -> Coverage:
        found: dict[AnyOrder, IntArray] = {}
        names = self._names()
        for pass_id, plan in plans.items():
            if pass_id in spans and plan.is_permutation and is_known(self._cache.directory, plan):
                is_same = self._has_same_units(plan, current, names)
                order = self.of(plan) if is_same else self._earlier(plan, names)
                if order is not None:
                    found[order] = spans[pass_id]
        return Coverage(found)

    def _names(self) -> StoredNames | None:
        """The names of the units; None if they have none, or none are stored."""
        job = self._job
        if not self._listings.begins(job.fingerprint, job.num_units or 0, job.listing):
            return None
        return self._listings.load()

    def _has_same_units(self, plan: PassPlan, current: PassPlan, names: StoredNames | None) -> bool:
        """True if the units of `plan` are those of the current pass, or the first of them."""
        job, units = self._job, (plan.num_units, plan.listing)
        if units in ((current.num_units, current.listing), (job.num_units, job.listing)):
            return True
        return names is not None and bool(plan.num_units) and lists_units_of(names, plan)

    def _earlier(self, plan: PassPlan, names: StoredNames | None) -> EarlierOrder | None:
        """The order of a pass over an earlier listing; None unless the names of both listings are known."""
        if names is None:
            return None
        for listing in self._listings.earlier():
            if lists_units_of(listing, plan):
                if listing.path not in self._earlier_names:
                    self._earlier_names[listing.path] = EarlierNames(listing)
                return EarlierOrder(self.of(plan), self._earlier_names[listing.path], names)
        return None
