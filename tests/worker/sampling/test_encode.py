"""Encoding, one by one or in columns: each kind of value is stored, or refused by name."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cachestream.errors import SampleError, SchemaMismatchError
from cachestream.shard_format import encode_header
from cachestream.sources.base import Rows
from cachestream.worker.sampling.encode import decode_key, encode_key, encode_keys, to_record, to_table
from cachestream.worker.sampling.packer import Packer

DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "float16", "int32", "uint32", "float32", "int64", "uint64",
    "float64", "complex64", "complex128",
]  # fmt: skip


def only(value: Any) -> tuple[str, str, tuple[int, ...] | None, bytes]:
    """Kind, dtype, shape and bytes of `value` stored as the only field of a dict."""
    record = to_record({"x": value})
    (field,), ((data,),) = record.schema.fields, record.columns
    assert isinstance(data, bytes) or (data.dtype == np.uint8 and data.ndim == 1)
    return field.kind, field.dtype, field.shape, bytes(data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_arrays_of_every_dtype_keep_dtype_shape_and_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    assert only(array) == ("tensor", dtype, shape, array.tobytes())


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_of_every_dtype_keep_dtype_shape_and_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    kind, stored, found, data = only(tensor)
    assert (kind, stored, found) == ("tensor", dtype, shape)
    assert data == tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if shape else data


@pytest.mark.e2e
@given(hnp.arrays(hnp.integer_dtypes(endianness="?") | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
                  hnp.array_shapes(max_dims=4, min_side=0, max_side=4)))  # fmt: skip
def test_arrays_in_any_layout_and_byte_order_are_stored_little_endian_in_c_order(
    array: np.ndarray[Any, Any],
) -> None:
    for view in (array, array.T, np.flip(array)):
        expected = np.ascontiguousarray(view, view.dtype.newbyteorder("<"))
        assert only(view) == ("tensor", array.dtype.newbyteorder("=").name, view.shape, expected.tobytes())


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (True, "bool"), (3, "int64"), (2.5, "float64"), (1j, "complex128"), (2**63, "uint64"),
        (np.float32(1), "float32"), (np.bool_(1), "bool"), ([1, 2], "int64"), ([[1.0], [2.0]], "float64"),
        ((1, 2), "int64"), (range(3), "int64"),
    ],
)  # fmt: skip
def test_plain_numbers_and_lists_of_them_become_tensors(value: Any, dtype: str) -> None:
    kind, found, shape, data = only(value)
    expected = np.asarray(value)
    assert (kind, found, shape, data) == ("tensor", dtype, expected.shape, expected.tobytes())


@pytest.mark.e2e
@given(st.text())
def test_text_is_stored_as_utf8_whatever_it_holds(text: str) -> None:
    assert only(text) == ("str", "uint8", None, text.encode("utf-8", "surrogatepass"))


def test_lone_surrogates_survive() -> None:
    assert only("\udcff")[3].decode("utf-8", "surrogatepass") == "\udcff"


@given(st.binary())
def test_bytes_in_any_of_their_types_are_stored_as_they_are(data: bytes) -> None:
    for value in (data, bytearray(data), memoryview(data)):
        assert only(value) == ("bytes", "uint8", None, data)


def test_text_and_bytes_of_numpy_are_stored_like_any_other() -> None:
    assert only(np.array(["été", "a"])[0]) == ("str", "uint8", None, "été".encode())
    assert only(np.array([b"a\0b"])[0]) == ("bytes", "uint8", None, b"a\0b")
    record = to_record({"x": np.bytes_(b"ab" * 5000)})
    assert to_record({"x": b"ab" * 5000}).schema == record.schema


def test_tensors_with_gradients_and_views_are_stored_by_value() -> None:
    tensor = torch.arange(6.0, requires_grad=True).reshape(2, 3).t()
    assert only(tensor) == ("tensor", "float32", (3, 2), tensor.detach().contiguous().numpy().tobytes())


def test_conjugated_and_negated_views_are_stored_by_value() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert only(tensor.conj()) == ("tensor", "complex64", (2,), np.array([1 - 2j, 3 + 4j], "c8").tobytes())
    assert only(tensor.conj().imag)[3] == np.array([-2, 4], "f4").tobytes()


def test_fields_of_a_dict_are_sorted_by_name() -> None:
    record = to_record({"b": 1, "a": "x"})
    assert record.schema.names == ("a", "b")
    assert record.schema.container == "dict"


def test_a_tuple_keeps_the_order_of_its_fields_past_ten() -> None:
    record = to_record(tuple(range(12)))
    assert record.schema.names == tuple(map(str, range(12)))
    assert record.schema.container == "tuple"
    assert record.nbytes == 12 * 8


@pytest.mark.parametrize("value", [np.ones(3), torch.ones(3), 5, "text", b"data"])
def test_a_bare_value_is_a_sample_of_one_field(value: Any) -> None:
    record = to_record(value)
    assert record.schema.names == ("0",)
    assert record.schema.container == "bare"


@pytest.mark.parametrize(
    "value",
    [
        None, {}, {"a": 1}, {1}, frozenset(), object(), print, lambda: 0, [1, "a"], [[1], [1, 2]], [None],
        np.array(["a"]), np.array([b"a"]), np.array([object()]), np.array([1], "datetime64[s]"),
        np.zeros(2, [("a", "i4")]), 2**70, dt.date(2020, 1, 1), ["a"], iter([1]),
        torch.ones(2, 2).to_sparse(), np.longdouble(1),
        torch.ones(2, device="meta"),
    ],
    ids=lambda value: type(value).__name__,  # the same in every process, for xdist
)  # fmt: skip
def test_what_cannot_be_stored_is_refused_with_the_name_of_its_field(value: Any) -> None:
    with pytest.raises(SampleError, match="wrong"):
        to_record({"fine": 1, "wrong": value})


@pytest.mark.parametrize(
    "sample", [{}, (), [], {1: 2}, {"": 1}, {"a#b": 1}, {"__key__": 1}, None, {"a": None}]
)
def test_samples_that_make_no_record_are_refused(sample: Any) -> None:
    with pytest.raises(SampleError):
        to_record(sample)


COLUMN_DTYPES = (
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
            COLUMN_DTYPES,
            hnp.array_shapes(max_dims=2, min_side=0, max_side=3).map(lambda shape: (count, *shape)),
        ),
        hnp.arrays(COLUMN_DTYPES, (count,)),
        texts,
        st.lists(st.binary(max_size=6000), min_size=count, max_size=count),
    )
    fields = draw(st.dictionaries(st.sampled_from(["x", "a b", "é", "label"]), columns, min_size=1))
    return Rows(draw(texts), fields)


def content(packer: Packer) -> tuple[bytes, list[tuple[str, bytes]]]:
    shard = packer.content({})
    return encode_header(shard), [(column.name, column.data.tobytes()) for column in shard.columns]


@pytest.mark.e2e
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
            packer.add(part, None)
    samples = list(rows.samples)
    for index in indices:
        expected.add(to_record(samples[index][1], samples[index][0]), None)
    assert content(packer) == content(expected)
    assert (packer.num_samples, packer.size_bytes) == (expected.num_samples, expected.size_bytes)
    assert taken.nbytes + 8 * len(indices) == packer.size_bytes


def test_samples_and_tables_share_a_shard() -> None:
    packer = Packer()
    packer.add(to_record({"x": np.float32(1)}, "a"), None)
    packer.add(to_table(Rows(["b", "c"], {"x": np.array([2, 3], np.float32)})), None)
    packer.add(to_record({"x": np.float32(4)}, "d"), None)
    (_, keys), *_ = [pair for pair in content(packer)[1] if pair[0] == "__key__"]
    assert keys == b"abcd"
    assert packer.content({}).columns[1].data.view(np.float32).tolist() == [1, 2, 3, 4]


def test_a_table_of_other_fields_does_not_fit() -> None:
    packer = Packer()
    packer.add(to_record({"x": np.float32(1)}, "a"), None)
    with pytest.raises(SchemaMismatchError, match="'y'"):
        packer.add(to_table(Rows(["b"], {"y": np.array([2], np.float32)})), None)
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


@pytest.mark.e2e
@given(st.lists(st.text(st.characters(exclude_categories=[]) | st.just("\0"))))
def test_many_keys_are_encoded_as_each_of_them(keys: list[str]) -> None:
    found = encode_keys(keys)
    assert found == [encode_key(key) for key in keys]
    assert [decode_key(key) for key in found] == keys
