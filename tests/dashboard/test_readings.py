"""The verdict and the rates, from readings that are made by hand; the freshness of a real cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cachestream import Cache
from cachestream.dashboard.prometheus import metrics_text
from cachestream.dashboard.readings import (
    CacheWatch,
    Reading,
    read_freshness,
    verdict,
)
from cachestream.storage.status import CacheStatus, WorkerStatus
from cachestream.storage.telemetry import Totals
from tests.support.caches import fill
from tests.support.loader_report import LOADER

TOTALS = Totals(100, 10, 5_000, 5_000, 4_000, 0, 0, 0, 6.0, 3.0, 0.5, 0.5, 0.0, 0.0)
WORKER = WorkerStatus(7, 60.0, 0, ("fetching", "writing"), TOTALS)


@pytest.fixture
def status(tmp_path: Path) -> CacheStatus:
    with fill(tmp_path / "cache", 1, 8) as cache:
        return replace(cache.status(), worker=WORKER, fill_state="filling", loaders=(LOADER,))


def reading(status: CacheStatus, at_s: float = 0.0, **changes: Any) -> Reading:
    return Reading(status.path, at_s, replace(status, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "waits for data 50% of its time, while the cache fills: the remote takes 60%"),
        ({"worker": replace(WORKER, totals=replace(TOTALS, transform_s=30.0))}, "the transform takes"),
        ({"loaders": (replace(LOADER, epoch_wait_share=0.01),)}, "The model is the bottleneck"),
        ({"loaders": (), "worker": None}, "Nobody fills the cache, and nobody trains"),
        ({"loaders": ()}, "Nobody trains on the cache yet; in its filling, the remote takes"),
        ({"fill_state": "complete"}, "the cache is complete, so reading it, or the batch_transform"),
        (
            {"remote_message": "waiting for the remote: no answer"},
            "held up: waiting for the remote: no answer.",
        ),
        ({"fill_state": "failed", "fill_message": "no such bucket"}, "has failed: no such bucket."),
    ],
)
def test_the_verdict_names_what_holds_the_training_up(
    status: CacheStatus, changes: dict[str, Any], said: str
) -> None:
    assert said in verdict(reading(status, **changes))


def test_every_loader_of_a_process_has_metrics_of_its_own(status: CacheStatus) -> None:
    loaders = LOADER, replace(LOADER, samples=7), replace(LOADER, rank=1)
    lines = metrics_text([reading(status, loaders=loaders)]).decode().splitlines()
    names = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(names) == len(set(names))
    samples = [line for line in lines if line.startswith("cachestream_loader_samples_total")]
    assert [float(line.rpartition(" ")[2]) for line in samples] == [500, 7, 500]


@pytest.mark.e2e
def test_the_lengths_of_epochs_are_those_of_the_loader_that_trains(
    status: CacheStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bokeh.document import Document

    from cachestream.dashboard.page import build_page  # loads Bokeh

    measures = replace(LOADER, samples=10, epochs=((0, 10, 0.0),))
    trains = replace(LOADER, samples=500, epochs=((0, 64, 0.0), (1, 80, 5.0)))
    watch, document = CacheWatch(status.path), Document()
    monkeypatch.setattr(watch, "look", lambda: reading(status, 1.0, loaders=(measures, trains)))
    build_page(document, [watch])
    tables: list[Any] = [getattr(model, "data", {}) for model in document.models]
    (lengths,) = [table["samples"] for table in tables if "epoch" in table]
    assert list(lengths) == [64, 80]


@pytest.mark.e2e
def test_what_the_page_says_is_escaped(status: CacheStatus) -> None:
    from cachestream.dashboard.page import head_html  # loads Bokeh

    text = head_html(replace(reading(status, fill_message="<b>"), path="/<script>"))
    assert "<script>" not in text
    assert "<b>" not in text
    assert "&lt;script&gt;" in text


def test_the_freshness_counts_samples_by_uses(tmp_path: Path) -> None:
    with Cache(tmp_path / "empty", size_limit="10MB", min_free=0) as empty:
        assert read_freshness(empty) is None
    with fill(tmp_path / "cache", 3, 8) as cache:
        for _ in range(4):
            cache.snapshot().close()
        found = read_freshness(cache)
    assert found is not None
    assert (sum(found), found[4]) == (24, 0)
