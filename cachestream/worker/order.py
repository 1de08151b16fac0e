"""The order of units in a pass: pure functions from a plan and positions to units.

A pass goes over the positions 0, 1, …; its plan says which unit lies at each position. The inverse, from
units to positions, tells what is still cached from an earlier pass. Of several nodes each reads a partition
of the units.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.errors import ConfigError
from cachestream.permutation import Permutation, mix_key
from cachestream.schema import IntArray
from cachestream.storage.os_errors import CatalogueDamagedError

if TYPE_CHECKING:
    from cachestream.storage.layout import Directory

Offsets = Sequence[tuple[int, int]]  # ranges [start, stop) of offsets of samples in a unit

PASS_KEY: Final = 1
_WEIGHT_KEY: Final = 2
_KINDS: Final = ("shuffle", "sequential", "weighted", "sampler", "curriculum", "mixture")
MOST_NODES: Final = 1_000_000
END: Final = 1 << 62  # an offset past the last sample of any unit
_PARTITION_TEXT: Final = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")


@dataclass(frozen=True, slots=True)
class Partition:
    """Share `index` of `count`: disjoint and complete, whatever order, seed and pass each node has.

    Of every run of `count` units each node reads one; a hash of the run's number says which one, so that a
    period in the order of the units (pairs of files, sources that alternate) does not become the share of one
    node. Places in a share ascend with the units. A share takes O(1) memory.
    """

    index: int
    count: int

    def length(self, num_units: int) -> int:
        """The number of units in the share, of `num_units`."""
        runs, rest = divmod(num_units, self.count)
        return runs + int(self._offsets(np.array([runs]))[0] < rest)

    def units(self, places: IntArray) -> IntArray:
        """The units at `places` of the share."""
        units: IntArray = places * self.count + self._offsets(places)
        return units

    def places(self, units: IntArray) -> IntArray:
        """The places of `units` in the share; -1 for units of other nodes."""
        runs = units // self.count
        return np.where(units % self.count == self._offsets(runs), runs, -1)

    def _offsets(self, runs: IntArray) -> IntArray:
        """The offset of the share's unit in each run: the index, rotated by a hash of the run."""
        turned = _splitmix(runs.astype(np.uint64)) % np.uint64(self.count)
        offsets: IntArray = (turned.astype(np.int64) + self.index) % self.count
        return offsets

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_partition(given: Any) -> Partition | None:
    """`(i, n)` or "i/n", node i of n counted from 0; None for None. Raises ConfigError for anything else."""
    if given is None or isinstance(given, Partition):
        return given
    if isinstance(given, str) and (match := _PARTITION_TEXT.fullmatch(given)):
        given = (int(match[1]), int(match[2]))
    if (
        not isinstance(given, tuple | list)
        or len(given) != 2
        or not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in given)
        or not 0 <= given[0] < given[1] <= MOST_NODES
    ):
        raise ConfigError(
            f"partition={given!r}: give (i, n), or 'i/n' on the command line: node i of n, counted from 0, "
            "with one i for each node"
        )
    return Partition(int(given[0]), int(given[1]))


def _splitmix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of each number (Steele, Lea and Flood, OOPSLA 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


class Segments:
    """A permutation that keeps every number within its segment, `ends[i - 1]` to `ends[i]`.

    A further segment changes nothing before it, so that a pass can grow.
    """

    def __init__(self, ends: Sequence[int], seed: int, ordinal: int) -> None:
        self._bounds = np.array([0, *ends], np.int64)
        self._parts = [
            Permutation(stop - start, mix_key(PASS_KEY, seed, ordinal, number)) if stop > start else None
            for number, (start, stop) in enumerate(pairwise(self._bounds.tolist()))
        ]

    def at(self, indices: IntArray) -> IntArray:
        """The numbers at `indices`."""
        return self._by_segment(indices, inverse=False)

    def inverse(self, numbers: IntArray) -> IntArray:
        """The indices of `numbers`; -1 for numbers past the last segment."""
        return self._by_segment(numbers, inverse=True)

    def _by_segment(self, values: IntArray, *, inverse: bool) -> IntArray:
        found = np.full(len(values), -1, np.int64)
        segments = np.searchsorted(self._bounds, values, side="right") - 1
        for number in np.unique(segments).tolist():
            part = self._parts[number] if number < len(self._parts) else None
            if part is not None:
                chosen, start = segments == number, int(self._bounds[number])
                inside = values[chosen] - start
                found[chosen] = start + (part.inverse(inside) if inverse else part.at(inside))
        return found


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass over `num_units` units (None: endless), as recorded in the catalogue and in shards.

    `kind`: "shuffle", "sequential", "weighted", "sampler", "curriculum" or "mixture".
    `listing`: the digest of the names of the units; under another listing the same positions mean other
    units.
    `length`: the number of positions (the units in the share of the node, or the number that a sampler
    draws).
    `rule`: the fingerprint of the function of a curriculum; of a mixture, "START:SHARE,SHARE,…", the shares
    of the sources from the position START on.

    `segments`: the numbers of units at which segments end; the last is `num_units`. The units of one segment
    come before those of the next. A pass that began before all units were listed has one for each time that
    it was extended, a source that is read in parts of units one for each of its `round_ends`.
    `growing`: the listing may bring more units.
    `again`: the number of units that come first, in an order of their own: those of samples that another
    transform has made. Later in the pass they are left out.
    """

    kind: str
    seed: int
    ordinal: int
    num_units: int | None
    listing: str
    length: int | None
    partition: Partition | None = None
    rule: str = ""
    segments: tuple[int, ...] = ()
    growing: bool = False
    again: int = 0

    def to_json(self) -> str:
        values: list[Any] = [self.kind, self.seed, self.ordinal, self.num_units, self.listing, self.length]
        in_segments = bool(self.segments) or self.growing or self.again > 0
        if self.partition is not None or self.rule or in_segments:
            share = self.partition
            values += [None if share is None else [share.index, share.count], self.rule]
        if in_segments:
            values += [self.segments, self.growing]
        if self.again:
            values.append(self.again)
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PassPlan:
        try:
            values: list[Any] = json.loads(text)
            # The last values are left out for passes of the whole source by a single node.
            values += [None, "", [], False, 0][len(values) - 6 :]
            kind, seed, ordinal, num_units, listing, length, share, rule, segments, growing, again = values
            partition = None if share is None else Partition(*share)
            counts = (seed, ordinal, num_units or 0, length or 0, *segments, *(share or ()), again)
            if kind not in _KINDS or not all(type(count) is int for count in counts):
                raise ValueError(f"the order is {kind!r} of {counts}")
        except (ValueError, TypeError) as error:
            raise CatalogueDamagedError(
                f"the pass {text[:100]!r} makes no sense ({error}); start a worker: it rebuilds the catalogue"
            ) from error
        segments = tuple(segments)
        return cls(kind, seed, ordinal, num_units, listing, length, partition, rule, segments, growing, again)

    def precedes(self, other: PassPlan) -> bool:
        """True if `other` is a later pass over the same units, in the same kind of order."""
        return self.ordinal < other.ordinal and replace(self, ordinal=other.ordinal) == other

    @property
    def share(self) -> int | None:
        """The number of units that this node reads; None for an endless source."""
        if self.num_units is None or self.partition is None:
            return self.num_units
        return self.partition.length(self.num_units)

    def grown(self, num_units: int, listing: str, *, is_complete: bool) -> PassPlan:
        """The same pass extended to all units that are listed by now; earlier positions keep their units."""
        segments = self.segments if num_units == self.num_units else (*self.segments, num_units)
        plan = replace(self, num_units=num_units, listing=listing, segments=segments, growing=not is_complete)
        return plan.with_length()

    def with_length(self) -> PassPlan:
        """The plan with the number of its positions, where each unit of the share has one."""
        return replace(self, length=None if self.share is None else self.again + self.share)

    def should_grow(self, num_units: int, *, is_complete: bool) -> bool:
        """True if enough units are listed to extend the pass.

        Growth by at least an eighth keeps the segments few.
        """
        known = self.num_units or 0
        return self.growing and (is_complete or num_units - known > known // 8)

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of the sources of a mixture; empty for other orders."""
        return tuple(map(float, self.rule.split(":")[1].split(","))) if self.kind == "mixture" else ()

    @property
    def segment_ends(self) -> list[int]:
        """The positions at which the segments end."""
        partition = self.partition
        return [end if partition is None else partition.length(end) for end in self.segments]

    @property
    def is_permutation(self) -> bool:
        """True if each unit of the share comes exactly once."""
        return self.kind in ("shuffle", "sequential", "curriculum", "mixture")

    @property
    def is_drawn(self) -> bool:
        """True if the units of a pass are drawn."""
        return self.kind in ("sampler", "curriculum", "mixture")

    @property
    def has_file(self) -> bool:
        """True if units are kept in a file: all that are drawn, or those that come first."""
        return self.is_drawn or self.again > 0


class UnitOrder:
    """The units of one pass, by position; O(1) memory for the named orders.

    `weights` (float64 `[num_units]`): for the kind "weighted", which draws units with replacement.
    `listed`: the units in the file of the pass, int `[length]` for the kinds that are drawn, else int
    `[again]`.
    """

    def __init__(
        self, plan: PassPlan, weights: npt.ArrayLike | None = None, listed: npt.ArrayLike | None = None
    ) -> None:
        self.plan = plan
        self._permutation: Permutation | Segments | None = None
        if plan.kind == "shuffle" and plan.segments:
            self._permutation = Segments(plan.segment_ends, plan.seed, plan.ordinal)
        elif plan.kind == "shuffle" and plan.share:
            self._permutation = Permutation(plan.share, mix_key(PASS_KEY, plan.seed, plan.ordinal))
        self._cumulative = None if weights is None else np.cumsum(share_of(weights, plan.partition))
        self._listed = np.empty(0, np.int64) if listed is None else np.asarray(listed, np.int64)
        self._sorted: tuple[IntArray, IntArray] | None = None

    def units(self, positions: IntArray) -> IntArray:
        """The units at `positions`."""
        if self.plan.is_drawn:
            drawn: IntArray = self._listed[positions].astype(np.int64)
            return drawn
        again = self.plan.again
        if again and len(positions):
            first = self._listed[np.minimum(positions, again - 1)]
            return np.where(positions < again, first, self._named(np.maximum(positions - again, 0)))
        return self._named(positions)

    def _named(self, positions: IntArray) -> IntArray:
        if self._cumulative is not None:
            places = self._weighted(positions)
        else:
            places = positions if self._permutation is None else self._permutation.at(positions)
        return places if self.plan.partition is None else self.plan.partition.units(places)

    def positions(self, units: IntArray) -> IntArray:
        """The positions of `units` in the pass, -1 for units outside of it; only for permutations."""
        listed = self._find(units)
        if self.plan.is_drawn:
            return listed
        if self.plan.partition is not None:
            units = self.plan.partition.places(units)
        length = self.plan.share or 0
        inside = (units >= 0) & (units < length)
        found = np.where(inside, units, 0)
        if self._permutation is not None and length:
            found = self._permutation.inverse(found)
        return np.where(listed >= 0, listed, np.where(inside, self.plan.again + found, -1))

    def come_again(self, positions: IntArray, units: IntArray) -> npt.NDArray[np.bool_]:
        """For each of `units`, which lie at `positions`: True if it was among those that come first."""
        if not self.plan.again:
            return np.zeros(len(units), np.bool_)
        found = self._find(units)
        comes: npt.NDArray[np.bool_] = (
            (found >= 0) & (found < self.plan.again) & (positions >= self.plan.again)
        )
        return comes

    def _find(self, units: IntArray) -> IntArray:
        """The first places of `units` in the file of the pass; -1 for others."""
        if not len(self._listed):
            return np.full(len(units), -1, np.int64)
        if self._sorted is None:
            places = np.argsort(self._listed, kind="stable")
            self._sorted = self._listed[places], places
        ordered, places = self._sorted
        index = np.minimum(np.searchsorted(ordered, units), len(ordered) - 1)
        return np.where(ordered[index] == units, places[index], -1)

    def _weighted(self, positions: IntArray) -> IntArray:
        assert self._cumulative is not None
        # The uniform number of a position comes from a permutation of 2⁵³: no generator state to resume.
        key = mix_key(_WEIGHT_KEY, self.plan.seed, self.plan.ordinal)
        uniform = Permutation(1 << 53, key).at(positions) / float(1 << 53)
        found = np.searchsorted(self._cumulative, uniform * self._cumulative[-1], side="right")
        units: IntArray = np.minimum(found, len(self._cumulative) - 1).astype(np.int64)
        return units


def share_of(values: npt.ArrayLike, partition: Partition | None) -> npt.NDArray[np.float64]:
    """The elements of `values` (float `[num_units]`) that belong to the units of a share."""
    array = np.asarray(values, np.float64)
    return array if partition is None else array[all_units(len(array), partition)]


def all_units(num_units: int, partition: Partition | None) -> IntArray:
    """All units of a share, in order."""
    if partition is None:
        return np.arange(num_units)
    return partition.units(np.arange(partition.length(num_units)))


def order_file(directory: Directory, plan: PassPlan) -> str:
    """The path of the units that are kept of a pass."""
    version = "-" + xxhash.xxh3_64_hexdigest(plan.rule.encode()) if plan.kind == "mixture" else ""
    return directory.worker_file(f"order-{plan.ordinal}{version}.npy")


def load_order(directory: Directory, plan: PassPlan, weights: npt.ArrayLike | None = None) -> UnitOrder:
    """The order of a pass; `weights` are for the kind "weighted"."""
    listed = np.load(order_file(directory, plan), mmap_mode="r") if plan.has_file else None
    return UnitOrder(plan, weights if plan.kind == "weighted" else None, listed)


def is_known(directory: Directory, plan: PassPlan) -> bool:
    """True unless units of `plan` are kept in a file, and that is gone."""
    return not plan.has_file or os.path.isfile(order_file(directory, plan))


def is_whole(ranges: Offsets) -> bool:
    """True if the ranges together cover the whole unit."""
    return not gaps(ranges, 0)


def gaps(ranges: Offsets, start: int) -> list[tuple[int, int]]:
    """The ranges of a unit from the offset `start` on that lie outside `ranges`."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if first > start:
            found.append((start, first))
        start = max(start, stop)
    if start < END:
        found.append((start, END))
    return found


def intersection(one: Offsets, other: Offsets) -> Offsets:
    """The ranges of offsets that lie both in `one` and in `other`."""
    return gaps([*gaps(one, 0), *gaps(other, 0)], 0)


def is_covered(ranges: Offsets, offset: int) -> bool:
    """True if the sample at `offset` lies in one of the ranges."""
    return any(start <= offset < stop for start, stop in ranges)
