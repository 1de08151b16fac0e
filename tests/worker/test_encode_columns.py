"""Samples in columns are stored as the same samples one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cachestream.errors import SampleError, SchemaMismatchError
from cachestream.sources.base import Rows
from cachestream.storage.shard import encode_header
from cachestream.worker.encode import to_record, to_table
from cachestream.worker.packer import Packer

DTYPES = (
    hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | hnp.boolean_dtypes()
)


@st.composite
def any_rows(draw: st.DrawFn) -> Rows:
    count = draw(st.integers(1, 9))
    texts = st.lists(st.text(max_size=5), min_size=count, max_size=count)
    columns = st.one_of(
        hnp.arrays(
            DTYPES, hnp.array_shapes(max_dims=2, min_side=0, max_side=3).map(lambda shape: (count, *shape))
        ),
        hnp.arrays(DTYPES, (count,)),
        texts,
        st.lists(st.binary(max_size=6000), min_size=count, max_size=count),
    )
    fields = draw(st.dictionaries(st.sampled_from(["x", "a b", "é", "label"]), columns, min_size=1))
    return Rows(draw(texts), fields)


def content(packer: Packer) -> tuple[bytes, list[tuple[str, bytes]]]:
    shard = packer.content({})
    return encode_header(shard), [(column.name, column.data.tobytes()) for column in shard.columns]


@given(any_rows(), st.data())
def test_a_table_is_packed_as_its_samples_are(rows: Rows, data: st.DataObject) -> None:
    """In one piece, cut anywhere, or some of its rows."""
    table = to_table(rows)
    indices = data.draw(st.lists(st.integers(0, len(table) - 1), unique=True, min_size=1).map(sorted))
    cut = data.draw(st.integers(0, len(indices)))
    packer, expected = Packer(), Packer()
    taken = table.take(indices)
    for part in (taken.cut(0, cut), taken.cut(cut, len(indices))):
        if len(part):
            packer.add_table(part, None)
    samples = list(rows.samples)
    for index in indices:
        expected.add(samples[index][0], to_record(samples[index][1]), None)
    assert content(packer) == content(expected)
    assert (packer.num_samples, packer.size_bytes) == (expected.num_samples, expected.size_bytes)
    assert taken.nbytes + 8 * len(indices) == packer.size_bytes


def test_samples_and_tables_share_a_shard() -> None:
    packer = Packer()
    packer.add("a", to_record({"x": np.float32(1)}), None)
    packer.add_table(to_table(Rows(["b", "c"], {"x": np.array([2, 3], np.float32)})), None)
    packer.add("d", to_record({"x": np.float32(4)}), None)
    (_, keys), *_ = [pair for pair in content(packer)[1] if pair[0] == "__key__"]
    assert keys == b"abcd"
    assert packer.content({}).columns[1].data.view(np.float32).tolist() == [1, 2, 3, 4]


def test_a_table_of_other_fields_does_not_fit() -> None:
    packer = Packer()
    packer.add("a", to_record({"x": np.float32(1)}), None)
    with pytest.raises(SchemaMismatchError, match="'y'"):
        packer.add_table(to_table(Rows(["b"], {"y": np.array([2], np.float32)})), None)
    assert packer.num_samples == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"x": np.array(["2020-01-01"], "datetime64[D]")}, "'x' is an array of dtype datetime64"),
        ({"x": [1]}, "'x': rows hold arrays, or lists of str alone or bytes alone"),
        ({"x": np.zeros(2)}, "'x' has 2 values for 1 keys"),
        ({"a#b": np.zeros(1)}, "'a#b'"),
        ({}, "no fields"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(fields: Any, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        to_table(Rows(["key"], fields))


def test_keys_that_are_no_str_are_refused() -> None:
    keys: Any = ["0", 1]
    with pytest.raises(SampleError, match="a key of its rows is no str"):
        to_table(Rows(keys, {"x": np.zeros(2)}))
