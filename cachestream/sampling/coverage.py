"""What is cached already: from the spans of earlier passes to the samples of a unit that need no fetch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from cachestream.model import IntArray, Span
from cachestream.sampling.order import Order
from cachestream.sampling.renamed import EarlierOrder

__all__ = [
    "END",
    "AnyOrder",
    "Coverage",
    "Offsets",
    "gaps",
    "in_both",
    "is_covered",
    "is_whole",
    "merge_spans",
]

END: Final = 1 << 62  # an offset past the last sample of any unit

AnyOrder = Order | EarlierOrder
Offsets = Sequence[tuple[int, int]]


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """`spans` in order, those that touch or overlap joined."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged


class _PassCoverage:
    """The spans of one pass, asked by position."""

    def __init__(self, order: AnyOrder, spans: list[Span]) -> None:
        self._order = order
        merged = merge_spans(spans)
        # Positions that are covered from their first sample to their last, as ranges.
        starts = [span.start[0] + (span.start[1] > 0) for span in merged]
        self._starts = np.array(starts, np.int64)
        self._stops = np.array([span.stop[0] for span in merged], np.int64)
        self._partial: dict[int, list[tuple[int, int]]] = {}
        for span in merged:
            (first, offset), (last, until) = span.start, span.stop
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
    """Which samples of a unit the cache holds, from whichever pass they came."""

    def __init__(self, passes: Mapping[Order, list[Span]] | Mapping[AnyOrder, list[Span]]) -> None:
        self._passes = [_PassCoverage(order, spans) for order, spans in passes.items()]

    def of(self, units: IntArray) -> list[Offsets]:
        """For each unit the ranges [start, stop) of its samples' offsets that are cached."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(len(units))]
        for covered in self._passes:
            covered.add(units, found)
        return [tuple(ranges) for ranges in found]


def is_whole(ranges: Offsets) -> bool:
    """Whether the ranges together are the whole unit."""
    return not gaps(ranges, 0)


def gaps(ranges: Offsets, start: int) -> list[tuple[int, int]]:
    """What of a unit lies outside the ranges, from the offset `start` on."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if first > start:
            found.append((start, first))
        start = max(start, stop)
    if start < END:
        found.append((start, END))
    return found


def in_both(one: Offsets, other: Offsets) -> Offsets:
    """The ranges of what lies in both."""
    return gaps([*gaps(one, 0), *gaps(other, 0)], 0)


def is_covered(ranges: Offsets, offset: int) -> bool:
    """Whether the sample at `offset` lies in one of the ranges."""
    return any(start <= offset < stop for start, stop in ranges)
