"""`stream` takes what the parts take, and gives each what is its own."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream.errors import ConfigError
from cachestream.sources.open import SOURCE_OPTIONS

SOURCES = (
    *(cs.ArraySource, cs.FileSource, cs.LitDataSource, cs.MDSSource, cs.ParquetSource, cs.TarSource),
    *(cs.TFRecordSource, cs.IterableSource, cs.DatasetSource, cs.CallableSource),
)


@pytest.mark.parametrize("kind", SOURCES)
def test_the_options_of_every_source_are_taken(kind: type) -> None:
    options = list(inspect.signature(kind).parameters)[1:]
    assert set(options) - {"weights"} <= set(SOURCE_OPTIONS)  # weights are the loader's


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


def test_options_of_the_source_beside_a_source_are_refused_not_ignored(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100.0))
    source = cs.FileSource(str(tmp_path))
    with pytest.raises(ConfigError, match=r"no options beside a Source: resize; give them where <FileSource"):
        cs.stream(source, tmp_path / "cache", "10MB", min_free=0, batch_size=1, resize=8)
    assert not (tmp_path / "cache").exists()


def test_settings_beside_an_open_cache_are_set_as_if_it_were_opened_with_them(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100.0))
    with (
        cs.Cache(tmp_path / "cache", "10MB", min_free=0) as cache,
        cs.stream(str(tmp_path / "a.npy"), cache, "20MB", min_free="1kB", eviction="fifo", batch_size=1),
    ):
        assert (cache.size_limit, cache.min_free, cache.eviction) == (20_000_000, 1000, "fifo")
    with cs.Cache(tmp_path / "cache") as again:
        assert (again.size_limit, again.min_free, again.eviction) == (20_000_000, 1000, "fifo")


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


@pytest.mark.parametrize(
    "wrong", [{"num_workers": 0}, {"order": "backwards"}, {"partition": "2/2"}, {"bandwidth_limit": 0}]
)
def test_what_the_worker_cannot_be_asked_for_is_refused_before_there_is_a_cache(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        cs.stream([{"x": 1}], tmp_path / "cache", "10MB", batch_size=1, **wrong)
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        cs.start_worker(tmp_path / "cache", [{"x": 1}], **wrong)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("timeout_s", [None, "x", 0])
def test_a_deadline_that_is_none_is_refused_before_there_is_a_cache(tmp_path: Path, timeout_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"^timeout_s=.*: give seconds, 0\.001 or more$"):
        cs.stream([{"x": 1}], tmp_path / "cache", "10MB", batch_size=1, timeout_s=timeout_s)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("wrong", [{"min_free": "much"}, {"eviction": "oldest"}])
def test_settings_beside_an_open_cache_that_cannot_be_are_refused_by_name(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    np.save(tmp_path / "a.npy", np.arange(100.0))
    with (
        cs.Cache(tmp_path / "cache", "10MB", min_free=0) as cache,
        pytest.raises(ConfigError, match=r"min_free='much'|eviction='oldest'"),
    ):
        cs.stream(str(tmp_path / "a.npy"), cache, batch_size=1, **wrong)


def test_weights_that_are_an_array_are_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^weights=ndarray: give True, or a mapping of keys to weights"):
        cs.stream([{"x": 1}], tmp_path / "cache", "10MB", min_free=0, batch_size=1, weights=np.ones(3))
