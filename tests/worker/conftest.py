"""A cache and its processes for each test; whatever is left of them at its end fails the test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachestream import Cache
from tests.worker.support import TOKEN, Processes, left_files


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    """The processes that the test starts: all gone at its end."""
    found = Processes(secrets.token_hex(8))
    monkeypatch.setenv(TOKEN, found.token)
    yield found
    try:
        found.wait_until_gone()
    except AssertionError:
        pass
    left = found.pids()
    commands = [
        Path(f"/proc/{pid}/cmdline").read_bytes()[-200:] for pid in left if os.path.exists(f"/proc/{pid}")
    ]
    found.end()
    assert not left, f"processes were left running: {commands}"


@pytest.fixture
def cache(tmp_path: Path, processes: Processes) -> Iterator[Cache]:
    """A cache of 50 MB; at the end it is sound, and its worker has left nothing but shards."""
    cache = Cache(tmp_path / "cache", size_limit="50MB", min_free=0)
    yield cache
    if not os.path.exists(cache.path):
        cache.close()
        return
    if processes.pids():
        cache.close()
        return  # `processes` tells
    report = cache.verify()
    left = left_files(cache)
    cache.close()
    assert report.ok, report
    assert not left
