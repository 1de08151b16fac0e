"""An integer beside a float is a float, whenever the first float comes, and no sample is left out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream import Cache
from cachestream.errors import SchemaMismatchError
from cachestream.schema import Field, Schema
from cachestream.tools.refetching import refetch
from cachestream.worker.sampling.encode import to_record
from cachestream.worker.sampling.packer import Packer
from tests.worker.sources import Gated, LateFloats
from tests.worker.support import DEADLINE_S, failures_of, only_once, wait_until

# --- the pure function

NUMBERS = [Field("x", "tensor", dtype, 0, ()) for dtype in ("int64", "float64", "int32", "float32", "bool")]
OTHERS = [
    Field("x", "tensor", "int64", 1, (3,)),
    Field("x", "tensor", "float64", 1, (3,)),
    Field("x", "tensor", "float64", 1, None),
    Field("x", "str", "uint8", 1, None),
]
fields = st.sampled_from(NUMBERS + OTHERS)


def merged(*fields: Field) -> Field | None:
    """The field that covers all; None if there is none."""
    found, *more = fields
    try:
        for field in more:
            found = found.merge(field)
    except SchemaMismatchError:
        return None
    return found


@given(fields, fields, fields)
def test_the_order_in_which_fields_come_makes_no_difference(one: Field, two: Field, three: Field) -> None:
    assert merged(one, one) == one
    assert merged(one, two) == merged(two, one)
    covering = merged(one, two, three)
    assert covering == merged(two, three, one) == merged(three, one, two)
    assert covering is None or merged(covering, one) == covering


def test_numbers_of_64_bits_alone_are_widened_once_they_are_published() -> None:
    integer, real, *other = NUMBERS
    assert merged(integer, real) == real
    assert [merged(field, real) for field in other] == [None] * 3
    assert merged(OTHERS[0], OTHERS[1]) is None
    assert OTHERS[0].merge(OTHERS[1], widen=True) == OTHERS[1], "among the first samples arrays are, too"


def test_an_array_without_elements_takes_any_dtype_and_gives_none() -> None:
    empty, integers, real, ragged, _ = Field("x", "tensor", "float64", 1, (0,)), *OTHERS
    for field in (integers, real, ragged):
        found = {empty.merge(field, widen=True), field.merge(empty, widen=True)}
        assert found == {Field("x", "tensor", field.dtype, 1, None)}
    assert empty.merge(empty, widen=True) == empty


def test_an_empty_list_among_lists_of_integers_leaves_them_integers() -> None:
    packer, known = Packer(), Schema((Field("x", "tensor", "int64", 1, None),))
    for value in ([1, 2], [], [3]):
        packer.add(to_record({"x": np.array(value)}, "key"), known)
    assert [field.dtype for field in packer.schema.fields] == ["int64"]
    assert packer.num_samples == 3


# --- a shard

numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False)  # beyond, no float holds all integers


@given(st.lists(numbers, min_size=1, max_size=20), st.sampled_from([None, "int64", "float64"]))
def test_a_shard_holds_floats_as_soon_as_one_of_its_numbers_is_one(
    values: list[int | float], known: str | None
) -> None:
    packer = Packer()
    schema = None if known is None else Schema((Field("x", "tensor", known, 0, ()),))
    for value in values:
        packer.add(to_record({"x": value}, "key"), schema)
    dtype = np.int64 if all(type(value) is int for value in values) else np.float64
    assert [field.dtype for field in packer.schema.fields] == [dtype.__name__]
    (column,) = [column for column in packer.content({}).columns if column.name == "x"]
    assert column.data.view(dtype).tolist() == [dtype(value) for value in values]


# --- a worker


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", size_limit="50MB", min_free=0) as cache:
        yield cache
        assert cache.verify().ok


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_floats_that_come_after_2000_lines_of_integers_are_trained_on(
    cache: Cache, tmp_path: Path, kind: str
) -> None:
    integers, later = list(range(2000)), [*(n + 0.5 for n in range(100)), *range(2000, 2100)]
    for name, scores in (("a", integers), ("b", later)):
        lines = [json.dumps({"score": score}) if kind == "jsonl" else str(score) for score in scores]
        head = [] if kind == "jsonl" else ["score"]
        (tmp_path / f"{name}.{kind}").write_text("\n".join(head + lines) + "\n")
    come = tmp_path / "come"
    source = Gated(cs.LinesSource(f"{tmp_path}/*.{kind}"), str(come))
    with cs.start_worker(cache, source, num_workers=1, order="sequential") as worker:
        wait_until(lambda: cache.num_samples == len(integers), "the integers are cached")
        with cs.EpochLoader(cache, 50) as loader:
            batches = iter(loader)
            first = next(batches)["score"]
            come.touch()
            assert worker.wait(DEADLINE_S)
            before = [first, *(batch["score"] for batch in batches)]
            assert {str(batch.dtype) for batch in before} == {"torch.int64"}
            assert sorted(n for batch in before for n in batch.tolist()) == integers
    assert failures_of(cache) == {}
    assert str(cache.schema) == "{score: float64[]}"
    assert trained(cache) == sorted(integers + later)


def trained(cache: Cache) -> list[float]:
    """The sorted scores of an epoch, which are floats."""
    with cs.EpochLoader(cache, 32, drop_last=False) as loader:
        batches = [batch["score"] for batch in loader]
    assert {str(batch.dtype) for batch in batches} == {"torch.float64"}
    return sorted(score for batch in batches for score in batch.tolist())


@pytest.mark.e2e
@pytest.mark.parametrize("in_rows", [True, False])
def test_processes_that_race_for_the_first_float_lose_no_sample(
    cache: Cache, tmp_path: Path, in_rows: bool
) -> None:
    gate = tmp_path / "gate"
    source = LateFloats(80, gate=str(gate))
    options: dict[str, Any] = {"order": "sequential", "transform": None if in_rows else dict}
    with cs.start_worker(cache, source, num_workers=4, shard_size="40KB", **options) as worker:
        wait_until(lambda: cache.schema, "the first integers are cached")
        assert str(cache.schema) == "{score: int64[], y: float64[999]}"
        gate.touch()
        assert worker.wait(DEADLINE_S)
    assert failures_of(cache) == {}
    assert only_once(cache) == source.keys()
    assert trained(cache) == source.scores


@pytest.mark.e2e
def test_held_out_samples_are_widened_with_the_others(cache: Cache) -> None:
    source = LateFloats(120)
    found = []
    with cs.start_worker(cache, source, num_workers=2, order="sequential", holdout=0.1) as worker:
        assert worker.wait(DEADLINE_S)
    for split in ("train", "held-out"):
        with cs.EpochLoader(cache, 16, drop_last=False, split=split) as loader:
            found += [score for batch in loader for score in batch["score"].tolist()]
    assert failures_of(cache) == {}
    assert sorted(found) == source.scores


@pytest.mark.e2e
def test_shards_of_integers_and_of_floats_come_back_byte_for_byte_and_are_known_to_a_rebuilt_catalogue(
    cache: Cache, tmp_path: Path
) -> None:
    source = LateFloats(60)
    with cs.start_worker(cache, source, num_workers=1, order="sequential", shard_size="40KB") as worker:
        assert worker.wait(DEADLINE_S)
    assert failures_of(cache) == {}
    with cs.EpochLoader(cache, 8, drop_last=False, record=tmp_path / "run") as loader:
        batches = [batch["score"].tolist() for batch in loader]
    cache.evict(0)
    report = refetch(tmp_path / "run", cache, source)
    assert report.ok, report.failed
    with cs.EpochLoader(cache, 8, replay=tmp_path / "run") as loader:
        assert [batch["score"].tolist() for batch in loader] == batches
    os.unlink(cache.catalogue.path)
    with Cache(cache.path) as again:
        assert str(again.schema) == "{score: float64[], y: float64[999]}"
        assert trained(again) == source.scores
