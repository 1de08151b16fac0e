"""What those are told who wait for samples that will not come, or train on a part of them; with a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import cachestream as cs
from cachestream import Cache, EpochLoader, NotEnoughSamplesError
from cachestream.storage.skipping import is_much

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


def half_of(count: int) -> list[dict[str, int]]:
    """Samples of which every second has a field that the first has not."""
    return [{"x": number, **({"more": 1} if number % 2 else {})} for number in range(count)]


@pytest.mark.parametrize("by", ["loader", "worker"])
def test_that_much_was_skipped_is_said_once_to_who_waits_for_the_pass_and_to_who_trains(
    cache: Cache, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    with cs.start_worker(cache, half_of(40), num_workers=1, order="sequential") as worker:
        if by == "worker":
            assert worker.wait(DEADLINE_S)
            assert worker.wait(DEADLINE_S)
        with EpochLoader(cache, 5, min_samples=20) as loader:
            assert [len(list(loader)) for _ in range(2)] == [4, 4]
    (said,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert said.startswith(
        f"{cache.path}: 20 samples were cached, and 20 skipped, most often: schema: fields differ"
    )
    assert "transform=" in said


@pytest.mark.parametrize(
    ("skipped", "used", "much"), [(0, 0, False), (1, 99, False), (2, 99, True), (1, 0, True)]
)
def test_more_than_one_percent_is_much(skipped: int, used: int, much: bool) -> None:
    assert is_much(skipped, used) == much
