"""Filling a real cache with samples of the test's own: published as a worker does, without one."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cachestream import Cache
from cachestream.storage.publish import Publisher
from cachestream.storage.reservations import Owner
from cachestream.worker.sampling.encode import to_record
from cachestream.worker.sampling.packer import Packer

__all__ = ["add_shard", "fill", "numbered", "numbers", "set_fill_state", "skip_samples"]


def add_shard(cache: Cache, samples: Iterable[tuple[str, Any]]) -> int:
    """Publish `samples` (key, sample) as one shard of `cache`; returns its id."""
    packer = Packer()
    for key, sample in samples:
        packer.add(to_record(sample, key), None)
    owner = Owner(cache.directory, f"test-{secrets.token_hex(4)}")
    try:
        publisher = Publisher(cache.directory, cache.catalogue, cache.reservations, owner.name)
        shard_id = publisher.publish(packer.content({}), 0, ())
    finally:
        owner.release()
    assert shard_id is not None
    return shard_id


def numbered(first: int, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Samples that say which they are: `x` float32 [5] full of the number, `number` int64, key "k<number>"."""
    return [
        (f"k{n}", {"x": np.full(5, n, np.float32), "number": np.int64(n)})
        for n in range(first, first + count)
    ]


def fill(path: Path, num_shards: int, samples_each: int, first: int = 0) -> Cache:
    """A cache at `path` with shards of numbered samples."""
    cache = Cache(path, size_limit="100MB", min_free=0)
    for shard in range(num_shards):
        add_shard(cache, numbered(first + shard * samples_each, samples_each))
    return cache


def set_fill_state(cache: Cache, state: str) -> None:
    """Make the catalogue say what a worker would have said of the filling."""
    with cache.catalogue.transaction() as tables:
        tables.set_meta("fill_state", state)


def skip_samples(cache: Cache, count: int, reason: str) -> None:
    """Make the catalogue count what a worker would have skipped in a transform."""
    with cache.catalogue.transaction() as tables:
        tables.add_failure("transform", reason, count, "a.npy")


def numbers(batches: Iterable[Any]) -> list[int]:
    """The numbers of the `numbered` samples in `batches`."""
    return [n for batch in batches for n in batch["number"].tolist()]
