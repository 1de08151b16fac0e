"""Which pass comes next: go on with the open one, begin another for what was evicted, or rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cachestream.errors import ConfigError
from cachestream.model import IntArray
from cachestream.sampling.job import Job
from cachestream.sampling.order import PassPlan
from cachestream.storage.cache import Cache
from cachestream.storage.tables import PassRow, Tables

__all__ = ["begin", "go_on", "pass_is_open"]


def pass_is_open(tables: Tables, row: PassRow) -> bool:
    """Whether something of the pass is not done yet."""
    return row.length is None or row.next_position < row.length or bool(tables.claims(row.id))


def first_plan(job: Job) -> PassPlan:
    """The first pass of a job."""
    return PassPlan(job.kind, job.seed, 0, job.num_units, job.listing, job.num_units)


def begin(cache: Cache, job: Job, draw: Callable[[], IntArray]) -> None:
    """Resume the cache's open pass if it is of this job's order, else begin one."""
    plan = first_plan(job)
    with cache.catalogue.transaction() as tables:
        _check_source(cache, tables, job)
        rows = tables.passes()
        if (
            rows
            and not tables.totals()[0]
            and int(tables.meta("evicted_shards", 0)) <= rows[-1].evicted_before
        ):
            tables.forget_filling()  # all was skipped: what made it so may have been mended meanwhile
            tables.set_meta("source", job.fingerprint)
            rows = []
        if rows and _same_order(PassPlan.from_json(rows[-1].plan), plan):
            if pass_is_open(tables, rows[-1]):
                return
            if int(tables.meta("evicted_shards", 0)) <= rows[-1].evicted_before:
                return  # complete, and nothing was lost since
        _insert(cache, tables, plan, draw)


def go_on(cache: Cache, job: Job, draw: Callable[[], IntArray]) -> bool:
    """At the end of a pass: whether there is more to do; begins the next pass if something was evicted."""
    with cache.catalogue.transaction() as tables:
        rows = tables.passes()
        if not rows or pass_is_open(tables, rows[-1]):
            return bool(rows)
        if int(tables.meta("evicted_shards", 0)) <= rows[-1].evicted_before:
            return False
        _insert(cache, tables, first_plan(job), draw)
        return True


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


def _same_order(one: PassPlan, other: PassPlan) -> bool:
    return replace(one, ordinal=0, length=None) == replace(other, ordinal=0, length=None)


def _insert(cache: Cache, tables: Tables, plan: PassPlan, draw: Callable[[], IntArray]) -> None:
    ordinals = [PassPlan.from_json(row.plan).ordinal for row in tables.passes()]
    plan = replace(plan, ordinal=max(ordinals, default=-1) + 1)
    if plan.kind == "sampler":
        drawn = draw()
        plan = replace(plan, length=len(drawn))
        np.save(cache.directory.worker_file(f"order-{plan.ordinal}.npy"), drawn)
    tables.forget_old_passes()
    tables.insert_pass(plan.to_json(), plan.length, int(tables.meta("evicted_shards", 0)))
