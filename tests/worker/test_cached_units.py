"""The cached ranges of a unit, compared with a model that keeps every sample in a set."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.schema import Span, span_array, spans_of
from cachestream.storage.filling import CachedSpans
from cachestream.worker.cached_units import Coverage, held_elsewhere, merge_spans
from cachestream.worker.order import END, PassPlan, UnitOrder, gaps, is_covered, is_whole

UNITS = 6
SAMPLES = 4  # in each unit; the end of a unit is told by a span up to the next position


def order(ordinal: int) -> UnitOrder:
    return UnitOrder(PassPlan("shuffle", 1, ordinal, UNITS, "", UNITS))


# A place in a pass: before sample `offset` of the unit at `position`; (position, 0) ends the unit before.
PLACES = st.tuples(st.integers(0, UNITS - 1), st.integers(0, SAMPLES)) | st.just((UNITS, 0))
SPANS = st.lists(
    st.tuples(PLACES, PLACES).map(lambda two: Span(min(two), max(two))).filter(lambda s: s.start < s.stop),
    max_size=8,
)


def held(spans: Sequence[Span]) -> set[tuple[int, int]]:
    """The (position, offset) that `spans` hold; offset SAMPLES stands for whatever would come after."""
    places = [(position, offset) for position in range(UNITS) for offset in range(SAMPLES + 1)]
    return {place for place in places if any(span.start <= place < span.stop for span in spans)}


@pytest.mark.e2e
@given(SPANS)
def test_merged_spans_hold_the_same_and_neither_touch_nor_overlap(spans: list[Span]) -> None:
    merged = spans_of(merge_spans(span_array(spans)).tolist())
    assert held(merged) == held(spans)
    assert all(one.stop < other.start for one, other in itertools.pairwise(merged))


@pytest.mark.e2e
@given(st.lists(SPANS, min_size=1, max_size=3))
def test_coverage_tells_of_every_sample_whether_some_pass_holds_it(passes: list[list[Span]]) -> None:
    coverage = Coverage({order(ordinal): span_array(spans) for ordinal, spans in enumerate(passes)})
    units = np.arange(UNITS)
    found = coverage.of(units)
    for unit in units.tolist():
        ranges = found[unit]
        samples = set()
        for ordinal, spans in enumerate(passes):
            position = int(order(ordinal).positions(np.array([unit]))[0])
            samples |= {offset for place, offset in held(spans) if place == position}
        for offset in range(SAMPLES):
            assert is_covered(ranges, offset) == (offset in samples), (unit, offset)
        assert is_whole(ranges) == (samples == set(range(SAMPLES + 1))), unit


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9) | st.just(END)), max_size=5).map(
        lambda ranges: [(a, b) for a, b in ranges if a < b]
    ),
    st.integers(0, 10),
)
def test_gaps_are_exactly_what_the_ranges_leave_out(ranges: list[tuple[int, int]], start: int) -> None:
    found = gaps(ranges, start)
    for offset in [*range(12), END - 1]:
        assert is_covered(found, offset) == (offset >= start and not is_covered(ranges, offset))
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))


def test_nothing_is_covered_without_spans() -> None:
    found = Coverage({order(0): span_array([])}).of(np.arange(3))
    assert [found[place] for place in range(3)] == [(), (), ()]
    assert not is_whole(())


def test_a_unit_whose_parts_lie_in_different_passes_is_whole() -> None:
    """Else a unit half evicted and fetched again would be read in every pass to come."""
    first, second = order(0), order(1)
    units = np.array([2])
    one, other = int(first.positions(units)[0]), int(second.positions(units)[0])
    spans = {first: [Span((one, 3), (one + 1, 0))], second: [Span((other, 0), (other, 3))]}
    assert is_whole(Coverage({order: span_array(held) for order, held in spans.items()}).of(units)[0])


def test_of_a_pass_that_first_read_units_of_another_transform_nothing_tells_which_ones_it_holds() -> None:
    """Its file has them; so any may be held."""
    plan = PassPlan("sequential", 1, 1, UNITS, "", UNITS)
    other = PassPlan("sequential", 1, 0, UNITS, "", UNITS + 2, again=2)
    cached = CachedSpans("", {1: other, 2: plan}, ({1: span_array([Span((0, 0), (2, 0))])},))
    assert held_elsewhere(cached, plan, np.arange(UNITS)).all()
