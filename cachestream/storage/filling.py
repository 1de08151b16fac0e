"""The filling of a cache as its catalogue records it: state, passes, and the spans that are cached.

Each method is one transaction, which contains only SQL and the caller's pure function. Callers get frozen
values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np

from cachestream.schema import HELD_OUT, TRAIN, WHOLE, IntArray, Schema, Span, span_array
from cachestream.storage.progress import PassRow
from cachestream.storage.tables import LIVE, RETIRING, FailureRow, OutdatedShard

if TYPE_CHECKING:
    from cachestream.storage.catalogue import Catalogue
    from cachestream.storage.layout import Directory
    from cachestream.storage.tables import Tables

Plan = TypeVar("Plan")

# Messages of a full cache that evicts. RESTS comes with the phase "full", while no epoch is in use; WAITS
# with "filling", while one is.
RESTS: Final = "full: rests until an epoch uses it"
WAITS: Final = "waiting for the next epoch"


@dataclass(frozen=True, slots=True)
class LabelNames:
    """The names that the labels of cached samples index: their number and their digest."""

    count: int
    digest: str


@dataclass(frozen=True, slots=True)
class FillState:
    """The filling at one moment, as the catalogue records it.

    `phase` is "filling", "complete", "full", "stopped", "failed" or "none" (never begun); `message` gives its
    reason, and `traceback` belongs to "failed". `source` is a fingerprint, `data` the part of it that names
    the data, `transform` the identity of the last worker's transform. `replacing` and `again` are those of
    the last pass, see `PlannedPass`; `positions_done` counts its finished positions. `is_looking` is true
    while the supervisor has not decided whether another pass begins. `snapshots` counts the epochs that were
    drawn for training, and `room_made` how often shards were evicted for no new one, or a setting changed.
    `mixture` has the shares in which loaders draw the sources of a `mix`; empty if none did. `failures` have
    the most frequent first.
    """

    phase: str
    message: str
    traceback: str
    source: str | None
    data: str | None
    transform: str | None
    replacing: str
    again: int
    labels: LabelNames | None
    schema_json: str | None
    last_pass: PassRow | None
    positions_done: int
    is_looking: bool
    num_shards: int
    num_samples: int
    written_samples: int
    evicted_shards: int
    evicted_samples: int
    snapshots: int
    room_made: int
    size_limit: int
    min_free: int
    catalogue_id: str | None
    mixture: tuple[float, ...]
    failures: tuple[FailureRow, ...]

    @property
    def schema(self) -> Schema | None:
        """The fields of the cached samples; None before the first."""
        return None if self.schema_json is None else Schema.from_json(self.schema_json)

    @property
    def has_evicted(self) -> bool:
        """True if shards were evicted since the last pass began; also after a rebuild, which cannot tell."""
        return self.last_pass is not None and self.evicted_shards > self.last_pass.evicted_before


def fill_state(tables: Tables) -> FillState:
    """Read the state of the filling in a transaction of the caller."""
    meta, last_pass = tables.all_meta(), tables.last_pass()
    shards, samples, _ = tables.totals()
    labels = meta.get("label_names")
    return FillState(
        phase=str(meta.get("fill_state", "none")),
        message=str(meta.get("fill_message", "")),
        traceback=str(meta.get("fill_traceback", "")),
        source=meta.get("source"),
        data=meta.get("data"),
        transform=meta.get("transform"),
        replacing=str(meta.get("replacing", "")),
        again=int(meta.get("again", 0)),
        labels=None if labels is None else LabelNames(*json.loads(labels)),
        schema_json=meta.get("schema"),
        last_pass=last_pass,
        positions_done=0 if last_pass is None else last_pass.positions_done,
        is_looking=bool(meta.get("is_looking", 0)),
        num_shards=shards,
        num_samples=samples,
        written_samples=int(meta.get("written_samples", 0)),
        evicted_shards=int(meta.get("evicted_shards", 0)),
        evicted_samples=int(meta.get("evicted_samples", 0)),
        snapshots=int(meta.get("clock", 0)),
        room_made=int(meta.get("room_made", 0)),
        size_limit=tables.settings.size_limit,
        min_free=tables.settings.min_free,
        catalogue_id=meta.get("catalogue_id"),
        mixture=tuple(json.loads(meta.get("mixture", "[]"))),
        failures=tuple(tables.failures()),
    )


def _set_phase(tables: Tables, phase: str, message: str, traceback: str = "") -> None:
    tables.set_meta("fill_state", phase)
    tables.set_meta("fill_message", message)
    tables.set_meta("fill_traceback", traceback)


def phase_now(fill: FillState, has_worker: bool) -> str:
    """The recorded phase, or "stopped" where no worker goes on with it."""
    if fill.phase == "none":  # perhaps the catalogue was lost: the worker will record its state again
        return "filling" if has_worker else fill.phase
    wants_worker = fill.phase == "filling" or (fill.phase == "full" and fill.message == RESTS)
    return "stopped" if wants_worker and not has_worker else fill.phase


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """A pass to begin or to extend: its `plan` (JSON), and its `length` in positions (None: endless).

    `is_listing` while the listing may add units to it. `again`: the positions of it that come besides one for
    each unit, to replace samples of another transform. `replacing`: the identity of the transform that
    replaces the samples of others in it; "" if none does.
    """

    plan: str
    length: int | None
    is_listing: bool
    again: int = 0
    replacing: str = ""


@dataclass(frozen=True, slots=True)
class CachedSpans(Generic[Plan]):
    """The plans of all passes by id, and for each requested part the cached spans: pass id → `span_array`."""

    source: str | None
    plans: dict[int, Plan]
    spans: tuple[dict[int, IntArray], ...]

    def of(self, plan: Plan, part: int = 0) -> IntArray:
        """The spans of the pass with this plan, in one of the parts."""
        found = [self.spans[part].get(pass_id) for pass_id, one in self.plans.items() if one == plan]
        return next((spans for spans in found if spans is not None), np.empty((0, 4), np.int64))


class Filling:
    """The transactions that fill the cache in `directory`."""

    def __init__(self, directory: Directory, catalogue: Catalogue) -> None:
        self._directory = directory
        self._catalogue = catalogue

    # --- state

    def state(self) -> FillState:
        with self._catalogue.reading() as tables:
            return fill_state(tables)

    def record(self, phase: str, message: str = "", traceback: str = "") -> str | None:
        """Set the phase, message and traceback of `FillState`; return the id of the catalogue."""
        with self._catalogue.transaction() as tables:
            _set_phase(tables, phase, message, traceback)
            tables.add("epoch_waits", int(message == WAITS))
            catalogue_id: str | None = tables.meta("catalogue_id")
            return catalogue_id

    def record_full(self, message: str, room_made: int) -> bool:
        """Set the phase "full"; False if space was made since `FillState.room_made` was read: it is not full."""
        with self._catalogue.transaction() as tables:
            is_full = int(tables.meta("room_made", 0)) == room_made
            if is_full:
                _set_phase(tables, "full", message)
            return is_full

    def record_looking(self, is_looking: bool) -> None:
        """Set `FillState.is_looking`, for those who wait for the end of the pass."""
        with self._catalogue.transaction() as tables:
            tables.set_meta("is_looking", int(is_looking))

    def record_transform(self, identity: str) -> None:
        with self._catalogue.transaction() as tables:
            tables.set_meta("transform", identity)

    def samples_of_others(self, identity: str) -> int:
        """The number of cached samples that a transform other than `identity` has made."""
        with self._catalogue.reading() as tables:
            return tables.samples_of_others(identity)

    def outdated(self, identity: str) -> list[OutdatedShard]:
        """The shards that `samples_of_others` counts, by id."""
        with self._catalogue.reading() as tables:
            return tables.outdated(identity)

    def fields_of_several_shapes(self) -> list[str]:
        """The names of the fields that have one shape in each shard, and not the same in all."""
        with self._catalogue.reading() as tables:
            schema, shapes = tables.schema, tables.shapes()
        return [
            name
            for name, found in zip(
                () if schema is None else schema.names, zip(*shapes, strict=True), strict=False
            )
            if len(set(found)) > 1 and None not in found
        ]

    def record_mixture(self, shares: Sequence[float]) -> None:
        """Set `FillState.mixture`, if it differs."""
        text = json.dumps([round(share, 3) for share in shares])
        with self._catalogue.reading() as tables:
            known = tables.meta("mixture")
        if known != text:  # otherwise no commit: it would keep the snapshot from being reused
            with self._catalogue.transaction() as tables:
                tables.set_meta("mixture", text)

    # --- passes

    def adopt(
        self, source: str, data: str, labels: LabelNames, is_void: Callable[[FillState], bool]
    ) -> FillState:
        """Record `source`, its `data` and `labels` as those of the cache, and return the state after that.

        If `is_void(state)`, the recorded progress is deleted first. If `is_void` raises, nothing changes.
        """
        with self._catalogue.transaction() as tables:
            if is_void(fill_state(tables)):
                tables.forget_filling()
            tables.set_meta("source", source)
            tables.set_meta("data", data)
            tables.set_meta("label_names", json.dumps([labels.count, labels.digest]))
            return fill_state(tables)

    def begin_pass(self, planned: PlannedPass, retried: Collection[str]) -> None:
        """Begin a pass; delete those without a cached shard, and the failures of the kinds `retried`, whose
        units are read again.
        """
        with self._catalogue.transaction() as tables:
            tables.execute(
                "DELETE FROM passes WHERE id NOT IN (SELECT DISTINCT pass_id FROM shards) "
                "AND id < (SELECT max(id) FROM passes)"
            )
            tables.executemany("DELETE FROM failures WHERE kind = ?", [(kind,) for kind in retried])
            # In the same transaction, or the cache would still seem complete.
            tables.set_meta("fill_state", "filling")
            tables.set_meta("listing", int(planned.is_listing))
            tables.set_meta("again", planned.again)
            tables.set_meta("replacing", planned.replacing)
            tables.insert_pass(planned.plan, planned.length, int(tables.meta("evicted_shards", 0)))

    def replace_plan(self, row: PassRow, plan: str, length: int | None, *, is_listing: bool) -> None:
        """Replace the plan of the pass `row`, of which the same positions are done."""
        with self._catalogue.transaction() as tables:
            tables.set_meta("listing", int(is_listing))
            tables.replace_plan(row.id, plan, length)

    def enter_earlier_pass(self, source: str, plan: str, length: int | None) -> int:
        """Record `source` as the cache's, and return the id of the pass with `plan`, of an earlier filling.

        An unknown pass is inserted before all others.
        """
        with self._catalogue.transaction() as tables:
            tables.set_meta("source", source)
            return tables.earlier_pass(plan, length)

    def cached_spans(
        self, parse: Callable[[str], Plan], parts: Sequence[int] | None = None, identity: str = ""
    ) -> CachedSpans[Plan]:
        """The spans that the shards hold, for each of `parts` (default: all of the cache's splits).

        `parse` reads the plan of a pass. With the `identity` of a transform, shards of others are left out.
        """
        with self._catalogue.reading() as tables:
            if parts is None:
                parts = (WHOLE,) if tables.holdout is None else (TRAIN, HELD_OUT)
            source, passes = tables.meta("source"), tables.passes()
            spans = tuple(tables.spans(part, identity) for part in parts)
        return CachedSpans(source, {row.id: parse(row.plan) for row in passes}, spans)

    def shard_ids(self) -> set[int]:
        """The ids of the shards that count as cached."""
        with self._catalogue.reading() as tables:
            return tables.shard_ids(LIVE, RETIRING)


def overlapping(held: IntArray, spans: Iterable[Span]) -> IntArray:
    """Those of the spans `held` that have samples in common with `spans`; both as `span_array`."""
    touches = np.zeros(len(held), np.bool_)
    for first, offset, last, until in span_array(spans):
        begins_before = (held[:, 0] < last) | ((held[:, 0] == last) & (held[:, 1] < until))
        ends_after = (held[:, 2] > first) | ((held[:, 2] == first) & (held[:, 3] > offset))
        touches |= begins_before & ends_after
    return held[touches]
