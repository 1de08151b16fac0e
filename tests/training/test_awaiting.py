"""Waiting at cold start, with a real worker: what those are told who wait for samples that will not come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cachestream as cs
from cachestream import Cache, EpochLoader, NotEnoughSamplesError

DEADLINE_S = 120.0


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        yield cache


def test_too_few_samples_because_the_first_decided_what_all_are_says_how_to_leave_it_out(
    cache: Cache, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "README.md").write_text("about this set")
    for number in range(9):
        (files / f"a{number}.bin").write_bytes(b"data")
    with cs.start_worker(cache, files, num_workers=1, order="sequential") as worker:
        assert worker.wait(DEADLINE_S)
    with (
        EpochLoader(cache, 4) as loader,
        pytest.raises(NotEnoughSamplesError, match="9 skipped, most often: schema:") as caught,
    ):
        next(iter(loader))
    assert all(words in str(caught.value) for words in ("extensions=", "transform=", "cachestream clear"))
