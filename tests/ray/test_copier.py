"""Parts of shards: the samples of some positions are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.ray.copier import without
from cachestream.schema import Span
from cachestream.shard_format import LENGTH_BYTES, ShardContent, ShardData, encode_header
from cachestream.worker.sampling.encode import to_record
from cachestream.worker.sampling.packer import Packer


def opened(content: ShardContent) -> ShardData:
    """The shard of the bytes that `content` is written as; all checksums match."""
    header = encode_header(content)
    data = np.frombuffer(header + b"".join(column.data.tobytes() for column in content.columns), np.uint8)
    shard = ShardData(header[LENGTH_BYTES:], data)
    shard.check()
    return shard


def sample(position: int, offset: int) -> dict[str, Any]:
    return {
        "fixed": np.full((2, 3), position, np.float32),
        "pair": np.array([position, offset], np.uint16),
        "ragged": np.arange((position + offset) % 4, dtype=np.int64),
        "text": "word " * offset,
        "raw": bytes([position, offset]),
    }


def shard_of(counts: dict[int, int], **fill: Any) -> ShardData:
    """A shard with so many samples of each position, in this order."""
    packer, ends, spans = Packer(), list[tuple[int, int]](), list[list[int]]()
    for position, count in counts.items():
        for offset in range(count):
            packer.add(to_record(sample(position, offset), f"{position}/{offset}"), None)
        ends.append((position, packer.num_samples))
        if spans and spans[-1][2:] == [position, 0]:
            spans[-1][2] = position + 1
        else:
            spans.append([position, 0, position + 1, 0])
    return opened(packer.content({"plan": "p", "ends": ends} | fill | {"spans": spans}))


def positions_of(spans: Any) -> list[int]:
    return [position for span in spans for position in range(span.start[0], span.stop[0])]


@pytest.mark.e2e
@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 3), min_size=1).filter(
        lambda found: any(found.values())
    ),
    st.sets(st.integers(0, 9)),
)
def test_a_part_has_the_samples_of_the_other_positions(counts: dict[int, int], gone: set[int]) -> None:
    shard = shard_of(counts)
    kept = [(position, offset) for position in counts for offset in range(counts[position])]
    kept = [one for one in kept if one[0] not in gone]
    found = without(shard, gone)
    if not kept:
        assert found is None
        return
    assert found is not None
    content, spans = found
    part = opened(content)
    assert part.keys() == [f"{position}/{offset}" for position, offset in kept]
    for field in part.schema.fields:
        values = part.values(field, 0, part.num_samples)
        for value, (position, offset) in zip(values, kept, strict=True):
            assert np.array_equal(value, sample(position, offset)[field.name])
    assert positions_of(spans) == [position for position in counts if position not in gone]
    assert list(part.fill)[-1] == "spans"
    if gone:
        rest = set(counts) - gone - {kept[0][0]}
        once_more = without(part, rest)
        assert once_more is not None
        assert opened(once_more[0]).keys() == [f"{p}/{offset}" for p, offset in kept if p == kept[0][0]]


@pytest.mark.e2e
@given(st.sets(st.integers(0, 12)))
def test_spans_are_cut_at_positions_and_keep_their_offsets(gone: set[int]) -> None:
    packer = Packer()
    packer.add(to_record(1, "key"), None)
    spans = [[2, 3, 5, 0], [7, 0, 8, 2]]
    shard = opened(packer.content({"ends": [(20, 1)], "spans": spans}))
    found = without(shard, gone | {30})
    assert found is not None
    whole = {2: (3, 99), 3: (0, 99), 4: (0, 99), 7: (0, 99), 8: (0, 2)}
    expected = {position: offsets for position, offsets in whole.items() if position not in gone}
    parts = {
        position: (
            span.start[1] if position == span.start[0] else 0,
            span.stop[1] if span.stop[0] == position else 99,
        )
        for span in found[1]
        for position in range(span.start[0], span.stop[0] + (span.stop[1] > 0))
    }
    assert parts == expected
    assert all(span.start < span.stop for span in found[1])


@pytest.mark.parametrize("ends", [None, [], [(0, 1)], [(0, 3), (1, 2)]])
def test_a_shard_that_does_not_tell_its_rows_is_taken_whole_or_not_at_all(ends: Any) -> None:
    shard = shard_of({0: 1, 1: 1}, ends=ends or ())
    assert without(shard, {0}) is None
    whole = without(shard, ())
    assert whole is not None
    assert opened(whole[0]).content_hash == shard.content_hash
    assert whole[1] == (Span((0, 0), (2, 0)),)
