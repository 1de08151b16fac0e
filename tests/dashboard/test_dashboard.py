"""The dashboard: what its page and its metrics say is what the cache says, for those who have the token."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

import cachestream as cs
from cachestream import Cache
from cachestream.dashboard.readings import CacheWatch
from tests.cli.support import cli_here, done
from tests.support.browser import Look, take_pictures
from tests.support.caches import fill
from tests.worker.sources import Numbers
from tests.worker.support import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(*paths: object, host: str = "127.0.0.1", token: str | None = None) -> Iterator[str]:
    """A dashboard in a thread of this process, which has loaded Bokeh already; gives its URL."""
    from cachestream.dashboard.server import Dashboard

    ready: Future[tuple[str, Callable[[], object]]] = Future()

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        dashboard = Dashboard([str(path) for path in paths], host, 0, token)
        dashboard._server.start()
        ready.set_result((dashboard.url, lambda: loop.call_soon_threadsafe(stop.set)))
        await stop.wait()
        dashboard.stop()
        await dashboard._server._http.close_all_connections()

    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(asyncio.run, serve())
        url, stop = ready.result(DEADLINE_S)
        try:
            yield url
        finally:
            stop()
            served.result(DEADLINE_S)


@contextmanager
def program(*arguments: object) -> Iterator[str]:
    """The command, in a process of its own; gives the URL that it prints."""
    command = [sys.executable, "-m", "cachestream", "dashboard", *map(str, arguments), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def get(url: str, **headers: str) -> tuple[int, str]:
    """The status and the text of the answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@contextmanager
def refusing() -> Iterator[None]:
    """Where they are refused, Tornado leaves a socket to the garbage, and the client of Bokeh a connection."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def is_served(url: str, token: str) -> bool:
    """Whether a client of Bokeh's gets the page."""
    from bokeh.client import pull_session

    try:
        session = pull_session(url=url, arguments={"token": token})
    except OSError:
        return False
    session.close()
    return True


def values(text: str) -> dict[str, float]:
    """The samples of the metrics that have no label but the cache, by name; of loaders those of rank 0."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("rank", "0") == "0" and not {"state", "stage"} & sample.labels.keys():
                found[sample.name] = sample.value
    return found


def page(*caches: object) -> Any:
    """The page of `caches` as it is when it is opened. Bokeh is loaded by who runs the tests, not by who collects them."""
    from bokeh.document import Document

    from cachestream.dashboard.page import build_page

    document, watches = Document(), [CacheWatch(str(cache)) for cache in caches]
    build_page(document, watches)
    for watch in watches:
        watch.close()
    return document


def heads(document: Any) -> list[str]:
    """The sentence and the table of each cache."""
    from bokeh.models.widgets import Div

    return [model.text for model in document.models if isinstance(model, Div)]


def column(document: Any, name: str) -> list[Any]:
    (source,) = [
        model for model in document.models if name in getattr(model, "data", {}) and "time" in model.data
    ]
    return list(source.data[name])


@pytest.mark.e2e
def test_the_page_and_the_metrics_say_what_the_status_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cache"
    source = Numbers(600, nbytes=2_000)
    options: dict[str, Any] = {"num_workers": 2, "bandwidth_limit": "40MB/s"}
    with (
        Cache(path, size_limit="50MB", min_free=0) as cache,
        cs.start_worker(cache, source, **options) as worker,
    ):
        assert worker.wait(DEADLINE_S)
        with cs.EpochLoader(cache, 50) as loader:
            batches = iter(loader)
            for _ in range(7):
                next(batches)
            time.sleep(0.3)
            next(batches)  # reported: the last report is a quarter of a second old
            with program(path) as url:
                assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", url)
                code, text = get(url.replace("/?", "/metrics?"))
                document = page(path)
            seen = json.loads(done(cli_here(capfd, "status", path, "--json")))
    assert code == 200
    metrics = values(text)
    assert metrics["cachestream_cache_up"] == 1
    assert metrics["cachestream_cache_samples"] == seen["num_samples"] == 600
    assert metrics["cachestream_cache_limit_bytes"] == seen["size_limit"] == 50_000_000
    assert metrics["cachestream_fill_pass_done_ratio"] == seen["pass_done"] == 1.0
    assert metrics["cachestream_loader_batches_total"] == seen["loaders"][0]["batches"] == 8
    assert metrics["cachestream_loader_samples_total"] == 400
    assert metrics["cachestream_loader_epoch_samples"] == 600
    (head,) = heads(document)
    assert str(path) in head
    assert "<dt>samples</dt><dd>600 in " in head
    assert "of 50 MB" in head
    assert "<td>0 of 1</td>" in head
    assert "<td>8</td>" in head
    assert column(document, "limit")[-1] == 50.0
    assert abs(column(document, "size")[-1] - seen["size_bytes"] / 1e6) < 0.1
    lengths = [model.data for model in document.models if "epoch" in getattr(model, "data", {})]
    assert [(list(one["epoch"]), list(one["samples"])) for one in lengths] == [([0], [600])]


@pytest.mark.e2e
def test_the_rates_of_a_worker_and_a_trainer_and_the_bandwidth_limit_are_shown(tmp_path: Path) -> None:
    with Cache(tmp_path / "cache", size_limit="50MB", min_free=0) as cache:
        source = Numbers(None, nbytes=2_000, pause_s=0.002)
        with cs.start_worker(cache, source, num_workers=1, bandwidth_limit="40MB/s"):
            cache.wait(64, DEADLINE_S)
            now_s, watch = [1000.0], CacheWatch(cache.path, lambda: now_s[0])
            with cs.EpochLoader(cache, 8) as loader:
                list(loader)
                first = watch.look()
                assert first.rates is None
                assert first.status is not None
                assert first.status.worker is not None
                assert first.status.worker.bandwidth_bytes_per_s == 40e6
                before = loader.stats.samples
                time.sleep(0.3)  # until the next report is due
                list(loader)
                wait_until(lambda: cache.status().loaders[0].samples > before, "the second epoch is reported")
                now_s[0] += 0.5
                assert watch.look() is first
                now_s[0] += 4.5
                rates = watch.look().rates
            assert rates is not None
            assert 0 < rates.trained <= (loader.stats.samples - before) / 5
            assert rates.cached > 0
            assert rates.fetched_bytes > 0
            watch.close()


@pytest.mark.e2e
def test_a_cache_that_goes_and_comes_back_is_said_to_be_gone_and_shown_again(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("gone", "stays")]
    for path in paths:
        fill(path, 1, 8).close()
    with serving(*paths) as url:

        def up() -> list[float]:
            text = get(url.replace("/?", "/metrics?"))[1]
            families = {family.name: family for family in text_string_to_metric_families(text)}
            return [sample.value for sample in families["cachestream_cache_up"].samples]

        assert up() == [1, 1]
        shutil.rmtree(paths[0])
        wait_until(lambda: up() == [0, 1], "one is gone")
        assert sorted("There is no cache" in head for head in heads(page(*paths))) == [False, True]
        assert not paths[0].exists(), "looking makes no cache"
        fill(paths[0], 1, 8).close()
        wait_until(lambda: up() == [1, 1], "it is back")


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as found:
        found.bind(("::1", 0))
        return True
    return False


@pytest.mark.e2e
@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_the_url_of_an_ipv6_address_is_one_that_opens(tmp_path: Path) -> None:
    fill(tmp_path / "cache", 1, 8).close()
    with serving(tmp_path / "cache", host="::1") as url:
        assert url.startswith("http://[::1]:")
        assert get(url)[0] == 200


@pytest.mark.e2e
def test_a_cache_whose_path_is_not_utf_8_is_shown_once(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9")
    fill(path, 1, 8).close()
    with program(path, f"{path}/", "--token", "") as url:
        code, text = get(f"{url}metrics")
        assert is_served(url, "")
    assert code == 200
    (up,) = [line for line in text.splitlines() if line.startswith("cachestream_cache_up")]
    assert up.endswith('caf\\\\xe9"} 1.0')


@pytest.mark.parametrize("is_seen_to_be_gone", [True, False])
def test_the_uses_are_those_of_the_cache_that_is_there(tmp_path: Path, is_seen_to_be_gone: bool) -> None:
    now_s = [time.time()]
    watch = CacheWatch(str(tmp_path / "cache"), lambda: now_s[0])
    with fill(tmp_path / "cache", 1, 8) as cache:
        cache.snapshot().close()
    assert (before := watch.look().freshness) is not None
    assert before[:2] == (0, 8)
    shutil.rmtree(tmp_path / "cache")
    now_s[0] += 2
    if is_seen_to_be_gone:
        assert watch.look().status is None
    fill(tmp_path / "cache", 1, 8).close()
    now_s[0] += 2
    assert (after := watch.look().freshness) is not None
    assert after[:2] == (8, 0)
    watch.close()


def test_a_cache_is_gone_only_where_it_was_seen(tmp_path: Path) -> None:
    now_s, folder = [1000.0], tmp_path / "cache"
    watch = CacheWatch(str(folder), lambda: now_s[0])

    def said() -> str:
        now_s[0] += 60
        return watch.look().problem

    assert "There is no cache yet" in said()
    assert "There is no cache yet" in said()
    fill(folder, 1, 8).close()
    assert not said()
    shutil.rmtree(folder)
    assert "The cache is gone" in said()


def test_a_look_changes_nothing_in_a_cache(tmp_path: Path) -> None:
    fill(tmp_path / "cache", 2, 8).close()

    def files() -> dict[str, tuple[int, int]]:
        found = sorted((tmp_path / "cache").rglob("*"))
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found if path.is_file()}

    before = files()
    watch = CacheWatch(str(tmp_path / "cache"))
    assert watch.look().status is not None
    watch.close()
    assert files() == before


# Bokeh has drawn the plots, the table stands in the shadow of a root, and nothing of it is wider than the page.
DRAWN = """
(() => {
  const texts = [], look = node => {
    if (node.shadowRoot) look(node.shadowRoot);
    if (node.className == "ranks") texts.push(node.getBoundingClientRect().right <= innerWidth);
    for (const child of node.children) look(child);
  };
  look(document.body);
  return texts.length == 1 && texts[0] && Bokeh.documents[0].is_idle;
})()
"""


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_the_page_on_a_light_screen_and_on_a_dark_narrow_one(tmp_path: Path) -> None:
    looks = Look(tmp_path / "wide.png", 1300, dark=False), Look(tmp_path / "narrow.png", 390, dark=True)
    with (
        fill(tmp_path / "cache", 2, 8) as cache,
        cs.EpochLoader(cache, 4) as loader,
        serving(cache.path) as url,
    ):
        list(loader)
        take_pictures(url, looks, ready=DRAWN, timeout_s=120)
    for look in looks:
        with Image.open(look.picture) as page_picture:
            pixels = np.asarray(page_picture.convert("L"))
        assert pixels.shape[1] == look.width
        assert (pixels[-1, -1] < 60) == look.dark
        assert len(np.unique(pixels)) > 30, "text and plots"
