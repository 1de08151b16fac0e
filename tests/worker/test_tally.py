"""The progress committed with a shard: of its claims, and the spans of its samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import SampleError
from cachestream.schema import Span
from cachestream.worker.order import END, gaps, is_covered
from cachestream.worker.publisher import Tally


def test_samples_in_a_row_make_one_span_and_the_last_of_them_is_the_progress() -> None:
    tally = Tally()
    for offset in range(3):
        tally.passed(7, 10, offset, offset + 1)
    assert tally.spans == [Span((10, 0), (10, 3))]
    assert tally.progress(1).claims == ((7, 10, 3),)


def test_units_in_a_row_make_one_span() -> None:
    tally = Tally()
    for position in (10, 11, 12):
        tally.passed(7, position, 0, 1)
        tally.finished(7, position, [(1, END)])
    assert tally.spans == [Span((10, 0), (13, 0))]
    assert tally.progress(1).claims == ((7, 13, 0),)


def test_two_claims_keep_their_progress_apart() -> None:
    tally = Tally()
    tally.finished(1, 4, [(0, END)])
    tally.passed(2, 90, 0, 1)
    assert set(tally.progress(0).claims) == {(1, 5, 0), (2, 90, 1)}
    assert tally.spans == [Span((4, 0), (5, 0)), Span((90, 0), (90, 1))]


def test_a_unit_that_is_cached_elsewhere_moves_the_claim_and_adds_no_span() -> None:
    tally = Tally()
    tally.finished(1, 4, [])
    assert tally.progress(0).claims == ((1, 5, 0),)
    assert tally.spans == []
    assert tally.has_news


def test_a_shard_does_not_answer_for_what_an_earlier_shard_of_the_same_unit_holds() -> None:
    """The earlier shard may be evicted first: then its samples must be missed."""
    tally = Tally()
    tally.passed(1, 4, 0, 1)
    tally.passed(1, 4, 1, 2)
    tally = Tally()  # published in the middle of the unit
    tally.passed(1, 4, 2, 3)
    tally.finished(1, 4, [(3, END)])
    assert tally.spans == [Span((4, 2), (5, 0))]


@given(st.integers(1, 8), st.sets(st.integers(0, 7)), st.integers(0, 8), st.sets(st.integers(0, 7)))
def test_the_spans_of_a_unit_are_exactly_the_samples_that_lie_in_no_other_shard(
    count: int, cached: set[int], first: int, published_after: set[int]
) -> None:
    """As the filler does it, for a unit of `count` samples: some cached, the claim begun at `first`."""
    ranges = [(offset, offset + 1) for offset in sorted(cached)]
    tally, shards, done = Tally(), [], first
    for offset in range(count):
        if offset < first or offset in cached:
            continue
        tally.passed(1, 4, offset, offset + 1)
        done = offset + 1
        if offset in published_after:
            shards.append(list(tally.spans))
            tally = Tally()
    tally.finished(1, 4, gaps(ranges, done))
    shards.append(list(tally.spans))
    held = [
        {offset for offset in range(12) if any(s.start <= (4, offset) < s.stop for s in spans)}
        for spans in shards
    ]
    assert sum(map(len, held)) == len(set().union(*held)), "a sample in two shards"
    assert set().union(*held) == {offset for offset in range(12) if offset >= first and offset not in cached}
    assert not any(is_covered(ranges, offset) for offset in set().union(*held))


def test_failures_are_counted_by_reason_with_their_first_example() -> None:
    tally = Tally()
    tally.skipped("transform", ValueError("bad"), "a")
    tally.skipped("transform", ValueError("bad"), "b")
    tally.skipped("sample", SampleError("torn"), "c", 5)
    tally.skipped("transform", KeyError(), "d")
    found = {(row.kind, row.reason): (row.count, row.example) for row in tally.progress(0).failures}
    assert found == {
        ("transform", "ValueError: bad"): (2, "a"),
        ("sample", "torn"): (5, "c"),
        ("transform", "KeyError: no message"): (1, "d"),
    }


def test_a_reason_is_cut_before_it_fills_the_catalogue() -> None:
    tally = Tally()
    tally.skipped("transform", ValueError("x" * 10_000), "a")
    (row,) = tally.progress(0).failures
    assert len(row.reason) == 300


def test_samples_that_are_packed_dropped_or_skipped_are_done_until_the_commit() -> None:
    tally = Tally()
    tally.passed(1, 4, 0, 3)
    tally.finished(1, 4, [(3, END)])
    assert tally.done == 3
