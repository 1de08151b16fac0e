"""Padded and nested fields hold what the lists hold: every dtype, shape and kind, gathered from any shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream import Cache, ConfigError, EpochLoader, Padded
from cachestream.schema import Schema
from cachestream.training.batches.gather import Gatherer, layouts_of
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.batches.memory import BufferPool
from cachestream.training.batches.transfer import map_tensors
from tests.support.caches import add_shard
from tests.training.conftest import NewCache

CacheOf = Callable[[list[Any], list[int]], Cache]
DTYPES = ("uint8", "bool", "int16", "float16", "bfloat16", "float32", "int64", "complex64", "complex128")


def sample(number: int, lengths: tuple[int, int]) -> dict[str, Any]:
    """Values that differ in every element, of lengths that vary."""
    first, second = lengths
    rng = np.random.default_rng(number)
    fields: dict[str, Any] = {
        f"v_{dtype}": torch.from_numpy(rng.integers(0, 2 if dtype == "bool" else 99, first)).to(
            getattr(torch, dtype)
        )
        for dtype in DTYPES
    }
    return fields | {
        "rows": torch.from_numpy(rng.random((second, 3), np.float32)),
        "image": torch.from_numpy(rng.integers(0, 255, (3, first, second), np.uint8)),
        "long": torch.from_numpy(rng.integers(0, 9999, 700 + 40 * first)),
        "text": "zwölf" * second,
        "data": bytes(rng.integers(0, 255, first, np.uint8)),
        "fixed": torch.full((2, 2), number),
    }


LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=12)


def as_samples(value: Any) -> list[torch.Tensor]:
    """The samples of a padded or a nested field, and that there is nothing beside them."""
    if isinstance(value, Padded):
        sizes = value.lengths.reshape(len(value.lengths), -1).tolist()
        parts = [row[tuple(map(slice, size))] for row, size in zip(value.values, sizes, strict=True)]
        assert torch.equal(value.mask.sum(), torch.tensor(sum(part.numel() for part in parts)))
        assert not value.values[~value.mask].any()
        return parts
    assert value.layout == torch.jagged
    return list(value.unbind())


def as_tensor(value: torch.Tensor | str | bytes) -> torch.Tensor:
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        return (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
    return value


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.e2e
@pytest.mark.parametrize("layout", ["padded", "nested"])
@given(lengths=LENGTHS, cut=st.integers(0, 12), data=st.data())
def test_every_field_holds_what_the_lists_hold(
    layout: str, tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], cut: int, data: Any
) -> None:
    samples = [sample(number, both) for number, both in enumerate(lengths)]
    with Cache(tmp_path_factory.mktemp("cache"), size_limit="100MB", min_free=0) as cache:
        for some in (samples[:cut], samples[cut:]):
            if some:
                add_shard(cache, ((str(i), s) for i, s in enumerate(some)))
        snapshot, lease = cache.take_snapshot()
        maps = EpochMaps(snapshot)
        maps.open(np.arange(snapshot.num_shards))
        lease.release()
    varying = {field.name for field in snapshot.schema.fields if field.shape is None}
    names = varying - ({"image"} if layout == "nested" else set())
    pool = BufferPool(4)
    where = np.array(data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=9)), np.int64)
    gatherer = Gatherer(maps, pool, ragged=dict.fromkeys(names, layout))  # type: ignore[arg-type]
    for _ in range(2):  # the second time in memory that was used before
        got = gatherer.gather(*maps.locate(where))
        for name in names:
            for row, i in zip(as_samples(got[name]), where.tolist(), strict=True):
                assert same(row, as_tensor(samples[i][name])), name
        del got


def ragged_cache(cache_of: CacheOf) -> Cache:
    return cache_of([sample(i, (i % 7, i % 4)) for i in range(24)], [10, 1, 13])


def test_a_mapping_names_fields_and_those_come_as_named_also_while_they_have_one_shape(
    cache_of: CacheOf,
) -> None:
    cache = ragged_cache(cache_of)
    ragged = {"text": "padded", "rows": "nested", "fixed": "padded", "data": "list"}
    with EpochLoader(cache, 6, ragged=ragged, shuffle=False) as loader:  # type: ignore[arg-type]
        batch = next(iter(loader))
    assert isinstance(batch["image"], list)
    assert isinstance(batch["data"], list)
    assert bytes(as_samples(batch["text"])[3].tolist()).decode() == "zwölf" * 3
    assert batch["rows"].shape[0] == 6
    values, lengths = batch["fixed"]
    assert torch.equal(values[:, 0, 0], torch.arange(6))
    assert lengths.tolist() == [[2, 2]] * 6


def test_tuples_and_bare_samples_keep_their_form(cache_of: CacheOf) -> None:
    pairs = cache_of([(torch.arange(i % 3), i) for i in range(8)], [8])
    with EpochLoader(pairs, 8, shuffle=False, ragged="padded") as loader:
        (values, lengths), numbers = next(iter(loader))
    assert lengths.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert values.tolist()[2] == [0, 1]
    assert numbers.tolist() == list(range(8))
    bare = cache_of([torch.arange(1 + i % 3) for i in range(8)], [8])
    with EpochLoader(bare, 8, shuffle=False, ragged="nested") as loader:
        nested = next(iter(loader))
    assert nested.offsets().tolist() == [0, 1, 3, 6, 7, 9, 12, 13, 15]


def test_a_field_named_nested_may_have_one_shape(cache_of: CacheOf) -> None:
    cache = cache_of([{"x": torch.full((2, 3), i)} for i in range(8)], [8])
    with EpochLoader(cache, 4, shuffle=False, ragged={"x": "nested"}) as loader:
        parts = [part for batch in loader for part in as_samples(batch["x"])]
    assert all(torch.equal(part, torch.full((2, 3), i)) for i, part in enumerate(parts))


@pytest.mark.e2e
def test_batches_that_are_held_stay_as_they_are(cache_of: CacheOf) -> None:
    cache = ragged_cache(cache_of)
    loader = EpochLoader(cache, 4, ragged="nested", seed=1)
    with loader, pytest.raises(ConfigError, match="'image' varies in more than its first dimension"):
        next(iter(loader))
    with EpochLoader(cache, 4, ragged={"long": "nested", "rows": "padded"}, seed=1) as loader:
        held = list(loader)
        copies = [(b["long"].values().clone(), b["rows"].values.clone()) for b in held]
        for _ in range(3):
            for batch in loader:
                batch["long"].values().zero_()
                batch["rows"].values.zero_()
        assert all(
            torch.equal(b["long"].values(), long) and torch.equal(b["rows"].values, rows)
            for b, (long, rows) in zip(held, copies, strict=True)
        )


@pytest.mark.parametrize(
    ("ragged", "message"),
    [("stacked", "ragged='stacked'"), ({"x": "dense"}, "ragged="), (3, "ragged=3")],
    ids=str,
)
def test_other_layouts_are_refused(ragged: Any, message: str, new_cache: NewCache) -> None:
    with pytest.raises(ConfigError, match=message):
        EpochLoader(new_cache(1, 8), 4, ragged=ragged)


@pytest.mark.parametrize(("name", "message"), [("y", "'y'"), ("number", "'number', a number")])
def test_names_that_cannot_vary_are_refused(name: str, message: str, new_cache: NewCache) -> None:
    loader = EpochLoader(new_cache(1, 8), 4, ragged={name: "padded"})
    with loader, pytest.raises(ConfigError, match=message):
        next(iter(loader))


def test_only_what_varies_is_laid_out_otherwise_unless_it_is_named() -> None:
    schema = Schema.from_json(
        '{"container":"dict","fields":['
        '{"name":"a","kind":"tensor","dtype":"int64","ndim":1,"shape":null},'
        '{"name":"b","kind":"bytes","dtype":"uint8","ndim":1,"shape":null},'
        '{"name":"f","kind":"tensor","dtype":"int64","ndim":1,"shape":[3]},'
        '{"name":"s","kind":"str","dtype":"uint8","ndim":1,"shape":null}]}'
    )
    assert layouts_of("padded", schema) == {"a": "padded", "b": "padded"}
    assert layouts_of({"s": "nested", "a": "list"}, schema) == {"s": "nested"}
    assert layouts_of("list", schema) == {}


def test_what_moves_batches_moves_their_parts() -> None:
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 2, 5]))
    batch = {"p": Padded(torch.ones(2, 2), torch.tensor([1, 2])), "n": nested, "t": (torch.ones(1),)}
    moved = map_tensors(batch, lambda tensor: tensor + 1)
    assert isinstance(moved["p"], Padded)
    assert moved["p"].values.tolist() == [[2, 2], [2, 2]]
    assert moved["n"].values().tolist() == [1, 2, 3, 4, 5]
    assert cs.Padded is Padded
