"""Samples that are cached from earlier passes and listings, which need not be fetched again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.listing.names import Names, StoredNames
from cachestream.schema import IntArray, Span
from cachestream.worker.job import Job
from cachestream.worker.listings import Listings, lists_units_of
from cachestream.worker.order import END, Offsets, PassPlan, UnitOrder, is_known, is_whole, load_order
from cachestream.worker.outdated import Outdated, pieces_of

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.storage.filling import CachedSpans


class FoundNames:
    """Names of a listing, and their places; takes 16 bytes of memory for each name once one is looked for."""

    def __init__(self, names: Names) -> None:
        self.names = names

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.uint64], IntArray]:
        """The hashes of the names, ascending, and the places of these."""
        hashes = np.fromiter(map(_hash, self.names), np.uint64, len(self.names))
        places = np.argsort(hashes, kind="stable")
        return hashes[places], places

    def places(self, names: list[str]) -> IntArray:
        """The place of each of `names`; -1 for a name that is missing, or is there more than once."""
        known, places = self._index
        hashes = np.fromiter(map(_hash, names), np.uint64, len(names))
        first, after = (np.searchsorted(known, hashes, side) for side in ("left", "right"))
        found = np.full(len(names), -1, np.int64)
        for index in np.flatnonzero(after - first == 1).tolist():
            place = int(places[first[index]])
            if self.names[place] == names[index]:
                found[index] = place
        return found


class EarlierOrder:
    """The order of a pass over the listing `earlier`, for the units of the listing `current`."""

    def __init__(self, order: UnitOrder, earlier: FoundNames, current: FoundNames) -> None:
        self._order, self._earlier, self._current = order, earlier, current

    def positions(self, units: IntArray) -> IntArray:
        """The positions of `units` in that pass; -1 for units that were not part of it."""
        names = [self._current.names[unit] for unit in units.tolist()]
        return self._order.positions(self._earlier.places(names))

    def units(self, positions: IntArray) -> IntArray:
        """The units at `positions` of that pass; -1 for those that the listing has not."""
        names = [self._earlier.names[unit] for unit in self._order.units(positions).tolist()]
        return self._current.places(names)


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

    def add(self, units: IntArray, found: Held) -> None:
        positions = self._order.positions(units)
        if len(self._starts):
            index = np.searchsorted(self._starts, positions, side="right") - 1
            found.whole[(index >= 0) & (positions < self._stops[np.maximum(index, 0)])] = True
        for place in np.flatnonzero(np.isin(positions, list(self._partial))).tolist():
            found.ranges.setdefault(place, []).extend(self._partial[int(positions[place])])


@dataclass(frozen=True, slots=True)
class Held:
    """The samples that shards hold of some units: of which of them all, and of others which `ranges`."""

    whole: npt.NDArray[np.bool_]
    ranges: dict[int, list[tuple[int, int]]]

    def __getitem__(self, place: int) -> Offsets:
        """The ranges [start, stop) of offsets of samples, of the unit at `place`."""
        return ((0, END),) if self.whole[place] else tuple(self.ranges.get(place, ()))


class Coverage:
    """The samples of units that the cache holds, from any pass."""

    def __init__(self, passes: Mapping[UnitOrder, IntArray] | Mapping[AnyOrder, IntArray]) -> None:
        self._passes = [_PassCoverage(order, spans) for order, spans in passes.items()]

    def of(self, units: IntArray) -> Held:
        found = Held(np.zeros(len(units), np.bool_), {})
        for covered in self._passes:
            covered.add(units, found)
        for place, ranges in found.ranges.items():
            found.whole[place] |= is_whole(ranges)
        return found


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
    # Of a pass with a file of units, this says not which ones: it may hold any.
    if any(
        one.has_file or not one.is_permutation or (one.num_units, one.listing) != units_of for one in others
    ):
        return np.ones(len(positions), np.bool_)
    found = Coverage({UnitOrder(one): held for one, held in others.items()})
    held = found.of(UnitOrder(plan).units(positions))
    return held.whole | np.isin(np.arange(len(positions)), list(held.ranges))


class KnownOrders:
    """The orders of the current pass and of passes whose shards are still cached."""

    def __init__(self, job: Job, cache: Cache) -> None:
        self._job, self._cache = job, cache
        self._listings = Listings(cache.directory)
        self._orders: dict[PassPlan, UnitOrder] = {}
        self._earlier_names: dict[str, FoundNames] = {}

    def of(self, plan: PassPlan) -> UnitOrder:
        order = self._orders.get(plan)
        if order is None:
            if not plan.is_permutation:  # no other order is asked for beside it
                self._orders.clear()
            order = self._orders[plan] = load_order(self._cache.directory, plan, self._job.weights)
        return order

    def held(self, current: PassPlan, units: IntArray) -> list[Held]:
        """The samples that are cached of `units`; where samples are held out, of each of the two splits.

        A pass that draws units again and again asks for none.
        """
        if not current.is_permutation:
            return [Coverage({}).of(units)]
        identity = self._job.transform if self._job.replaces else ""
        held = self._cache.filling.cached_spans(PassPlan.from_json, identity=identity)
        self._keep({current, *held.plans.values()})
        orders = self._orders_of(held.plans, current)
        return [
            Coverage({orders[pass_id]: one for pass_id, one in spans.items() if pass_id in orders}).of(units)
            for spans in held.spans
        ]

    def outdated(self, current: PassPlan) -> Outdated:
        """The shards that other transforms have made, of which the pass `current` reads the units anew."""
        shards = self._cache.filling.outdated(self._job.transform)
        plans = self._cache.filling.cached_spans(PassPlan.from_json, ()).plans if shards else {}
        orders, found = self._orders_of(plans, current), [np.empty((0, 4), np.int64)]
        for pass_id in dict.fromkeys(shard.pass_id for shard in shards):
            own = [shard for shard in shards if shard.pass_id == pass_id and len(shard.spans)]
            if pass_id not in orders or not own:
                continue
            pieces = [pieces_of(shard.spans) for shard in own]
            ids = np.repeat([shard.id for shard in own], list(map(len, pieces)))
            table = np.column_stack([np.concatenate(pieces), ids])
            table[:, 0] = orders[pass_id].units(table[:, 0])
            if current.partition is not None:
                table[current.partition.places(table[:, 0]) < 0, 0] = -1
            found.append(table)
        pieces_by_id = np.concatenate(found)
        pieces_by_id = pieces_by_id[np.argsort(pieces_by_id[:, 3], kind="stable")]
        return Outdated({shard.id: shard for shard in shards}, pieces_by_id)

    def _keep(self, known: set[PassPlan]) -> None:
        """Forget orders and listings of which nothing is cached any more."""
        self._orders = {plan: order for plan, order in self._orders.items() if plan in known}
        listings = {listing.path for listing in self._listings.earlier()}
        self._earlier_names = {path: names for path, names in self._earlier_names.items() if path in listings}

    def _orders_of(self, plans: Mapping[int, PassPlan], current: PassPlan) -> dict[int, AnyOrder]:
        """The orders of the passes that tell which units they hold, by the numbers of the current pass."""
        found: dict[int, AnyOrder] = {}
        names = self._names()
        listed = None if names is None else FoundNames(names)
        for pass_id, plan in plans.items():
            if plan.is_permutation and is_known(self._cache.directory, plan):
                is_same = self._has_same_units(plan, current, names)
                order = self.of(plan) if is_same else self._earlier(plan, listed)
                if order is not None:
                    found[pass_id] = order
        return found

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

    def _earlier(self, plan: PassPlan, listed: FoundNames | None) -> EarlierOrder | None:
        """The order of a pass over an earlier listing; None unless the names of both listings are known."""
        if listed is None:
            return None
        for listing in self._listings.earlier():
            if lists_units_of(listing, plan):
                earlier = self._earlier_names.setdefault(listing.path, FoundNames(listing))
                return EarlierOrder(self.of(plan), earlier, listed)
        return None
