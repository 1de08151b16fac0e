"""`stream` takes what the parts take, and gives each what is its own."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest

import cachestream as cs
from cachestream.config import keywords_of
from cachestream.sources.open import SOURCE_OPTIONS
from cachestream.streaming import StreamOptions

SOURCES = (
    *(cs.ArraySource, cs.FileSource, cs.LitDataSource, cs.MDSSource, cs.ParquetSource, cs.TarSource),
    *(cs.TFRecordSource, cs.IterableSource, cs.DatasetSource, cs.CallableSource),
)


@pytest.mark.parametrize("kind", SOURCES)
def test_the_options_of_every_source_are_taken(kind: type) -> None:
    options = list(inspect.signature(kind).parameters)[1:]
    assert set(options) - {"weights"} <= set(SOURCE_OPTIONS)  # weights are the loader's


def test_a_type_checker_sees_every_option_that_is_taken() -> None:
    taken = {*SOURCE_OPTIONS, "min_free", "eviction"}
    taken |= keywords_of(cs.start_worker) | keywords_of(cs.EpochLoader.__init__)
    assert set(StreamOptions.__annotations__) == taken - {"transform", "num_workers"}
    for function in (cs.start_worker, cs.EpochLoader.__init__, cs.Cache.__init__):
        parameters = inspect.signature(function).parameters.values()
        assert all(one.kind is not one.VAR_KEYWORD for one in parameters)


@pytest.mark.e2e
def test_windows_of_an_array_are_streamed_by_its_path(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100.0))
    with cs.stream(
        str(tmp_path / "a.npy"),
        tmp_path / "cache",
        "10MB",
        min_free=0,
        batch_size=10,
        window=10,
        windows="grid",
    ) as loader:
        assert next(iter(loader))["array"].shape == (10, 10)


@pytest.mark.e2e
def test_an_eviction_function_beside_an_open_cache_is_the_one_in_force(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100.0))
    with (
        cs.Cache(tmp_path / "cache", "10MB", min_free=0, eviction="fifo") as cache,
        cs.stream(str(tmp_path / "a.npy"), cache, batch_size=1, eviction=list, min_free=None) as loader,
    ):
        assert loader.cache.eviction is list
        assert cache.status().eviction == "list"
        assert cache.min_free == 0
        cache.eviction = "lru"
        assert cache.status().eviction == "lru"
