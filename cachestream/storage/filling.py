"""The filling of a cache as its catalogue records it: state, passes, claims, and the spans that are cached.

Each method is one transaction, which contains only SQL and the caller's pure function. Callers get frozen
values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from cachestream.schema import HELD_OUT, TRAIN, WHOLE, IntArray, Schema, Span, span_array
from cachestream.storage.locks import is_held
from cachestream.storage.progress import Claim, PassRow, Suspect
from cachestream.storage.tables import FailureRow

if TYPE_CHECKING:
    from cachestream.storage.catalogue import Catalogue
    from cachestream.storage.layout import Directory
    from cachestream.storage.tables import Tables

Plan = TypeVar("Plan")

# Messages of a full cache that evicts. RESTS comes with the phase "full", while no epoch is in use; WAITS
# with "filling", while one is.
RESTS: Final = "full: rests until an epoch uses it"
WAITS: Final = "waiting for the next epoch"

# Owners of claims of a cache that shares its filling with others. On the claims of SHARED the group decides,
# as long as a supervisor holds that owner's file; the claims of OFFERED are free to be taken.
SHARED: Final = "shared"
OFFERED: Final = "offered"


@dataclass(frozen=True, slots=True)
class LabelNames:
    """The names that the labels of cached samples index: their number and their digest."""

    count: int
    digest: str


@dataclass(frozen=True, slots=True)
class FillState:
    """The filling at one moment, as the catalogue records it.

    `phase` is "filling", "complete", "full", "stopped", "failed" or "none" (never begun); `message` gives its
    reason, and `traceback` belongs to "failed". `source` is a fingerprint, `transform` the identity
    of the last worker's transform. `positions_done` counts the finished positions of the last pass. `is_looking` is true
    while the supervisor has not decided whether another pass begins. `snapshots` counts the epochs that were
    drawn for training. `mixture` has the shares in which loaders draw the sources of a `mix`; empty if none
    did. `failures` have the most frequent first.
    """

    phase: str
    message: str
    traceback: str
    source: str | None
    transform: str | None
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
        transform=meta.get("transform"),
        labels=None if labels is None else LabelNames(*json.loads(labels)),
        schema_json=meta.get("schema"),
        last_pass=last_pass,
        positions_done=0 if last_pass is None else tables.positions_done(last_pass),
        is_looking=bool(meta.get("is_looking", 0)),
        num_shards=shards,
        num_samples=samples,
        written_samples=int(meta.get("written_samples", 0)),
        evicted_shards=int(meta.get("evicted_shards", 0)),
        evicted_samples=int(meta.get("evicted_samples", 0)),
        snapshots=int(meta.get("clock", 0)),
        size_limit=tables.settings.size_limit,
        min_free=tables.settings.min_free,
        catalogue_id=meta.get("catalogue_id"),
        mixture=tuple(json.loads(meta.get("mixture", "[]"))),
        failures=tuple(tables.failures()),
    )


def phase_now(fill: FillState, has_worker: bool) -> str:
    """The recorded phase, or "stopped" where no worker goes on with it."""
    if fill.phase == "none":  # perhaps the catalogue was lost: the worker will record its state again
        return "filling" if has_worker else fill.phase
    wants_worker = fill.phase == "filling" or (fill.phase == "full" and fill.message == RESTS)
    return "stopped" if wants_worker and not has_worker else fill.phase


@dataclass(frozen=True, slots=True)
class PlannedPass:
    """A pass to begin or to extend: its `plan` (JSON), and its `length` in positions (None: endless).

    `is_listing` while the listing may add units to it.
    """

    plan: str
    length: int | None
    is_listing: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """A claim, its pass, and the positions in it that killed a process before."""

    claim: Claim
    row: PassRow
    suspects: tuple[Suspect, ...]


@dataclass(frozen=True, slots=True)
class OpenPass:
    """The current pass, and the owners of its claims that have died.

    `is_shared` while a group of caches decides on some of its positions.
    """

    row: PassRow
    dead_owners: frozenset[str]
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class SharedPass:
    """The current pass of a cache that shares its filling.

    `undecided`: positions on which the group decides. `making`: positions that sampling processes have, or
    may take; `offered`: the number of claims that they may take.
    """

    row: PassRow
    undecided: tuple[tuple[int, int], ...]
    making: tuple[tuple[int, int], ...]
    offered: int


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
            tables.set_meta("fill_state", phase)
            tables.set_meta("fill_message", message)
            tables.set_meta("fill_traceback", traceback)
            tables.add("epoch_waits", int(message == WAITS))
            catalogue_id: str | None = tables.meta("catalogue_id")
            return catalogue_id

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

    def record_suspects(self, suspects: Iterable[tuple[int, Suspect]]) -> None:
        """Add the deaths of suspects, each with the id of its pass."""
        with self._catalogue.transaction() as tables:
            for pass_id, suspect in suspects:
                tables.add_suspect(pass_id, suspect.position, suspect.deaths, suspect.reason)

    def vote(self, owner: str, votes: Sequence[tuple[Schema, int]]) -> list[tuple[Schema, int]]:
        """Record the schemas of the first samples that `owner` has read, with counts; return those of all
        others.
        """
        with self._catalogue.transaction() as tables:
            return tables.vote(owner, votes)

    def record_mixture(self, shares: Sequence[float]) -> None:
        """Set `FillState.mixture`, if it differs."""
        text = json.dumps([round(share, 3) for share in shares])
        with self._catalogue.reading() as tables:
            known = tables.meta("mixture")
        if known != text:  # otherwise no commit: it would keep the snapshot from being reused
            with self._catalogue.transaction() as tables:
                tables.set_meta("mixture", text)

    # --- passes

    def adopt(self, source: str, labels: LabelNames, is_void: Callable[[FillState], bool]) -> FillState:
        """Record `source` and `labels` as those of the cache, and return the state after that.

        If `is_void(state)`, the recorded progress is deleted first. If `is_void` raises, nothing changes.
        """
        with self._catalogue.transaction() as tables:
            if is_void(fill_state(tables)):
                tables.forget_filling()
            tables.set_meta("source", source)
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
            tables.insert_pass(planned.plan, planned.length, int(tables.meta("evicted_shards", 0)))

    def reorder(self, row: PassRow, plan: str, start: int) -> bool:
        """Give the pass `row` the `plan`, which has other units from the position `start` on.

        False, and nothing changes, if a position from there on is claimed, or if the pass is another one.
        """
        with self._catalogue.transaction() as tables:
            now = tables.last_pass()
            if now is None or (now.id, now.plan) != (row.id, row.plan) or now.next_position > start:
                return False
            tables.extend_pass(row.id, plan, row.length)
            return True

    def enter_earlier_pass(self, source: str, plan: str, length: int | None) -> int:
        """Record `source` as the cache's, and return the id of the pass with `plan`, of an earlier filling.

        An unknown pass is inserted before all others.
        """
        with self._catalogue.transaction() as tables:
            tables.set_meta("source", source)
            return tables.earlier_pass(plan, length)

    def cached_spans(
        self, parse: Callable[[str], Plan], parts: Sequence[int] | None = None
    ) -> CachedSpans[Plan]:
        """The spans that the shards hold, for each of `parts` (default: all of the cache's splits).

        `parse` reads the plan of a pass.
        """
        with self._catalogue.reading() as tables:
            if parts is None:
                parts = (WHOLE,) if tables.holdout is None else (TRAIN, HELD_OUT)
            source, passes = tables.meta("source"), tables.passes()
            spans = tuple(tables.spans(part) for part in parts)
        return CachedSpans(source, {row.id: parse(row.plan) for row in passes}, spans)

    # --- claims

    def open_pass(self) -> OpenPass | None:
        """The current pass; None if there is none."""
        with self._catalogue.reading() as tables:
            row = tables.last_pass()
            owners = set() if row is None else {owner for _, owner in tables.claims(row.id)}
        if row is None:
            return None
        # Outside the transaction: the name of a dead owner is never used again.
        dead = frozenset(owner for owner in owners if not is_held(self._directory.owner_file(owner)))
        return OpenPass(row, dead, SHARED in owners - dead)

    def claim(
        self,
        owner: str,
        seen: OpenPass,
        growth: PlannedPass | None,
        block_size: Callable[[int | None], int],
    ) -> Assignment | PassRow | None:
        """Claim positions of the last pass for `owner`: the claim of a dead owner, or `block_size(length)`
        new ones.

        If all positions are claimed and the pass is still as `seen`, it is extended by `growth`. Returns the
        pass if nothing of it is left to claim, None if there is no pass.
        """
        with self._catalogue.transaction() as tables:
            row = tables.last_pass()
            if row is None:
                return None
            claim = _take_over(tables, row, owner, seen.dead_owners)
            if claim is None:
                if growth is not None and row == seen.row and row.next_position == row.length:
                    tables.set_meta("listing", int(growth.is_listing))
                    tables.extend_pass(row.id, growth.plan, growth.length)
                    row = replace(row, plan=growth.plan, length=growth.length)
                claim = _new_claim(tables, row, owner, block_size(row.length))
            if claim is None:
                return row
            suspects = [s for s in tables.suspects(row.id) if claim.position <= s.position < claim.stop]
            return Assignment(claim, row, tuple(suspects))

    # --- sharing

    def share(self) -> None:
        """Have the group decide on all positions of the current pass that no process works on."""
        with self._catalogue.transaction() as tables:
            row = tables.last_pass()
            if row is None:
                return
            tables.execute(
                "UPDATE claims SET owner = ? WHERE pass_id = ? AND owner = ?", (SHARED, row.id, OFFERED)
            )
            if row.length is not None:
                _new_claim(tables, row, SHARED, row.length)

    def shared_pass(self) -> SharedPass | None:
        """The current pass and the positions that are not done; None before the first pass."""
        with self._catalogue.reading() as tables:
            row = tables.last_pass()
            claims = [] if row is None else tables.claims(row.id)
        if row is None:
            return None
        undecided = tuple((claim.position, claim.stop) for claim, owner in claims if owner == SHARED)
        making = tuple((claim.position, claim.stop) for claim, owner in claims if owner != SHARED)
        return SharedPass(row, undecided, making, sum(owner == OFFERED for _, owner in claims))

    def being_made(self, positions: IntArray) -> npt.NDArray[np.bool_]:
        """For each of `positions` of the current pass: True if a process of this cache makes it, or may."""
        with self._catalogue.reading() as tables:
            return _being_made(tables, tables.passes()[-1], positions)

    def shard_ids(self) -> set[int]:
        """The ids of all shards."""
        with self._catalogue.reading() as tables:
            return tables.shard_ids()

    def decide(
        self, pass_id: int, *, make: Iterable[tuple[int, int]], done: Iterable[tuple[int, int]]
    ) -> None:
        """Offer the positions in `make` to the sampling processes, and leave out those in `done`.

        Only positions on which the group decides are touched.
        """
        with self._catalogue.transaction() as tables:
            for ranges, owner in ((make, OFFERED), (done, None)):
                for start, stop in ranges:
                    _decide(tables, pass_id, start, stop, owner)

    def follow_group(self, row: PassRow, plan: str) -> bool:
        """Give a pass of which nothing is done the `plan` of the group; False if something is done."""
        with self._catalogue.transaction() as tables:
            claims = [(claim.position, claim.stop) for claim, _ in tables.claims(row.id)]
            is_new = tables.last_pass() == row and claims == [(0, row.length)] and not tables.totals()[0]
            if is_new:
                tables.extend_pass(row.id, plan, row.length)
            return is_new


def _decide(tables: Tables, pass_id: int, start: int, stop: int, owner: str | None) -> None:
    """Give the shared claims on the positions `start` to `stop` to `owner`; with None, delete them."""
    for claim, holder in tables.claims(pass_id):
        first, last = max(start, claim.position), min(stop, claim.stop)
        if holder != SHARED or first >= last:
            continue
        tables.execute("DELETE FROM claims WHERE id = ?", (claim.id,))
        parts = (claim.position, first, SHARED), (first, last, owner), (last, claim.stop, SHARED)
        for part_start, part_stop, part_owner in parts:
            if part_start < part_stop and part_owner is not None:
                part = tables.insert_claim(pass_id, part_start, part_stop, part_owner)
                if part_start == claim.position and claim.offset:
                    tables.move_claim(part.id, part_start, claim.offset)


def is_open(
    tables: Tables, pass_id: int, spans: Sequence[Span], current: PassRow, positions: IntArray
) -> bool:
    """True if this cache neither holds nor makes the samples of `spans` of the pass `pass_id`.

    In the pass `current`, which may be another one, they are at `positions`.
    """
    if len(overlapping(tables.spans_of(pass_id), spans)):
        return False
    if pass_id != current.id:
        made = tables.spans_of(current.id)
        if np.any(_within(positions, made[:, 0], made[:, 2] + (made[:, 3] > 0))):
            return False
    return not np.any(_being_made(tables, current, positions))


def overlapping(held: IntArray, spans: Iterable[Span]) -> IntArray:
    """Those of the spans `held` that have samples in common with `spans`; both as `span_array`."""
    touches = np.zeros(len(held), np.bool_)
    for first, offset, last, until in span_array(spans):
        begins_before = (held[:, 0] < last) | ((held[:, 0] == last) & (held[:, 1] < until))
        ends_after = (held[:, 2] > first) | ((held[:, 2] == first) & (held[:, 3] > offset))
        touches |= begins_before & ends_after
    return held[touches]


def _being_made(tables: Tables, row: PassRow, positions: IntArray) -> npt.NDArray[np.bool_]:
    """For each of `positions`: True if a process of this cache makes it, or may, or if the pass is over."""
    last = tables.passes()[-1]
    making = [(claim.position, claim.stop) for claim, owner in tables.claims(row.id) if owner != SHARED]
    making.append((last.next_position if last.id == row.id else 0, sys.maxsize))
    ranges = np.array(making, np.int64)
    return _within(positions, ranges[:, 0], ranges[:, 1])


def _within(positions: IntArray, starts: IntArray, stops: IntArray) -> npt.NDArray[np.bool_]:
    """For each of `positions`: True if it lies in one of the ranges from `starts` to `stops`."""
    begun = np.searchsorted(np.sort(starts), positions, side="right")
    return begun > np.searchsorted(np.sort(stops), positions, side="right")


def _take_over(tables: Tables, row: PassRow, owner: str, dead_owners: frozenset[str]) -> Claim | None:
    for claim, holder in tables.claims(row.id):
        if holder != owner and holder in dead_owners:
            tables.execute("UPDATE claims SET owner = ? WHERE id = ?", (owner, claim.id))
            return claim
    return None


def _new_claim(tables: Tables, row: PassRow, owner: str, size: int) -> Claim | None:
    stop = row.next_position + size
    stop = stop if row.length is None else min(stop, row.length)
    if stop <= row.next_position:
        return None
    tables.execute("UPDATE passes SET next_position = ? WHERE id = ?", (stop, row.id))
    return tables.insert_claim(row.id, row.next_position, stop, owner)
