"""What an actor has read arrives unit by unit, whatever was merged on the way."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestream.ray.read_actor import (
    Failure,
    Outgoing,
    arrived,
    chunks_of_units,
)
from cachestream.worker.sampling.encode import SampleChunk, Table, decode_key, to_record

Read = tuple[int, int, Any]  # an index, an offset, and a sample or a failure

SAMPLES = st.one_of(
    st.builds(
        lambda n, fill: {"x": np.full(n, fill, np.uint8)}, st.sampled_from([3, 40_000]), st.integers(0, 9)
    ),
    st.builds(lambda text: {"x": text, "y": 1.5}, st.text(max_size=5)),
    st.just(Failure("ValueError", "no", Exception)),
)
UNITS = st.lists(st.lists(SAMPLES, max_size=4), min_size=1, max_size=8)


def sent(units: list[list[Any]]) -> list[Read]:
    """Send the samples of `units` as an actor does; returns what has arrived, each unit before its end."""
    out = Outgoing()
    for index, samples in enumerate(units):
        for offset, sample in enumerate(samples):
            if isinstance(sample, Failure):
                out.add(index, SampleChunk((offset,), (f"{index}/{offset}",), (sample,), 1))
            else:
                out.add_record(index, offset, to_record(sample, f"{index}/{offset}"))
        out.add_end(index)
    result = pickle.loads(pickle.dumps(out.take(1.0, ())))
    assert [index for index, _ in result.ends] == list(range(len(units)))
    assert not out.nbytes
    found: list[Read] = []
    for indices, chunk in result.chunks:
        for index, part in chunks_of_units(indices, arrived(chunk)):
            assert part.nbytes
            found += [(index, offset, one) for offset, one in zip(part.offsets, rows(part), strict=True)]
    return found


def rows(chunk: SampleChunk) -> list[Any]:
    """The samples of a chunk in a form that can be compared, each with its key."""
    if not isinstance(chunk.samples, Table):
        return [(key, one.message) for key, one in zip(chunk.keys, chunk.samples, strict=True)]
    table = chunk.samples
    values = zip(*([bytes(value) for value in column] for column in table.columns), strict=True)
    return [(decode_key(key), table.schema.names, one) for key, one in zip(table.keys, values, strict=True)]


@pytest.mark.e2e
@settings(max_examples=25)
@given(UNITS)
def test_samples_arrive_in_their_units_and_in_order(units: list[list[Any]]) -> None:
    expected: list[Read] = []
    for index, samples in enumerate(units):
        for offset, sample in enumerate(samples):
            key = f"{index}/{offset}"
            chunk = (
                SampleChunk((offset,), (key,), (sample,), 1)
                if isinstance(sample, Failure)
                else SampleChunk((offset,), (), to_record(sample, key), 1)
            )
            expected.append((index, offset, rows(chunk)[0]))
    assert sent(units) == expected
