"""A cache that is to share its filling tells the program if no Ray cluster answers, or refuses to fill alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import cachestream as cs

pytest.importorskip("ray")
DEADLINE_S = 100.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[cs.Cache]:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # nothing listens there
    with cs.Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        yield cache


@pytest.mark.e2e
def test_a_warning_and_the_status_of_the_complete_cache_say_that_it_was_filled_alone(
    cache: cs.Cache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "cachestream")
    with cs.start_worker(cache, [{"x": i} for i in range(8)], num_workers=1, share="trial") as worker:
        assert worker.wait(DEADLINE_S)
        status = worker.status()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "no Ray cluster answers" in warning
    assert "'trial'" in warning
    assert "share_required=True" in warning
    assert status.fill_state == "complete"
    assert "filling alone" in status.fill_message


def test_share_required_refuses_to_start_without_a_cluster(cache: cs.Cache) -> None:
    with pytest.raises(cs.SourceUnavailableError, match="no Ray cluster answers"):
        cs.start_worker(cache, [{"x": 1}], num_workers=1, share="trial", share_required=True)
    assert not cache.has_worker()


def test_share_required_without_a_group_is_refused(cache: cs.Cache) -> None:
    with pytest.raises(cs.ConfigError, match="name it with share="):
        cs.start_worker(cache, [{"x": 1}], share_required=True)
