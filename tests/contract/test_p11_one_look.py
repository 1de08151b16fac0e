"""P11: one look tells. Status, metrics, the live page and a trace add up with what was fed and what is on the disk."""

from __future__ import annotations

import gc
import html
import itertools
import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image

import cachestream as cs
from tests.contract.commands import DEADLINE_S, done, program, told
from tests.contract.conftest import NUM_SAMPLES, bytes_on_disk


def await_state(is_so: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def picky(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Leave the tens out, fail on those that end on one, and keep the rest."""
    number = int(sample["array"][0])
    if number % 10 == 1:
        raise ValueError("ends on one")
    return sample if number % 10 else None


@dataclass(frozen=True)
class Fed:
    """A cache that a worker has filled from files, and a loader in the midst of its second epoch."""

    cache: cs.Cache
    worker: cs.Worker
    loader: cs.EpochLoader
    file_bytes: int


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fed]:
    folder, path = tmp_path_factory.mktemp("fed"), tmp_path_factory.mktemp("one") / "cache"
    for number in range(100):
        np.save(folder / f"{number:02}.npy", np.full(500, number, np.float32))
    (folder / "99.npy").write_bytes(b"no array")
    with (
        cs.Cache(path, "4MB", min_free=0) as cache,
        cs.start_worker(
            cache, folder, transform=picky, num_workers=1, shard_size="16KB", bandwidth_limit="40MB/s"
        ) as worker,
    ):
        worker.wait(timeout_s=DEADLINE_S)
        with cs.EpochLoader(cache, 10, drop_last=False) as loader:
            assert sum(len(batch["array"]) for batch in loader) == 79
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            # A loader reports four times a second at most: the fourth batch is reported with those before it.
            await_state(lambda: time.time() - reported(cache) > 0.3, "time passes")
            next(batches)
            await_state(lambda: cache.status().loaders[0].batches == loader.stats.batches, "it is reported")
            yield Fed(cache, worker, loader, sum(file.stat().st_size for file in folder.iterdir()))
            del batches


def reported(cache: cs.Cache) -> float:
    return cache.status().loaders[0].reported_s


def test_what_was_fed_is_cached_left_out_or_told_with_its_reason(fed: Fed) -> None:
    status = fed.cache.status()
    assert (status.num_samples, status.skipped, status.num_units, status.pass_done) == (79, 11, 100, 1.0)
    told = {(failure.kind, failure.reason): failure for failure in status.failures}
    (transform,) = (failure for (kind, _), failure in told.items() if kind == "transform")
    assert (transform.count, transform.reason) == (10, "ValueError: ends on one")
    assert re.search(r"\d1\.npy", str(transform.example))
    assert sum(failure.count for failure in status.failures) == status.skipped
    (other,) = (failure for (kind, _), failure in told.items() if kind != "transform")
    assert "99.npy" in f"{other.example}{other.reason}"
    worker = status.worker
    assert worker is not None
    assert (worker.totals.samples, worker.totals.dropped, worker.totals.units) == (79, 10, 100)
    assert worker.totals.fetched_bytes == pytest.approx(fed.file_bytes, rel=0.02)
    assert (worker.bandwidth_bytes_per_s, worker.restarts, len(worker.states)) == (40e6, 0, 1)
    assert (status.fill_state, status.pass_number, status.is_listing) == ("complete", 1, False)
    assert status.fill_message.startswith(
        "11 skipped, most often: transform: ValueError: ends on one (first: "
    )


def test_sizes_and_counts_are_those_of_the_files(fed: Fed) -> None:
    shards = [shard.stat() for shard in Path(fed.cache.path, "shards").iterdir()]
    await_state(
        lambda: fed.cache.status().size_bytes == bytes_on_disk(Path(fed.cache.path)), "the worker rests"
    )
    status = fed.cache.status()
    assert status.num_shards == len(shards)
    assert status.size_limit == 4_000_000
    assert sum(shard.st_blocks * 512 for shard in shards) <= status.size_bytes
    assert status.worker is not None
    assert status.worker.totals.written_bytes == pytest.approx(
        sum(shard.st_size for shard in shards), rel=0.2
    )
    assert (status.leases > 0, status.reserved_bytes, status.quarantined, status.evicted_shards) == (
        True,
        0,
        0,
        0,
    )
    assert status.leased_bytes == sum(shard.st_blocks * 512 for shard in shards)
    assert status.snapshots >= 2
    assert json.loads(json.dumps(status.to_dict()))["num_samples"] == 79
    assert str(status).startswith(f"79 samples in {len(shards)} shards, ")
    assert str(status).endswith("of 4 MB, complete, pass 1 100%")


def test_a_notebook_shows_the_numbers_of_the_status_in_tables_of_sound_html(fed: Fed) -> None:
    as_html = operator.methodcaller("_repr_html_")  # as IPython asks for it
    for shown_there, words in (
        (fed.cache, f"79 in {fed.cache.num_shards} shards"),
        (fed.cache.status(), f"79 in {fed.cache.num_shards} shards"),
        (fed.loader, "119 samples in 12 batches"),
        (fed.loader.dataset, "79"),
    ):
        table = ET.fromstring(f"<all>{as_html(shown_there)}</all>")
        assert words in [cell.text for cell in table.iter("td")]


def test_evictions_and_waits_are_counted_and_a_full_cache_says_what_it_waits_for(tmp_path: Path) -> None:
    def endless(rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.random(4096, np.float32)}

    with (
        cs.Cache(tmp_path / "c", "2MB", min_free=0) as cache,
        cs.start_worker(cache, endless, num_workers=1, shard_size="200KB") as worker,
    ):
        worker.wait(timeout_s=DEADLINE_S)
        await_state(lambda: cache.status().fill_message, "it rests")
        status = cache.status()
        assert (status.fill_state, status.pass_done, status.num_units) == ("full", None, None)
        assert "rests until an epoch uses it" in status.fill_message
        assert (status.evicted_samples, status.epoch_waits) == (0, 0)
        with cs.EpochLoader(cache, 8) as loader:
            await_state(lambda: list(loader) and cache.status().evicted_samples, "epochs make room")
            # Not by the count of waits: one may have ended already, as the loader prepares its next epoch.
            await_state(lambda: "waiting for the next epoch" in shown(cache.path), "it waits")
            await_state(lambda: "waiting for the next epoch" in cache.status().fill_message, "and says so")
            status = cache.status()
            assert status.evicted_unused_samples == 0
            assert status.worker is not None
            assert status.worker.totals.samples >= status.num_samples + status.evicted_samples
            assert cs.metrics(loader)["cachestream/epoch_waits"] == cache.status().epoch_waits > 0
        worker.stop()
        before = cache.status()
        cache.evict(to=0)
        after = cache.status()
        assert (after.num_samples, after.num_shards, after.leased_bytes) == (0, 0, 0)
        assert after.evicted_samples == before.evicted_samples + before.num_samples
        assert after.evicted_shards == before.evicted_shards + before.num_shards
        assert 0 < after.evicted_unused_samples <= before.num_samples


def shown(path: str) -> str:
    return done("status", path, COLUMNS="200")


# --- loaders: their statistics, their reports in the status, and the numbers for loggers


def test_a_loader_in_the_status_says_what_it_says_itself(fed: Fed) -> None:
    stats = fed.loader.stats
    assert (stats.epoch, stats.epoch_samples, stats.batches, stats.samples) == (1, 79, 12, 119)
    assert (stats.skipped, stats.shards) == (0, fed.cache.num_shards)
    assert 0 <= stats.epoch_wait_share <= 1
    assert 0 <= stats.wait_share <= 1
    assert 1 <= stats.reuse_factor <= 2
    (report,) = fed.cache.status().loaders
    assert (report.pid, report.rank, report.ranks) == (os.getpid(), 0, 1)
    assert (report.epoch, report.epoch_samples, report.batches, report.samples) == (1, 79, 12, 119)
    assert [(number, samples) for number, samples, _ in report.epochs] == [(0, 79), (1, 79)]
    (shown,) = told("status", fed.cache.path)["loaders"]
    assert (shown["batches"], shown["wait_s"]) == (12, report.wait_s)


OF_A_LOADER: Final = {
    *("epoch", "epoch_samples", "epoch_shards", "batches", "samples", "skipped_samples", "samples_per_s"),
    *("data_wait_share", "data_wait_s", "epoch_gap_s", "prepare_s", "reuse_factor"),
}
OF_A_CACHE: Final = {
    *("cache_samples", "cache_shards", "cache_bytes", "cache_limit_bytes", "cache_used_share"),
    *("cache_leased_bytes", "evicted_samples", "evicted_unused_samples", "failed_samples"),
    *("quarantined_shards", "epoch_waits", "fill_pass", "fill_pass_done", "fill_samples_per_s"),
    *("fill_bytes_per_s", "fill_space_wait_s", "fill_restarts", "fill_processes"),
}


def test_metrics_are_one_flat_dict_of_the_documented_numbers(fed: Fed) -> None:
    found = cs.metrics(fed.loader)
    assert found.keys() == {f"cachestream/{name}" for name in OF_A_LOADER | OF_A_CACHE}
    assert all(isinstance(value, int | float) for value in found.values())
    found = cs.metrics(fed.loader, prefix="")
    stats, status = fed.loader.stats, fed.cache.status()
    expected = {
        "epoch": 1,
        "epoch_samples": 79,
        "epoch_shards": status.num_shards,
        "batches": 12,
        "samples": 119,
        "data_wait_share": stats.epoch_wait_share,
        "data_wait_s": stats.wait_s,
        "reuse_factor": stats.reuse_factor,
        "cache_samples": 79,
        "cache_shards": status.num_shards,
        "cache_limit_bytes": 4_000_000,
        "cache_leased_bytes": status.leased_bytes,
        "failed_samples": 11,
        "fill_pass": 1,
        "fill_pass_done": 1.0,
        "fill_processes": 1,
        "fill_restarts": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["cache_used_share"] == found["cache_bytes"] / 4_000_000
    assert found["fill_samples_per_s"] > 0
    assert cs.metrics(cache=fed.cache, prefix="a.").keys() == {f"a.{name}" for name in OF_A_CACHE}
    with pytest.raises(cs.ConfigError, match=r"give a loader, or cache="):
        cs.metrics()
    with pytest.raises(cs.ConfigError, match=r"a cache goes by its name, metrics\(cache="):
        cs.metrics(fed.cache)  # type: ignore[arg-type]


def test_without_a_worker_its_metrics_are_zeros(filled: Path) -> None:
    with cs.Cache(filled) as cache:
        found = cs.metrics(cache=cache, prefix="")
    assert [value for name, value in found.items() if name.startswith(("fill_s", "fill_b", "fill_r"))] == [
        0
    ] * 4
    assert (found["cache_samples"], found["fill_processes"]) == (NUM_SAMPLES, 0)


# --- the verdict on what holds the training up


def far(rng: np.random.Generator) -> dict[str, Any]:
    time.sleep(0.05)
    return {"x": rng.random(8)}


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.05)
    return sample


def slow_batch(batch: Any) -> Any:
    time.sleep(0.05)
    return batch


@dataclass(frozen=True)
class Situations:
    """Caches in a few situations: what the live page says of each, the statuses of those that fill, all metrics."""

    said: dict[str, str]
    statuses: dict[str, Any]
    metrics: str


@pytest.fixture(scope="module")
def situations(filled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Situations]:
    pytest.importorskip("bokeh")
    folder = tmp_path_factory.mktemp("situations")
    with ExitStack() as stack:

        def filling(name: str, source: Any, **options: Any) -> cs.Cache:
            cache = stack.enter_context(cs.Cache(folder / name, "4MB", min_free=0))
            stack.enter_context(cs.start_worker(cache, source, num_workers=1, **options))
            return cache

        caches = {"remote": filling("remote", far, bandwidth_limit="40MB/s")}
        caches["transform"] = filling("transform", [{"x": i} for i in range(10**5)], transform=slow)
        cs.Cache(folder / "empty", "4MB").close()
        shutil.copytree(filled, folder / "model")
        whole = stack.enter_context(cs.Cache(folder / "model"))
        caches["transform"].wait(8, timeout_s=DEADLINE_S)
        caches["remote"].wait(8, timeout_s=DEADLINE_S)
        waits = stack.enter_context(cs.EpochLoader(caches["transform"], 4, batch_transform=slow_batch))
        await_state(lambda: len(list(waits)) and waits.stats.epoch_wait_share > 0.5, "it waits for data")
        steps = stack.enter_context(cs.EpochLoader(whole, 1))
        list(steps)
        batches = iter(steps)  # whose first batch waits for nothing

        steps_s = itertools.accumulate(itertools.repeat(2.0), operator.mul, initial=0.05)

        def step() -> bool:
            assert next(batches) is not None
            time.sleep(
                next(steps_s)
            )  # longer and longer: on a busy machine each batch waits for the processor
            found = [one.epoch_wait_share for one in whole.status().loaders]
            return bool(found) and max(found) < 0.015

        await_state(step, "the model takes longer than the data")
        names = ("remote", "transform", "empty", "model")
        said, metrics = read_page(*(folder / name for name in names))
        statuses = {name: cache.status() for name, cache in caches.items()}
        yield Situations(dict(zip(names, said, strict=True)), statuses, metrics)


def read_page(*paths: Path) -> tuple[list[str], str]:
    """What a live page says of each cache, and its metrics."""
    from bokeh.client import pull_session
    from bokeh.models.widgets import Div

    with program("dashboard", *paths, "--port", 0, "--token", "") as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}metrics", timeout=DEADLINE_S) as answer:
            metrics = answer.read().decode()
        session = pull_session(url=url)
        with warnings.catch_warnings():  # the client of Bokeh leaves a connection
            warnings.simplefilter("ignore", ResourceWarning)
            heads = [str(model.text) for model in session.document.models if isinstance(model, Div)]
            session.close()
            del session
            gc.collect()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    by_path = {path: head for path in paths for head in heads if str(path) in head}
    return [html.unescape(re.sub("<[^>]+>", " ", by_path[path])) for path in paths], metrics


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("situation", "verdict"),
    [
        (
            "remote",
            r"Nobody trains on the cache yet; in its filling, the remote takes \d+% of its processes' time",
        ),
        (
            "transform",
            r"The trainer waits for data \d+% of its time, while the cache fills: the transform takes",
        ),
        ("empty", r"Nobody fills the cache, and nobody trains on it\."),
        ("model", r"The model is the bottleneck: the trainer waits for data \d\.\d% of its time\."),
    ],
)
def test_the_live_page_says_in_one_sentence_what_holds_the_training_up(
    situation: str, verdict: str, situations: Situations
) -> None:
    assert re.search(verdict, situations.said[situation])


@pytest.mark.e2e
@pytest.mark.parametrize("stage", ["remote", "transform"])
def test_status_says_where_the_time_of_the_sampling_processes_goes(
    stage: str, situations: Situations
) -> None:
    status = situations.statuses[stage]
    (line,) = (line for line in shown(status.path).splitlines() if "time goes to" in line)
    assert line.split()[3] == stage
    totals = status.worker.totals
    spent = {"remote": totals.fetch_wait_s, "transform": totals.transform_s}
    assert spent[stage] == max(spent.values()) > 0.2


@pytest.mark.e2e
def test_the_metrics_of_workers_and_loaders_are_those_of_the_guide_and_of_the_grafana_board(
    situations: Situations,
) -> None:
    docs = Path(__file__).parents[2] / "docs"
    guide = (docs / "reference" / "integrations.md").read_text(encoding="utf-8")
    board = (docs / "assets" / "grafana.json").read_text(encoding="utf-8")
    served = set(re.findall(r"^(cachestream_\w+)\{", situations.metrics, re.MULTILINE))
    assert served == set(re.findall(r"^\| `(cachestream_\w+)", guide, re.MULTILINE))
    assert set() < set(re.findall(r"cachestream_\w+", board)) <= served
    values = dict(line.rsplit(" ", 1) for line in situations.metrics.splitlines() if line[0] != "#")
    fields = [
        re.search(r'cache="[^"]*/(\w+)"', name) for name in values if name.startswith("cachestream_worker_up")
    ]
    assert [field[1] for field in fields if field] == ["remote", "transform", "empty", "model"]
    assert [float(value) for name, value in values.items() if "worker_up" in name] == [1, 1, 0, 0]
    (limit,) = (value for name, value in values.items() if "bandwidth_limit" in name)
    assert float(limit) == 40e6
    (samples,) = (
        value for name, value in values.items() if "loader_epoch_samples" in name and "/model" in name
    )
    assert float(samples) == NUM_SAMPLES


# --- a trace


def events_of(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The spans of a trace, and the names of its processes."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if (e["ph"], e["name"]) == ("M", "process_name")}
    return [e for e in events if e["ph"] == "X"], names


def test_a_trace_shows_the_stages_of_all_processes_on_one_clock(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (160, 160, 3), np.uint8)
    for number in range(40):
        Image.fromarray(np.roll(pixels, number, 0)).save(tmp_path / "photos" / f"{number:03}.jpg")
    path, began_s = tmp_path / "run.json", time.monotonic()

    def later(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.001)
        return sample

    with cs.trace(path) as trace:
        with pytest.raises(cs.ConfigError, match="traced already"):
            cs.trace(tmp_path / "other.json")
        options: dict[str, Any] = {"size_limit": "20MB", "min_free": 0, "min_samples": 40, "num_workers": 1}
        with cs.stream(
            tmp_path / "photos",
            cache=tmp_path / "cache",
            batch_size=8,
            transform=later,
            batch_transform=slow_batch,
            **options,
        ) as loader:
            assert [sum(len(batch["image"]) for batch in loader) for _ in range(2)] == [40, 40]
    spans, processes = events_of(path)
    assert sorted(processes.values()) == ["main process", "sampler 0"]
    here, there = (
        Counter(e["name"] for e in spans if (processes[e["pid"]] == "main process") is mine)
        for mine in (True, False)
    )
    assert {"prepare", "snapshot", "wait", "transform"} <= here.keys()
    assert here["transform"] >= 10
    assert {"read", "transform", "pack", "publish"} <= there.keys()
    assert there["decode"] == 40
    units = sorted(e["args"]["unit"] for e in spans if e["name"] == "read")
    assert units == list(range(40))
    assert all(1e6 * began_s <= e["ts"] <= e["ts"] + e["dur"] <= 1e6 * time.monotonic() for e in spans)
    assert all(e["dur"] >= 99 for e in spans), "events shorter than 0.1 ms are left out"
    written = path.read_bytes()
    trace.close()
    assert path.read_bytes() == written
    assert sorted(os.listdir(tmp_path)) == ["cache", "photos", "run.json"]


def test_a_trace_that_nobody_closes_is_written_at_the_end_of_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.txt").touch()
    script = "import sys, cachestream as cs\ntrace = cs.trace(sys.argv[2])\ncs.open_source(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "run.json")],
        check=True,
        timeout=DEADLINE_S,
    )
    spans, processes = events_of(tmp_path / "run.json")
    assert set(processes.values()) == {"main process"}
    assert {e["name"] for e in spans} == {"list"}
    assert sorted(os.listdir(tmp_path)) == ["many", "run.json"]


def test_a_trace_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "run.json"):
        with pytest.raises(cs.ConfigError, match=path.name):
            cs.trace(path)
    assert not list(tmp_path.iterdir())
