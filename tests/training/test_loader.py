"""The loader: an epoch has the samples cached by then, each once, and the next one is ready in time."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Final

import numpy as np
import pytest

from cachestream import EpochLoader
from cachestream.schema import IntArray
from cachestream.training import prepare
from cachestream.training.batches.mapped_shards import EpochMaps
from tests.support.caches import numbers
from tests.training.conftest import NewCache

in_both_ways: Final = pytest.mark.usefixtures("gathered")


# --- what an epoch is


# --- moving about


def test_counts_may_be_numpys(new_cache: NewCache) -> None:
    four: Any = np.int64(4)
    with EpochLoader(
        new_cache(1, 8), four, epoch_size=four, min_samples=four, prefetch=four, locality=four, seed=four
    ) as loader:
        loader.set_epoch(np.uint8(0))  # type: ignore[arg-type]
        assert len(numbers(loader)) == 4
        assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 1


def most_together(loader: EpochLoader) -> int:
    """The number of batches in the largest task of an epoch."""
    window, batches = loader._background.window, iter(loader)
    tasks = iter(lambda: window.take(0, 60), None)
    most = max(task.stop - task.first for task in tasks)
    del batches  # not before: the epoch would be left
    return most


LARGE, SMALL = b"x" * (1 << 20), b"x" * 1000


@in_both_ways
@pytest.mark.parametrize(
    ("samples", "options", "most"),
    [
        ([LARGE] * 16, {"batch_size": 1}, 4),
        ([LARGE, b""] * 16, {"batch_size": 2}, 4),
        ([LARGE] * 16, {"batch_size": 1, "batch_transform": lambda batch: batch}, 4),
        ([LARGE] * 16, {"batch_size": 1, "sampler": [[i, i + 1] for i in range(0, 16, 2)]}, 2),
        ([SMALL] * 640, {"batch_size": 16}, 16),
        ([SMALL] * 640, {"batch_size": 640, "sampler": [[*range(i, i + 16)] for i in range(0, 640, 16)]}, 16),
    ],
    ids=["large", "mixed", "transformed", "sampled", "small", "small and sampled"],
)
def test_as_many_batches_of_samples_of_many_sizes_go_together_as_of_one_size(
    samples: list[bytes], options: dict[str, Any], most: int, cache_of: Any
) -> None:
    cache = cache_of([{"data": sample} for sample in samples], [len(samples) // 2] * 2)
    with EpochLoader(cache, **options) as loader:
        assert most_together(loader) == most


@pytest.mark.e2e
def test_a_trainer_that_waits_is_not_kept_until_all_new_shards_are_open(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_URGENT_OPEN_S", 0.0)
    opened: list[int] = []
    begun, open_shards = threading.Event(), EpochMaps.open
    # Every epoch is of 32 other shards.
    with EpochLoader(new_cache(96, 4), 4, epoch_size=128, prefetch=1) as loader:
        window = loader._background.window

        def open_when_waited_for(maps: EpochMaps, shards: IntArray) -> Any:
            known = [reader.segment.maps for reader in window._readers]
            if window.wanted.position.epoch == 1 and maps not in known:
                opened.append(len(shards))
                begun.set()
                give_up = time.monotonic() + 60
                while not window.is_urgent():
                    assert time.monotonic() < give_up
                    time.sleep(0.001)
            return open_shards(maps, shards)

        monkeypatch.setattr(EpochMaps, "open", open_when_waited_for)
        for number, _ in enumerate(loader, 1):
            if number == 31:  # the preparation has begun before the trainer waits for it
                assert begun.wait(60)
        next(iter(loader))
    assert opened == [16]


# --- keys
