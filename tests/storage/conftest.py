"""A cache for each test, on a disk in memory where there is one: kills lose nothing there, and syncs cost nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cachestream.storage.cache import Cache
from tests.storage.support import new_cache

MEMORY = Path("/dev/shm")


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """A folder in memory, or an ordinary one."""
    usable = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 200 * 2**20
    path = Path(tempfile.mkdtemp(prefix="cachestream-", dir=MEMORY if usable else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make_cache(fast_path: Path) -> Iterator[Callable[..., Cache]]:
    """Opens caches at "cache" of the fast folder, and closes them at the end."""
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB of its own, where the test may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no mount here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", str(path)], check=True)
