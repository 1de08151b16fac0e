"""The tables of notebooks: their values are those of the objects, and nothing of a value is taken as HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import cachestream as cs
from cachestream.config import format_size
from cachestream.repr_html import table
from cachestream.storage.status import CacheStatus

HOSTILE = '<script>alert("1")</script>&\'"'


def rows_of(text: str) -> dict[str, str]:
    """The rows of all tables; the text must be well-formed, as XML is."""
    root = ET.fromstring(f"<all>{text}</all>")
    assert not {one.tag for one in root.iter()} - {"all", "div", "strong", "table", "tbody", "tr", "th", "td"}
    return {row[0].text or "": row[1].text or "" for row in root.iter("tr")}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    """A cache with 40 samples, in a folder with a hostile name."""
    cache = cs.Cache(tmp_path / HOSTILE.replace("/", "\N{DIVISION SLASH}"), size_limit="20MB", min_free="0B")
    with cs.start_worker(cache, [{"x": np.full(4, i)} for i in range(40)], num_workers=1) as worker:
        worker.wait(timeout_s=60)
    yield cache
    cache.close()


def test_all_of_a_value_and_its_name_is_escaped() -> None:
    text = table(HOSTILE, {HOSTILE: HOSTILE})
    escaped = "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#x27;&quot;"
    assert text.count(escaped) == 3
    assert "<script" not in text
    assert rows_of(text) == {HOSTILE: HOSTILE}


@pytest.mark.parametrize(
    ("share", "width"), [(0.0, "0.0%"), (0.5, "50.0%"), (1.0, "100.0%"), (1.02, "100.0%")]
)
def test_the_bar_is_as_long_as_the_share_and_never_longer_than_all(share: float, width: str) -> None:
    assert re.findall(r"<div style=\"width:([0-9.]+%)", table("t", {}, share)) == [width]


def test_a_table_takes_its_colours_from_the_page_and_leaves_out_rows_without_a_value() -> None:
    text = table("t", {"a": "", "b": None, "c": 0}, 0.3)
    assert rows_of(text) == {"c": "0"}
    assert set(re.findall(r"(?:color|background|border)[^:;\"]*:([^;\"]+)", text)) <= {
        *("none", "currentColor", "1px solid currentColor", ".3em", "collapse"),
    }


@pytest.mark.e2e
def test_a_cache_and_its_status_show_the_values_of_the_status(cache: cs.Cache) -> None:
    status = cache.status()
    text = status._repr_html_()
    assert rows_of(text) == {
        "samples": f"{status.num_samples} in {status.num_shards} shards",
        "size": f"{format_size(status.size_bytes)} of {format_size(status.size_limit)}",
        "filling": "complete, pass 1: 100%",
        "evicted": "0 samples (lru)",
        "leases": "0",
        "source": status.source,
    }
    assert status.num_samples == 40
    assert f"<strong>Cache {html.escape(str(cache.path))}</strong>" in text
    assert f"width:{100 * status.size_bytes / status.size_limit:.1f}%" in text
    assert isinstance(status, CacheStatus)
    assert rows_of(cache._repr_html_()).keys() == rows_of(text).keys()


@pytest.mark.e2e
def test_a_loader_its_stats_and_its_dataset_show_their_numbers(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, batch_size=10) as loader:
        assert rows_of(loader.stats._repr_html_())["reuse"] == "–"  # no sample was drawn
        iterator = iter(loader)
        next(iterator)
        rows, dataset = rows_of(loader._repr_html_()), rows_of(loader.dataset._repr_html_())
        assert (rows["epoch"], rows["batches of it"], rows["batch size"]) == ("0", "1", "10")
        assert rows["cache"] == str(cache.path)
        assert rows["delivered"] == "10 samples in 1 batches"
        assert rows["drawn from"] == f"40 samples in {loader.stats.shards} shards"
        assert (dataset["samples"], dataset["state"]) == ("40", "open")
        assert rows_of(loader.stats._repr_html_()).items() <= rows.items()
        del iterator
