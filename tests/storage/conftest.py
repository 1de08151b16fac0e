"""A cache for each test, on a disk in memory if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachestream.storage.cache import Cache
from tests.storage.support import new_cache


@pytest.fixture
def make_cache(fast_path: Path) -> Iterator[Callable[..., Cache]]:
    """Open caches at "cache" in the fast folder, and close them at the end."""
    opened: list[Cache] = []

    def make(*args: Any, **options: Any) -> Cache:
        opened.append(new_cache(fast_path / "cache", *args, **options))
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    return make_cache()
