"""The next pass: resume the open one, begin another for evicted samples, or rest."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from cachestream.errors import CacheFullError, ConfigError
from cachestream.linux import move, open_private, remove
from cachestream.listing.names import Names
from cachestream.schema import IntArray, Schema
from cachestream.storage.cache import Cache
from cachestream.storage.layout import Directory
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.reservations import Owner, disk_footprint
from cachestream.storage.tables import PassRow, Tables
from cachestream.worker.job import Job
from cachestream.worker.order import PassPlan
from cachestream.worker.stored_listings import Listings

Draw = Callable[[int], IntArray]

_OF_UNITS: Final = ("sample", "source", "quarantined")  # failures of whole units, most of them


def pass_is_open(tables: Tables, row: PassRow) -> bool:
    """Whether something of the pass is not done yet."""
    if row.length is None or row.next_position < row.length or PassPlan.from_json(row.plan).growing:
        return True
    return bool(tables.claims(row.id))


def first_plan(job: Job, listings: Listings) -> PassPlan:
    """The plan of the first pass of a job: over all units, or over those that will be listed."""
    if job.growing:
        if listings.is_complete:
            names = listings.load()
            job = replace(job, num_units=len(names), listing=names.digest)
        else:
            return PassPlan(job.kind, job.seed, 0, 0, "", 0, job.partition, job.rule, growing=True)
    plan = PassPlan(job.kind, job.seed, 0, job.num_units, job.listing, None, job.partition, job.rule)
    if job.rounds > 1 and job.num_units is not None:
        size = job.num_units // job.rounds
        plan = replace(plan, segments=tuple(range(size, job.num_units + 1, size)))
    return replace(plan, length=plan.share)


def parts_of_last_pass(cache: Cache, fingerprint: str) -> int | None:
    """The parts that the last pass over a source read each unit in; None where there was none."""
    with cache.catalogue.reading() as tables:
        rows = tables.passes() if tables.meta("source") == fingerprint else []
    return max(1, len(PassPlan.from_json(rows[-1].plan).segments)) if rows else None


def begin(cache: Cache, job: Job, draw: Draw) -> bool:
    """Resume the cache's open pass if it is of this job's order, else begin one; False if the last one was complete.

    After one that was complete there is another if units failed: they are tried again.
    `draw(ordinal)` gives what the user's sampler or curriculum draws for a pass.
    """
    listings = Listings(cache.directory)
    was_complete = False
    listings.forget_secrets()
    with cache.catalogue.reading() as tables:
        was_cleared = not tables.passes()
    if was_cleared:
        listings.drop()
    elif not listings.is_of(job):
        listings.retire()
    plan = first_plan(job, listings)
    with cache.catalogue.transaction() as tables:
        _check_source(cache, tables, job)
        rows = tables.passes()
        if rows and not tables.totals()[0] and not _was_evicted(tables, rows[-1]):
            tables.forget_filling()  # all was skipped: what made it so may have been mended meanwhile
            tables.set_meta("source", job.fingerprint)
            rows = []
        if rows and _can_resume(cache, PassPlan.from_json(rows[-1].plan), plan, job):
            if pass_is_open(tables, rows[-1]):
                return True
            was_complete = not _was_evicted(tables, rows[-1])
            has_failed = plan.is_permutation and any(one.kind in _OF_UNITS for one in tables.failures())
            if was_complete and not has_failed:
                return False  # and nothing was lost since
    # Of a pass that was complete, but for units that failed, only these are read again.
    _insert(cache, plan, draw)
    return not was_complete


def go_on(cache: Cache, job: Job, draw: Draw, *, has_changed: bool = False) -> bool:
    """At the end of a pass: whether there is more to do.

    Begins the next pass if something was evicted, or if the listing `has_changed`.
    """
    # Only a supervisor begins passes, so what is read here holds until the insert.
    with cache.catalogue.reading() as tables:
        rows = tables.passes()
        if rows and pass_is_open(tables, rows[-1]):
            return True
        if rows and not has_changed and not _was_evicted(tables, rows[-1]):
            return False
    if not rows:  # the catalogue was lost, and nothing cached that would tell of the pass
        with cache.catalogue.transaction() as tables:
            _check_source(cache, tables, job)
    _insert(cache, first_plan(job, Listings(cache.directory)), draw)
    return True


def order_file(directory: Directory, ordinal: int) -> str:
    """The path of the order that was drawn for a pass."""
    return directory.worker_file(f"order-{ordinal}.npy")


def _was_evicted(tables: Tables, row: PassRow) -> bool:
    """Whether something has gone since the pass began."""
    return int(tables.meta("evicted_shards", 0)) > row.evicted_before


def _can_resume(cache: Cache, one: PassPlan, other: PassPlan, job: Job) -> bool:
    """True if the pass `one` is the one that the job would begin as `other`."""
    if one.growing and not job.growing:
        return False
    if one.is_drawn and not os.path.exists(order_file(cache.directory, one.ordinal)):
        return False
    if one.growing and one.num_units != 0:
        # The pass keeps growing by the listing that it began with, complete by now or not.
        if Listings(cache.directory).load().digest_of(one.num_units or 0) != one.listing:
            return False
        other = replace(other, num_units=one.num_units, listing=one.listing)
    elif one.growing:
        other = replace(other, num_units=0, listing="")
    plain = [replace(plan, ordinal=0, length=None, segments=(), growing=False) for plan in (one, other)]
    return plain[0] == plain[1]


def _check_source(cache: Cache, tables: Tables, job: Job) -> None:
    known = tables.meta("source")
    if known is not None and known != job.fingerprint:
        if tables.totals()[0]:
            raise ConfigError(
                f"the cache at {cache.path} was filled from another source ({known}, not {job.fingerprint}); "
                "use another directory, or empty this one with 'cachestream clear CACHE'"
            )
        tables.forget_filling()
    tables.set_meta("source", job.fingerprint)
    _check_labels(cache, tables, job.label_names)


def _check_labels(cache: Cache, tables: Tables, names: Sequence[str]) -> None:
    """Refuse to add samples whose labels mean something else than those of what is cached."""
    known, schema = tables.meta("label_names"), tables.meta("schema")
    has_labels = schema is not None and "label" in Schema.from_json(schema).names
    if known is not None and has_labels and tables.totals()[0]:
        count, digest = json.loads(known)
        if count > len(names) or Names(names[:count]).digest != digest:
            raise ConfigError(
                f"the labels of what is cached at {cache.path} are places among {count:,} names, and are others among "
                f"the {len(names):,} that there are now; empty it with 'cachestream clear CACHE', or give label= a "
                "function of the path"
            )
    tables.set_meta("label_names", json.dumps([len(names), Names(names).digest]))


def _insert(cache: Cache, plan: PassPlan, draw: Draw) -> None:
    with cache.catalogue.reading() as tables:
        spans = tables.spans()
        plans = {row.id: PassPlan.from_json(row.plan) for row in tables.passes()}
    plan = replace(plan, ordinal=max((known.ordinal for known in plans.values()), default=-1) + 1)
    # Those by which units that are still cached are found.
    cached = [known for pass_id, known in plans.items() if pass_id in spans and known.is_permutation]
    _remove_orders(cache.directory, {known.ordinal for known in cached})
    Listings(cache.directory).keep_earlier(cached)
    if plan.is_drawn:
        drawn = draw(plan.ordinal)
        plan = replace(plan, length=len(drawn))
        _save_order(cache, plan.ordinal, drawn)
    with cache.catalogue.transaction() as tables:
        tables.forget_old_passes()
        tables.forget_failures(*_OF_UNITS)  # of units that are read again, and would count once a pass
        tables.set_meta(
            "fill_state", "filling"
        )  # together, or a complete cache would seem to be complete still
        tables.set_meta("listing", int(plan.growing))
        tables.insert_pass(plan.to_json(), plan.length, int(tables.meta("evicted_shards", 0)))


def _remove_orders(directory: Directory, kept: Collection[int]) -> None:
    """Remove the orders drawn for passes, except for those of the ordinals `kept`."""
    names = {os.path.basename(order_file(directory, ordinal)) for ordinal in kept}
    for name in os.listdir(directory.worker):
        if name.startswith("order-") and name not in names:
            remove(directory.worker_file(name))


def _save_order(cache: Cache, ordinal: int, drawn: IntArray) -> None:
    """Write the order that was drawn, within the limit of the cache."""
    path = order_file(cache.directory, ordinal)
    owner = Owner(cache.directory, f"order-{secrets.token_hex(6)}")
    try:
        size_bytes = disk_footprint(drawn.nbytes + 4096)
        reserved = cache.admission.reserve(size_bytes, owner.name, spare_unused=False)
        if reserved is None:
            raise CacheFullError(
                f"no space for the order of {len(drawn)} units: {cache.admission.shortage(size_bytes)}"
            )
        try:
            with (
                translated_disk_errors(path, "saving what the sampler drew"),
                open(path + ".new", "wb", opener=open_private) as file,
            ):
                np.save(file, drawn)
                file.flush()
                os.fsync(file.fileno())
            move(path + ".new", path)
        finally:
            cache.admission.cancel(reserved, owner.name)
    finally:
        owner.release()
