"""Fixtures of the contract: a filled cache to copy, as a worker has left it, and the warnings that were logged."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors import safe_open

import cachestream as cs
from tests.contract.loader_acts import Ranks
from tests.contract.readers import NUM_SAMPLES, SHARD_SIZE, numbered

__all__ = ["NUM_SAMPLES", "SHARD_SIZE", "numbered"]

NUM_VARIOUS: Final = 84


def various(number: int) -> dict[str, Any]:
    """A sample with a field of every kind, each a function of its number (below 128)."""
    return {
        "number": number,
        "x": np.full(4, number, np.float32),
        "image": np.full((3, 2, 2), number, np.uint8),
        "half": np.full(2, number, np.float16),
        "third": number / 3,
        "even": number % 2 == 0,
        "tokens": np.full(1 + number % 7, number),
        "text": f"no. {number}",
        "data": bytes([number]) * (number % 3),
    }


def numbers_in(shard: Path) -> list[int]:
    """The numbers of the `numbered` samples in a shard, read with the library of its format."""
    with safe_open(shard, "np") as file:
        return list(map(int, file.get_tensor("number")))


def shown(value: object) -> str:
    """The name of a parameter, the same in every process: without the addresses of functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def bytes_on_disk(path: Path) -> int:
    """Allocated bytes of everything below `path`; what vanishes meanwhile does not count."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in (folder, *(os.path.join(folder, file) for file in files)):
            try:
                total += os.lstat(name).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@pytest.fixture(scope="module", autouse=True)
def starts_quickly(quick_supervisors: None) -> None:
    """Supervisors are forked; `test_surroundings.py` and the commands start new ones."""


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a cache that holds `numbered(NUM_SAMPLES)` in some twenty shards; nothing has it open."""
    path = tmp_path_factory.mktemp("filled") / "cache"
    with (
        cs.Cache(path, "4MB", min_free=0) as cache,
        cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1, shard_size=SHARD_SIZE) as worker,
    ):
        worker.wait(timeout_s=120)
    return path


@pytest.fixture
def new_path(filled: Path, tmp_path: Path) -> Callable[[], Path]:
    """Directories of caches of the test's own, each a copy of `filled`."""

    def copy() -> Path:
        path = tmp_path / f"cache{len(list(tmp_path.iterdir()))}"
        shutil.copytree(filled, path)
        return path

    return copy


@pytest.fixture
def cache(new_path: Callable[[], Path]) -> Iterator[cs.Cache]:
    """A cache of the test's own that holds `numbered(NUM_SAMPLES)`."""
    with cs.Cache(new_path()) as opened:
        yield opened


@pytest.fixture(scope="session")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a cache that holds `various(n)` for n below NUM_VARIOUS; nobody may change it."""
    path = tmp_path_factory.mktemp("varied") / "cache"
    source = [various(number) for number in range(NUM_VARIOUS)]
    with (
        cs.Cache(path, "4MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1, shard_size="1KB") as worker,
    ):
        worker.wait(timeout_s=120)
    return path


@pytest.fixture
def kinds(varied: Path) -> Iterator[cs.Cache]:
    """The cache of `varied`, to look at."""
    with cs.Cache(varied) as opened:
        yield opened


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes that are ranks under gloo, for every task that leaves them alive."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The warnings of this process so far, each as one text."""
    found = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cachestream").addHandler(handler)
    yield found
    logging.getLogger("cachestream").removeHandler(handler)
