"""Samples come out of a cache as they went in: every dtype, shape and container."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream import Cache, EpochDataset
from cachestream.schema import Schema, Snapshot
from cachestream.training.batches import mapped_shards as maps_module
from cachestream.training.batches import memory as memory_module
from cachestream.training.batches.gather import Gatherer
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.batches.memory import BufferPool, copy_runs, read_numbers
from tests.support.caches import add_shard, numbered
from tests.support.same import same
from tests.training.conftest import NewCache

DTYPES = [
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 100, shape)
    return torch.from_numpy(np.asarray(raw)).to(getattr(torch, dtype))


CacheOf = Callable[[list[Any], list[int]], Cache]


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_exactly_in_fixed_and_in_varying_shapes(dtype: str, cache_of: CacheOf) -> None:
    samples = [
        {
            "image": random_tensor(dtype, (3, 4, 5), i),
            "scalar": random_tensor(dtype, (), i),
            "empty": random_tensor(dtype, (0, 2), i),
            "ragged": random_tensor(dtype, (i % 4, 3), i),
            # The same shape within a shard, another one in the next shard.
            "mixed": random_tensor(dtype, (2 + i // 4, 2), i),
        }
        for i in range(12)
    ]
    cache = cache_of(samples, [4, 7, 1])
    with cache.snapshot() as dataset:
        order = [11, 0, 5, 5, 3, 10, 4, 1, 2, 6, 7, 8, 9]
        batch = dataset.__getitems__(order)
        whole = cs.collate(batch)
        assert set(whole) == set(samples[0])
        for place, i in enumerate(order):
            for name, expected in samples[i].items():
                assert same(dataset[i][name], expected), (name, i)
                assert same(batch[place][name], expected), (name, i)
                assert same(whole[name][place], expected), (name, i)
        assert whole["image"].shape == (13, 3, 4, 5)
        assert whole["scalar"].shape == (13,)
        assert isinstance(whole["ragged"], list)
        assert isinstance(whole["mixed"], list)


def test_str_and_bytes_come_back_as_lists_with_all_of_unicode(cache_of: CacheOf) -> None:
    texts = ["", "plain", "zwölf", "日本語" * 1000, "\ud800 alone", "\0", "🙂"]
    samples = [{"text": text, "data": text.encode("utf-8", "surrogatepass")} for text in texts]
    with cache_of(samples, [3, 4]).snapshot() as dataset:
        whole = cs.collate(dataset.__getitems__(range(7)))
        assert whole == {"text": texts, "data": [sample["data"] for sample in samples]}
        assert dataset[4] == samples[4]
        assert dataset.keys() == [f"key {i}" for i in range(7)]
        assert dataset.keys([-1, 0]) == ["key 6", "key 0"]


def test_long_varying_values_come_back_too(cache_of: CacheOf) -> None:
    samples = [{"x": random_tensor("int32", (10_000 * (i % 3) + i, 3), i)} for i in range(9)]
    with cache_of(samples, [5, 4]).snapshot() as dataset:
        for order in ([8, 0, 4], [0, 0], list(range(9))):
            whole = cs.collate(dataset.__getitems__(order))["x"]
            assert all(same(value, samples[i]["x"]) for value, i in zip(whole, order, strict=True))


@pytest.mark.e2e
@pytest.mark.parametrize("in_c", [True, False])
@given(st.data())
def test_runs_of_any_lengths_from_anywhere_are_copied_exactly(in_c: bool, data: st.DataObject) -> None:
    """Runs against slices of the same memory: short ones, long ones, empty ones, overlapping."""
    memory = np.random.default_rng(0).integers(0, 256, 300_000).astype(np.uint8)
    longest = data.draw(st.sampled_from([1, 20, 300, 5_000, 90_000]))
    lengths = np.array(data.draw(st.lists(st.integers(0, longest), max_size=12)), np.int64)
    starts = np.array([data.draw(st.integers(0, len(memory) - int(n))) for n in lengths], np.int64)
    ends = np.cumsum(lengths + 1)  # a byte between them, which stays as it is
    out = np.full(int((lengths + 1).sum()), 7, np.uint8)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _with_part_in_c(in_c, monkeypatch)
        copy_runs(memory.ctypes.data + starts, lengths, out.ctypes.data + (ends - lengths - 1))
    expected = [[*memory[start : start + n], 7] for start, n in zip(starts, lengths, strict=True)]
    assert out.tolist() == [byte for run in expected for byte in run]


def test_numbers_are_read_from_addresses_that_are_multiples_of_nothing() -> None:
    memory = bytes(5) + np.arange(10, dtype=np.int64).tobytes()
    begin = np.frombuffer(memory, np.uint8).ctypes.data + 5
    assert read_numbers(begin + 8 * np.array([7, 0, 7]), 2).tolist() == [[7, 8], [0, 1], [7, 8]]
    assert read_numbers(np.empty(0, np.int64), 3).shape == (0, 3)


@pytest.mark.e2e
@pytest.mark.parametrize("shape", [(3, 1181, 1181), (40_009,), (2, 3), (5,)])  # the second is a prime number
@pytest.mark.parametrize("dtype", ["uint8", "int32"])
@pytest.mark.parametrize("in_c", [True, False])
def test_rows_of_any_size_are_gathered(
    shape: tuple[int, ...], dtype: str, in_c: bool, cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_part_in_c(in_c, monkeypatch)
    rows = [random_tensor(dtype, shape, i) for i in range(4)]
    snapshot, lease = cache_of([{"x": row, "short": i} for i, row in enumerate(rows)], [3, 1]).take_snapshot()
    maps = EpochMaps(snapshot)
    assert maps.open(np.arange(2)) == []
    columns = Gatherer(maps, BufferPool(2)).gather(*maps.locate(np.array([3, 0, 2])))
    assert columns["short"].tolist() == [3, 0, 2]
    assert all(same(value, rows[i]) for value, i in zip(columns["x"], (3, 0, 2), strict=True))
    lease.release()


@pytest.mark.e2e
@pytest.mark.parametrize("in_c", [True, False])
def test_reading_a_dataset_leaves_alone_how_many_threads_torch_uses_elsewhere(
    in_c: bool, cache_of: CacheOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_part_in_c(in_c, monkeypatch)
    samples = [
        {"x": torch.full((2048,), i), "r": torch.full((1 + i % 5,), i), "s": f"s{i}"} for i in range(64)
    ]
    dataset, before, done = cache_of(samples, [40, 24]).snapshot(), torch.get_num_threads(), threading.Event()

    def read() -> bool:
        sound = True
        while not done.is_set():
            batch = dataset[list(range(64))]
            sound = sound and batch["x"][:, -1].tolist() == [int(value[0]) for value in batch["r"]]
            sound = sound and batch["s"] == [f"s{i}" for i in range(64)]
            sound = sound and dataset.keys([0, 63]) == ["key 0", "key 63"]
        return sound

    torch.set_num_threads(3)
    try:
        with dataset, ThreadPoolExecutor(1) as reader:
            reading = reader.submit(read)
            found = [_in_a_new_thread(torch.get_num_threads) for _ in range(300)]
            done.set()
            assert reading.result(60)
        assert found == [3] * 300
    finally:
        torch.set_num_threads(before)


def _in_a_new_thread(function: Callable[[], int]) -> int:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result(60)


def _with_part_in_c(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not wanted:
        monkeypatch.setattr(memory_module, "in_c", None)
    elif memory_module.in_c is None:
        pytest.skip("the part in C was not built")


@pytest.mark.parametrize("listed", [0, 1 << 18])
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any))
def test_the_shard_of_a_sample_is_found_whatever_the_sizes_of_the_shards(
    listed: int, counts: list[int]
) -> None:
    places = np.arange(len(counts), dtype=np.int64)
    snapshot = Snapshot("id", "/nowhere", "/nowhere", Schema(()), places, np.array(counts, np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps_module, "_LISTED_SAMPLES", listed)  # 0: as if there were more samples
        shards, rows = EpochMaps(snapshot).locate(np.arange(sum(counts), dtype=np.int64))
    expected = [(shard, row) for shard, count in enumerate(counts) for row in range(count)]
    assert list(zip(shards.tolist(), rows.tolist(), strict=True)) == expected


def test_maps_are_handed_on_to_the_next_snapshot_and_only_new_shards_are_opened(new_cache: NewCache) -> None:
    cache = new_cache()
    for shard in range(3):
        add_shard(cache, numbered(shard * 4, 4))
    first, lease = cache.take_snapshot()
    before = EpochMaps(first)
    assert before.open(np.arange(3)) == []
    add_shard(cache, numbered(12, 4))
    second, other_lease = cache.take_snapshot()
    after = EpochMaps(second, before)
    assert after.mapped.tolist() == [True, True, True, False]
    del before
    assert after.open(np.arange(4)) == []
    gatherer = Gatherer(after, BufferPool(2))
    shards, rows = after.locate(np.arange(16))
    assert gatherer.gather(shards, rows)["number"].tolist() == list(range(16))
    lease.release()
    other_lease.release()


def test_an_open_dataset_is_described_by_its_repr(cache_of: CacheOf) -> None:
    cache = cache_of([sample for _, sample in numbered(0, 3)], [3])
    dataset = cache.snapshot()
    assert isinstance(dataset, EpochDataset)
    assert repr(dataset) == "<EpochDataset 3 samples in 1 shards>"
    dataset.close()
    assert repr(dataset) == "<EpochDataset closed, 3 samples in 1 shards>"
