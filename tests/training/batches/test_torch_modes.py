"""A trainer's default device and inference mode do not hold for the tensors of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import cachestream as cs
from cachestream import Cache, EpochLoader

CacheOf = Callable[[list[Any], list[int]], Cache]
SIZE = 100


@pytest.fixture
def cache(cache_of: CacheOf) -> Cache:
    """Samples with rows that are large enough to lie in buffers that are used again."""
    samples = [
        {"x": np.full(8192, n, np.float32), "ragged": np.arange(n % 5), "text": f"text {n}"}
        for n in range(SIZE)
    ]
    return cache_of(samples, [30, 70])


@pytest.fixture
def plain(cache_of: CacheOf) -> Cache:
    return cache_of([{"x": np.full(8192, n, np.float32)} for n in range(SIZE)], [30, 70])


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """As `torch.set_default_device("cuda")` does, on machines that have none."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("options", [{}, {"with_keys": True}], ids=str)
def test_batches_are_in_host_memory_whatever_the_default_device(plain: Cache, options: Any) -> None:
    with EpochLoader(plain, 8, drop_last=False, **options) as loader:
        for _ in range(2):
            seen = torch.cat([batch["x"][:, 0] for batch in loader])
            assert sorted(seen.tolist()) == list(range(SIZE))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("layout", ["list", "padded", "nested"])
def test_varying_fields_are_in_host_memory_whatever_the_default_device(cache: Cache, layout: Any) -> None:
    with EpochLoader(cache, 8, shuffle=False, ragged=layout, weights=True) as loader:
        batch = next(iter(loader))
        loader.update_weights(["key 0", "key 1"], [1.0, 2.0])
    assert batch["x"].device.type == "cpu"
    assert batch["text"][3] == f"text {int(batch['x'][3, 0])}"
    ragged = batch["ragged"].values if layout == "padded" else batch["ragged"]
    assert ragged[3].device.type == "cpu"


@pytest.mark.usefixtures("elsewhere")
def test_a_dataset_is_read_into_host_memory_whatever_the_default_device(cache: Cache) -> None:
    with cache.snapshot() as dataset:
        assert dataset[10:20]["x"][:, 0].tolist() == list(range(10, 20))
        assert dataset[7]["ragged"].tolist() == [0, 1]
        assert dataset.keys()[5] == "key 5"
        assert cs.collate([dataset[3], dataset[8]])["x"].device.type == "cpu"


def train(batch: Any) -> None:
    torch.nn.Linear(8192, 1)(batch["x"]).sum().backward()


def test_what_comes_after_inference_mode_can_be_trained_on(plain: Cache) -> None:
    """A first epoch for statistics of the data, say; its loader has asked for batches of the next one."""
    with EpochLoader(plain, 4) as loader:
        with torch.inference_mode():
            for batch in loader:
                assert batch["x"].mean() >= 0
        batches = iter(loader)
        for batch in batches:
            train(batch)
            with torch.inference_mode():
                next(batches, None)
    with plain.snapshot() as dataset:
        with torch.inference_mode():
            assert dataset[0:32]["x"].shape == (32, 8192)
        train(dataset[0:32])


@pytest.mark.e2e
@pytest.mark.parametrize("layout", ["list", "padded", "nested"])
def test_a_dataset_that_was_read_in_inference_mode_can_be_trained_on(cache: Cache, layout: Any) -> None:
    with cache.snapshot() as dataset, EpochLoader(cache, 20, ragged=layout) as loader:
        for _ in range(2):
            with torch.inference_mode():
                assert len(dataset[0:32]["ragged"]) == 32
                next(iter(loader))
            train(dataset[0:32])
            for batch in loader:
                train(batch)
