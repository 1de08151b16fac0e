"""The shards that new samples replace, compared with a model that keeps every sample in a set."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachestream.schema import Span, span_array
from cachestream.storage.tables import OutdatedShard
from cachestream.worker.order import END
from cachestream.worker.outdated import Outdated, pieces_of, whole_units

UNITS, SAMPLES = 5, 3  # offset SAMPLES stands for whatever would come after
PLACES = st.tuples(st.integers(0, UNITS - 1), st.integers(0, SAMPLES)) | st.just((UNITS, 0))
SPANS = st.lists(
    st.tuples(PLACES, PLACES).map(lambda two: Span(min(two), max(two))).filter(lambda s: s.start < s.stop),
    min_size=1,
    max_size=3,
)


def samples(spans: list[Span]) -> set[tuple[int, int]]:
    places = [(unit, offset) for unit in range(UNITS) for offset in range(SAMPLES + 1)]
    return {place for place in places if any(span.start <= place < span.stop for span in spans)}


@given(st.lists(SPANS, max_size=4), SPANS)
def test_shards_that_hold_some_of_the_new_samples_are_found_and_no_others(
    shards: list[list[Span]], new: list[Span]
) -> None:
    tables = [np.insert(pieces_of(span_array(spans)), 3, key, axis=1) for key, spans in enumerate(shards)]
    rows = {key: OutdatedShard(key, 1, 10, 1, span_array(spans)) for key, spans in enumerate(shards)}
    outdated = Outdated(rows, np.concatenate([np.empty((0, 4), np.int64), *tables]))
    found = outdated.holding(pieces_of(span_array(new)))
    assert sorted(found) == [key for key, spans in enumerate(shards) if samples(spans) & samples(new)]
    assert set(outdated.units.tolist()) == {unit for spans in shards for unit, _ in samples(spans)}
    outdated.forget(found)
    assert outdated.holding(pieces_of(span_array(new))) == []


def test_shards_of_which_no_unit_can_be_read_go_one_by_one_as_others_come() -> None:
    rows = {key: OutdatedShard(key, 10, 100, 0, np.empty((0, 4), np.int64)) for key in (3, 4, 5)}
    outdated = Outdated(rows, np.array([[-1, 0, END, 4], [7, 0, END, 5]]))
    pieces = whole_units([1])
    assert outdated.replaced_by(pieces, 9) == []
    outdated.forget([], 9)
    assert outdated.replaced_by(pieces, 1) == [3]
    outdated.forget([3], 1)
    assert outdated.replaced_by(whole_units([7]), 20) == [5, 4], "one place for each ten"
    assert outdated.fewest([5, 4], 100) == [5]
