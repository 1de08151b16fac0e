"""What is done to a cache while its files fail: `python -m tests.contract.crash_scenarios NAME CACHE`.

Prints the class of the error that it ends with, if any: one of cachestream's own is an answer, another a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import cachestream as cs
from tests.contract.readers import NUM_SAMPLES, SHARD_SIZE, numbered

__all__ = ["SCENARIOS", "fill"]


def fill(path: Path, timeout_s: float = 15.0) -> None:
    """Fill the cache to the end of its pass; a worker waits for a disk that fails for as long as it is let."""
    with (
        cs.Cache(path, "4MB", min_free=0) as cache,
        cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1, shard_size=SHARD_SIZE) as worker,
    ):
        worker.wait(timeout_s)


def train(path: Path) -> None:
    """Take an epoch, which leases its shards and counts as a use of them."""
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 30) as loader:
        assert sorted(n for batch in loader for n in batch["number"].tolist()) == list(range(NUM_SAMPLES))


def lower(path: Path) -> None:
    """Lower the limit below what is cached."""
    with cs.Cache(path) as cache:
        cache.size_limit = 1_000_000


def evict(path: Path) -> None:
    with cs.Cache(path) as cache:
        cache.evict(to=900_000)


def repair(path: Path) -> None:
    with cs.Cache(path) as cache:
        cache.verify(repair=True)


SCENARIOS: Final[dict[str, Callable[[Path], None]]] = {
    "fill": fill,
    "train": train,
    "lower": lower,
    "evict": evict,
    "repair": repair,
}

if __name__ == "__main__":
    try:
        SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
    except cs.CacheStreamError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
