"""`cs.stream`: a cache, its worker and its loader in one call. Each option reaches its part, a name that is misspelt is told,
and what cannot work is refused before there is a cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

import cachestream as cs
from tests.contract.loader_acts import write_remote

SAMPLES: Final = [{"x": np.full(8, n, np.float32), "number": n} for n in range(60)]
SMALL: Final[dict[str, Any]] = {"min_free": 0, "num_workers": 1}


def numbers(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["number"].tolist()]


def test_options_of_all_parts_reach_them(tmp_path: Path) -> None:
    def double(sample: dict[str, Any]) -> dict[str, Any] | None:
        return None if sample["number"] % 5 == 0 else sample | {"x": sample["x"] * 2}

    write_remote(tmp_path / "remote", range(60))
    (tmp_path / "remote" / "notes.txt").write_text("no sample")
    with cs.stream(
        tmp_path / "remote",
        tmp_path / "cache",
        "20MB",
        batch_size=6,
        transform=double,
        # of the cache
        min_free="1kB",
        eviction="fifo",
        # of the source
        extensions=[".npz"],
        # of the worker
        order="sequential",
        shard_size="2KB",
        holdout=0.1,
        num_workers=1,
        # of the loader
        shuffle=False,
        drop_last=False,
        with_keys=True,
    ) as loader:
        assert isinstance(loader, cs.EpochLoader)
        assert isinstance(loader.worker, cs.Worker)
        loader.worker.wait(timeout_s=120)
        assert (loader.cache.size_limit, loader.cache.min_free, loader.cache.eviction) == (
            20_000_000,
            1000,
            "fifo",
        )
        assert loader.cache.status().holdout == 0.1
        expected = [n for n in range(60) if n % 5]
        with loader.cache.snapshot(split="train") as dataset:
            order = dataset[:]["number"].tolist()
        assert order == sorted(order)
        assert set(order) <= set(expected)
        loader.set_epoch(5)
        batches = list(loader)
        assert numbers(batches) == order
        for batch in batches:
            assert list(batch) == ["number", "tokens", "x", "__key__"]
            assert torch.equal(batch["x"], 2 * batch["number"][:, None].float().expand(-1, 5))
            assert batch["__key__"] == [f"{n:04d}.npz" for n in batch["number"].tolist()]
    with cs.Cache(tmp_path / "cache") as cache:
        assert not cache.has_worker()


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a cache that a stream has filled."""
    path = tmp_path_factory.mktemp("streamed") / "cache"
    with cs.stream(SAMPLES, path, "4MB", batch_size=4, **SMALL) as loader:
        loader.worker.wait(timeout_s=120)
    return path


def test_the_first_epoch_begins_with_the_first_batch_and_later_ones_have_all(tmp_path: Path) -> None:
    with cs.stream(SAMPLES, tmp_path / "c", "4MB", batch_size=4, **SMALL) as loader:
        first = numbers(loader)
        assert len(first) >= 4
        assert len(set(first)) == len(first)
        loader.worker.wait(timeout_s=120)
        numbers(loader)  # may have been prepared before
        assert sorted(numbers(loader)) == list(range(60))


def test_a_second_run_begins_with_what_is_cached_and_goes_on_at_its_state(streamed: Path) -> None:
    with cs.stream(SAMPLES, streamed, batch_size=4, seed=3, **SMALL) as loader:
        assert loader.cache.num_samples == 60
        batches = iter(loader)
        head, state, tail = numbers([next(batches)]), loader.state_dict(), numbers(batches)
        assert sorted(head + tail) == list(range(60))
    with cs.stream(SAMPLES, streamed, batch_size=4, seed=3, **SMALL) as loader:
        loader.load_state_dict(state)
        assert numbers(loader) == tail


def test_an_open_cache_is_used_and_its_settings_are_set(streamed: Path) -> None:
    with cs.Cache(streamed) as cache:
        with cs.stream(
            SAMPLES, cache, "5MB", batch_size=4, num_workers=1, min_free="2kB", eviction="fifo"
        ) as loader:
            assert loader.cache is cache
            assert (cache.size_limit, cache.min_free, cache.eviction) == (5_000_000, 2000, "fifo")
        assert cache.num_samples == 60, "it is open still"
        with cs.stream(SAMPLES, cache, batch_size=4, num_workers=1):
            assert (cache.size_limit, cache.min_free, cache.eviction) == (5_000_000, 2000, "fifo")


def test_close_ends_the_loader_and_the_worker_of_its_own(streamed: Path) -> None:
    loader = cs.stream(SAMPLES, streamed, batch_size=4, **SMALL)
    with cs.start_worker(streamed, SAMPLES, num_workers=1) as other:
        assert other.attached
        loader.close()
        loader.close()
        with pytest.raises(cs.EpochError, match="closed"):
            next(iter(loader))
        assert other.is_alive(), "who else uses the worker keeps it"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"order": "backwards"}, "order='backwards'"),
        ({"partition": "2/2"}, "partition="),
        ({"bandwidth_limit": 0}, "bandwidth_limit must be above 0"),
        ({"timeout_s": None}, "timeout_s=None: give seconds"),
        ({"shuffel": True}, "do you mean 'shuffle'?"),
        ({"shard_sise": "1MB"}, "do you mean 'shard_size'?"),
        ({"evicton": "lru"}, "do you mean 'eviction'?"),
        ({"storage_option": {}}, "do you mean 'storage_options'?"),
        ({"nonsense": 1}, "no argument 'nonsense'"),
        ({"eviction": "least-weight"}, "give weights=True"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_work_is_refused_before_there_is_a_cache(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(cs.ConfigError) as caught:
        cs.stream(SAMPLES, tmp_path / "cache", "4MB", batch_size=4, **wrong)
    assert words in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"weights": np.ones(3)}, "weights=ndarray"),
        ({"eviction": "oldest"}, "eviction='oldest'"),
        ({"min_free": "much"}, "min_free='much'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_loader_or_the_cache_refuses_leaves_no_worker(
    wrong: dict[str, Any], words: str, streamed: Path
) -> None:
    with cs.Cache(streamed) as cache:
        with pytest.raises(cs.ConfigError, match=words):
            cs.stream(SAMPLES, cache, **{"batch_size": 4, "num_workers": 1, **wrong})
        assert not cache.has_worker()


def test_options_beside_a_source_are_refused_and_not_ignored(tmp_path: Path) -> None:
    write_remote(tmp_path / "remote", range(3))
    source = cs.open_source(tmp_path / "remote")
    with pytest.raises(cs.ConfigError, match="no options beside a Source: resize"):
        cs.stream(source, tmp_path / "cache", "4MB", batch_size=1, resize=8)
    assert not (tmp_path / "cache").exists()


SCRIPT: Final = """
import sys
import cachestream as cs

scale = 3
print("run", flush=True)
loader = cs.stream(lambda rng: {"x": rng.random(4) * 0 + scale}, sys.argv[1], "4MB", min_free=0, batch_size=4,
                   num_workers=1, transform=lambda sample: {"x": sample["x"] + scale})
for batch in loader:
    break
print(batch["x"].unique().tolist(), flush=True)
"""


@pytest.mark.e2e
def test_a_script_needs_no_guard_and_its_functions_may_be_lambdas_and_it_ends_without_close(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "run\n[6.0]\n", "the script ran once"
    with cs.Cache(tmp_path / "cache") as cache:
        assert not cache.has_worker()
