"""Passes over the units: at the end of one the next begins for evicted samples, or filling rests."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from cachestream.errors import CacheFullError, ConfigError
from cachestream.linux import move, open_private, remove
from cachestream.listing.names import Names
from cachestream.permutation import mix_key
from cachestream.schema import WHOLE, IntArray
from cachestream.sources.mix import Interleaving
from cachestream.storage.filling import FillState, LabelNames, PlannedPass
from cachestream.storage.layout import Directory
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.reservations import Owner, disk_footprint
from cachestream.worker.cached_units import KnownOrders
from cachestream.worker.job import Job
from cachestream.worker.listings import Listings
from cachestream.worker.order import PassPlan, is_known, load_order, order_file
from cachestream.worker.planner import Planner
from cachestream.worker.user_order import draw_mixture

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

MOST_UNITS: Final = 1024
SHARES: Final = 16
_WHILE_DRAWING: Final = 32  # with a smaller part of a pass left, its order is not drawn anew
_FOLLOW: Final = 0.1  # of two mixtures: the share of the samples that come from another source

logger = logging.getLogger("cachestream.worker")

_UNIT_FAILURES: Final = ("sample", "source", "quarantined")  # failures of whole units, most of them


class DrawsOrders(Protocol):
    """Draws the units of a pass by the user's sampler or curriculum."""

    def draw(self, ordinal: int) -> IntArray: ...


def pass_is_open(state: FillState) -> bool:
    """True if something of the last pass is not done yet."""
    row = state.last_pass
    return row is not None and (not row.is_done or PassPlan.from_json(row.plan).growing)


def first_plan(job: Job, listings: Listings) -> PassPlan:
    """The plan of the first pass of a job: over all units, or over those that will be listed."""
    if job.growing and not listings.is_complete:
        return PassPlan(job.kind, job.seed, 0, 0, "", 0, job.partition, job.rule, growing=True)
    if job.growing:
        names = listings.load()
        job = replace(job, num_units=len(names), listing=names.digest)
    plan = PassPlan(job.kind, job.seed, 0, job.num_units, job.listing, None, job.partition, job.rule)
    return replace(plan, segments=job.round_ends).with_length()


def begin_or_resume(cache: Cache, job: Job, order: DrawsOrders) -> bool:
    """Resume the cache's open pass if this job would begin the same one; else begin another one.

    Another one begins if samples of another transform are to be replaced: with their units.

    Returns False if the last pass was complete and nothing was evicted since: another pass then begins only
    for units that failed.
    """
    listings = Listings(cache.directory)
    was_complete = False
    if cache.filling.state().last_pass is None:
        listings.drop()
    elif not listings.begins(job.fingerprint, job.num_units or 0, job.listing):
        listings.retire()
    plan = first_plan(job, listings)
    state = _adopt(cache, job)
    row = state.last_pass
    replaces = job.replaces and cache.filling.samples_of_others(job.transform) > 0
    if row is not None and _can_resume(
        cache, PassPlan.from_json(row.plan), plan, job, state, replaces=replaces
    ):
        if pass_is_open(state):
            return True
        was_complete = not state.has_evicted
        has_failed = plan.is_permutation and any(one.kind in _UNIT_FAILURES for one in state.failures)
        if was_complete and not has_failed:
            return False  # and nothing was lost since
    # After a pass that was complete except for failed units, only these units are read again.
    _insert_pass(cache, job, plan, order, replaces=replaces)
    return not was_complete


def has_failed_units(cache: Cache) -> bool:
    """Return whether units of the open pass, which another worker began, have failed: they are done there."""
    state = cache.filling.state()
    row = state.last_pass
    return (
        row is not None
        and pass_is_open(state)
        and PassPlan.from_json(row.plan).is_permutation
        and any(one.kind in _UNIT_FAILURES for one in state.failures)
    )


def begin_next(cache: Cache, job: Job, order: DrawsOrders, *, is_due: bool = False) -> bool:
    """Begin the next pass if the last one is over and samples were evicted, or another pass `is_due`.

    Returns False if there is nothing left to do.
    """
    # Only a supervisor begins passes, so what is read here holds until the insert.
    state = cache.filling.state()
    if pass_is_open(state):
        return True
    if state.last_pass is None:  # the catalogue was lost, and no shard is cached that records the pass
        _adopt(cache, job)
    elif not is_due and not state.has_evicted:
        return False
    _insert_pass(cache, job, first_plan(job, Listings(cache.directory)), order)
    return True


def follow_mixture(cache: Cache, job: Job, planner: Planner, mixture: Sequence[float]) -> None:
    """Draw a new order for the units not handed out yet, if loaders draw the sources in other shares."""
    plan, shares = planner.plan, np.array(mixture)
    if plan is None or plan.length is None or len(job.mix) != len(shares):
        return
    known = plan.shares or np.array(job.mix) / sum(job.mix)
    # Drawing takes about a second for a million units: not for the last few.
    start = max(planner.row.next_position, plan.again)
    if start + plan.length // _WHILE_DRAWING >= plan.length or np.abs(known - shares).sum() / 2 <= _FOLLOW:
        return
    units = load_order(cache.directory, plan).units(np.arange(plan.length))
    sources = Interleaving(job.mix).takers(units[start:])
    units[start:] = draw_mixture(units[start:], sources, mixture, seed=mix_key(job.seed, start))
    plan = replace(plan, kind="mixture", rule=f"{start}:{','.join(map(str, mixture))}")
    _save_order(cache, plan, units)
    planner.reorder(plan)
    logger.info("%d units are fetched as loaders draw: %s", len(units) - start, plan.rule)


def _can_resume(
    cache: Cache, last: PassPlan, first: PassPlan, job: Job, state: FillState, *, replaces: bool
) -> bool:
    """True if the `last` pass is the one that the job would begin with the plan `first`.

    `replaces`: samples of another transform are to be replaced, which that pass may have begun.
    """
    began_to_replace = job.replaces and state.replacing == state.transform == job.transform
    if (replaces and not began_to_replace) or (last.again and not job.replaces):
        return False
    if (last.growing and not job.growing) or not is_known(cache.directory, last):
        return False
    if last.kind == "mixture":
        last = replace(last, kind="shuffle", rule="")
    if last.growing:
        # The pass keeps growing by the listing that it began with, complete by now or not.
        count = last.num_units or 0
        if count and Listings(cache.directory).load().digest_of(count) != last.listing:
            return False
        first = replace(first, num_units=count, listing=last.listing)
    none: dict[str, Any] = {"ordinal": 0, "length": None, "segments": (), "growing": False, "again": 0}
    plain = [replace(plan, **none) for plan in (last, first)]
    return plain[0] == plain[1]


def _adopt(cache: Cache, job: Job) -> FillState:
    """Record the job's source in the cache; raises ConfigError if samples of another source are cached."""
    names = job.label_names
    labels = LabelNames(len(names), Names(names).digest)

    def is_void(state: FillState) -> bool:
        if state.source not in (None, job.fingerprint) and state.data != job.data:
            if state.num_shards:
                raise ConfigError(
                    f"the cache at {cache.path} was filled from another source ({state.source}, not "
                    f"{job.fingerprint}); use another directory, or empty this one with 'cachestream clear "
                    "CACHE'"
                )
            return True
        _check_labels(cache, state, names)
        if state.last_pass is None:
            return False
        PassPlan.from_json(state.last_pass.plan)  # here, where damage has the catalogue rebuilt
        # All samples were skipped: the cause may have been removed meanwhile.
        return not state.num_shards and not state.has_evicted

    return cache.filling.adopt(job.fingerprint, job.data, labels, is_void)


def _check_labels(cache: Cache, state: FillState, names: Sequence[str]) -> None:
    """Raise ConfigError if labels of the job mean something else than those of the cached samples."""
    known, schema = state.labels, state.schema
    if known is None or schema is None or "label" not in schema.names or not state.num_shards:
        return
    if known.count > len(names) or Names(names[: known.count]).digest != known.digest:
        raise ConfigError(
            f"{cache.path} was filled when its source had {known.count:,} label names. Now it has "
            f"{len(names):,}, and the numbers in the cache mean other names: run 'cachestream clear CACHE', "
            "or give label= a function of the path"
        )


def _insert_pass(
    cache: Cache, job: Job, plan: PassPlan, order: DrawsOrders, *, replaces: bool = False
) -> None:
    held = cache.filling.cached_spans(PassPlan.from_json, (WHOLE,))
    plan = replace(plan, ordinal=max((known.ordinal for known in held.plans.values()), default=-1) + 1)
    # The plans of passes whose samples are still cached: their orders tell which ones.
    cached = [known for key, known in held.plans.items() if key in held.spans[0] and known.is_permutation]
    _remove_orders(cache.directory, {known.ordinal for known in cached})
    Listings(cache.directory).keep_earlier(cached)
    listed = np.empty(0, np.int64)
    if replaces:
        listed = KnownOrders(job, cache).outdated(plan).units
        listed = listed if plan.num_units is None else listed[listed < plan.num_units]  # not listed yet
        plan = replace(plan, again=len(listed)).with_length()
    if plan.is_drawn:
        listed = np.concatenate([listed, order.draw(plan.ordinal)])
        plan = replace(plan, length=len(listed))
    if plan.has_file:
        _save_order(cache, plan, listed)
    # Earlier failures of units are forgotten: they would count once in each pass.
    replacing = job.transform if job.replaces else ""
    planned = PlannedPass(plan.to_json(), plan.length, plan.growing, plan.again, replacing)
    cache.filling.begin_pass(planned, _UNIT_FAILURES)


def _remove_orders(directory: Directory, kept: Collection[int]) -> None:
    """Remove the orders drawn for passes, except for those of the ordinals `kept`."""
    for name in os.listdir(directory.worker):
        found = re.match(r"order-(\d+)", name)
        if found is not None and int(found[1]) not in kept:
            remove(directory.worker_file(name))


def _save_order(cache: Cache, plan: PassPlan, drawn: IntArray) -> None:
    """Write the units that were drawn, or that come first, within the limit of the cache."""
    path = order_file(cache.directory, plan)
    owner = Owner.temporary(cache.directory, "order")
    try:
        size_bytes = disk_footprint(drawn.nbytes + 4096)
        reserved = cache.reservations.reserve(size_bytes, owner.name, spare_unused=False)
        if reserved is None:
            raise CacheFullError(
                f"no space for the list of {len(drawn)} units of the pass: "
                f"{cache.reservations.shortage(size_bytes)}"
            )
        try:
            with (
                translated_disk_errors(path, "saving the order of its units"),
                open(path + ".new", "wb", opener=open_private) as file,
            ):
                np.save(file, drawn)
                file.flush()
                os.fsync(file.fileno())
            move(path + ".new", path)
        finally:
            cache.reservations.cancel(reserved, owner.name)
    finally:
        owner.release()


def block_size(length: int | None, num_workers: int) -> int:
    """The number of units that a process gets at once: all processes are busy until the end of the pass."""
    if length is None:
        return 256
    return max(1, min(MOST_UNITS, length // (num_workers * SHARES)))
