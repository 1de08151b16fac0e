"""The orders of the passes whose shards are cached, and through them what need not be fetched again."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from cachestream.model import IntArray, Span
from cachestream.remote.growing import begins_with
from cachestream.remote.names import Names
from cachestream.remote.stored import StoredNames
from cachestream.sampling.coverage import AnyOrder, Coverage, Offsets, in_both, is_covered
from cachestream.sampling.job import Payload
from cachestream.sampling.listings import Listings, is_over
from cachestream.sampling.order import Order, PassPlan
from cachestream.sampling.passes import order_file
from cachestream.sampling.renamed import EarlierNames, EarlierOrder
from cachestream.split import HELD_OUT, TRAIN, WHOLE
from cachestream.storage.cache import Cache
from cachestream.storage.tables import PassRow

__all__ = ["KnownOrders", "keep_all", "skipper"]

_COVERAGE_AGE_S: Final = 10.0


class KnownOrders:
    """The orders of this pass and of those whose shards are still cached."""

    def __init__(self, payload: Payload, cache: Cache) -> None:
        self._payload = payload
        self._cache = cache
        self._orders: dict[PassPlan, Order] = {}
        self._earlier_names: dict[str, EarlierNames] = {}
        self._coverage: list[Coverage] = []
        self._load_at_s = 0.0

    def of(self, plan: PassPlan) -> Order:
        order = self._orders.get(plan)
        if order is None:
            drawn = None
            if plan.is_drawn:
                drawn = np.load(order_file(self._cache.directory, plan.ordinal), mmap_mode="r")
            weights = self._payload.weights if plan.kind == "weighted" else None
            order = self._orders[plan] = Order(plan, weights, drawn)
        return order

    def cached(self, row: PassRow, plan: PassPlan, units: IntArray) -> list[tuple[Offsets, ...]]:
        """For each of `units` what is cached of it, from earlier passes or before the catalogue was lost.

        Where samples are held out, then also what is cached of the train split, and of the other one.
        """
        now = time.monotonic()
        if plan.is_permutation and now >= self._load_at_s:
            self._coverage = self._load(row, plan)
            self._load_at_s = now + _COVERAGE_AGE_S if self._coverage else math.inf
        found = [coverage.of(units) for coverage in self._coverage]
        if len(found) < 2:
            return [(ranges,) for ranges in (found[0] if found else [()] * len(units))]
        return [(in_both(*parts), *parts) for parts in zip(*found, strict=True)]

    def _load(self, current_row: PassRow, current: PassPlan) -> list[Coverage]:
        with self._cache.catalogue.reading() as tables:
            plans = {row.id: PassPlan.from_json(row.plan) for row in tables.passes()}
            parts = (WHOLE,) if tables.holdout is None else (TRAIN, HELD_OUT)
            spans_of = [tables.spans(part) for part in parts]
        if current_row.evicted_before >= 0 and set().union(*spans_of) <= {current_row.id}:
            return []  # the first pass: nothing of it is cached but what its own progress says
        return [self._coverage_of(spans, plans, current) for spans in spans_of]

    def _coverage_of(
        self, spans: dict[int, list[Span]], plans: dict[int, PassPlan], current: PassPlan
    ) -> Coverage:
        found: dict[AnyOrder, list[Span]] = {}
        for pass_id, plan in plans.items():
            if plan.is_permutation and self._is_known(plan):
                order = self.of(plan) if self._names_same(plan, current) else self._earlier(plan)
                if order is not None:
                    found[order] = spans.get(pass_id, [])
        return Coverage(found)

    def _names_same(self, plan: PassPlan, current: PassPlan) -> bool:
        """Whether its units are those of the current pass, or the first of them."""
        same = (current.listing, current.num_units) == (plan.listing, plan.num_units)
        return same or begins_with(self._payload.source, plan.num_units, plan.listing)

    def _earlier(self, plan: PassPlan) -> EarlierOrder | None:
        """The order of a pass over an earlier listing, if its names are kept and those of this one are known."""
        names = getattr(self._payload.source, "first_names", None)
        if not isinstance(names, Names | StoredNames):
            return None
        for listing in Listings(self._cache.directory).earlier():
            if is_over(listing, plan):
                if listing.path not in self._earlier_names:
                    self._earlier_names[listing.path] = EarlierNames(listing)
                return EarlierOrder(self.of(plan), self._earlier_names[listing.path], names)
        return None

    def _is_known(self, plan: PassPlan) -> bool:
        """Whether its order is there still: files of drawn orders do not outlive the catalogue."""
        return not plan.is_drawn or os.path.exists(order_file(self._cache.directory, plan.ordinal))


def keep_all(_: int) -> bool:
    """Skip none."""
    return False


def skipper(first: int, ranges: Offsets) -> Callable[[int], bool]:
    """Which offsets of a unit are not wanted: those before `first`, and those cached."""
    if not ranges:
        return (lambda offset: offset < first) if first else keep_all
    return lambda offset: offset < first or is_covered(ranges, offset)
