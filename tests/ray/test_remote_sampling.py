"""Remote sampling on a Ray cluster of this machine: the samples of local workers, whatever dies."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.errors import ConfigError, WorkerError
from cachestream.storage.telemetry import Board
from tests.cli.support import cli_here, done
from tests.ray.nodes import NODE
from tests.ray.support import (
    Sample,
    Tables,
    in_windows,
    samples_of,
    slow_in_one_process,
    with_faults,
    with_hanging,
    with_killer,
    with_noise,
    with_reading_threads,
)
from tests.support.plugins import forget_plugins, lay_package, lay_site
from tests.worker.sources import Mute, Named, Numbers, Ragged
from tests.worker.support import (
    DEADLINE_S,
    failures_of,
    fill,
    only_once,
    sampling_pids,
    wait_until,
)

cluster_utils = pytest.importorskip("ray.cluster_utils")

OPTIONS: dict[str, Any] = {"engine": "ray", "ray_options": {"num_cpus": 0.1}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """One node: Ray would place so small actors on no other."""
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def second_node(cluster: Any) -> None:
    """A second node of the cluster."""
    cluster.add_node(**NODE)


@pytest.fixture(autouse=True)
def in_cluster(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)


Fill = Callable[..., tuple[dict[str, Sample], list[tuple[str, str, int]]]]


def failures(cache: Cache) -> list[tuple[str, str, int]]:
    return sorted((row.kind, row.reason, row.count) for row in cache.status().failures)


@pytest.fixture
def locally(tmp_path: Path) -> Fill:
    """The samples and failures that a local worker caches."""

    def fill_locally(source: Any, **options: Any) -> tuple[dict[str, Sample], list[tuple[str, str, int]]]:
        with closing(Cache(tmp_path / "local", size_limit="50MB", min_free=0)) as cache:
            fill(cache, source, **options)
            return samples_of(cache), failures(cache)

    return fill_locally


def actor_pids(cluster: Any) -> list[int]:
    """The processes of actors on the nodes of the cluster."""
    found = []
    for node in cluster.list_all_nodes():
        (raylet,) = node.all_processes["raylet"]
        children = Path(f"/proc/{raylet.process.pid}/task/{raylet.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ReadActor"):
                    found.append(pid)
    return found


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.usefixtures("second_node")
@pytest.mark.parametrize(
    ("source", "transform"),
    [
        pytest.param(Named(40, 5), with_noise, id="noise"),
        pytest.param(Named(40, 5), in_windows, id="windows"),
        pytest.param(Tables(5, 100), None, id="tables"),
        pytest.param(Ragged(30, 3), None, id="ragged"),
        pytest.param(Numbers(3, 4, 3_000_000), None, id="large"),
        pytest.param(Named(40, 5), cs.pack_tokens(29, "x", eos=256), id="packed"),
    ],
)
def test_the_samples_are_those_of_a_local_worker(
    cache: Cache, locally: Fill, source: Any, transform: Any
) -> None:
    options = OPTIONS | {"ray_options": {"num_cpus": 0.1, "scheduling_strategy": "SPREAD"}}
    fill(cache, source, num_workers=2, transform=transform, seed=7, **options)
    expected = locally(source, transform=transform, seed=7)
    assert (samples_of(cache), failures(cache)) == expected
    assert expected[0]


@pytest.mark.e2e
def test_an_actor_that_is_killed_loses_nothing_of_what_a_local_worker_caches(
    cache: Cache, cluster: Any, locally: Fill
) -> None:
    """Samples that fail are counted as there, too."""
    source = Named(200, 2, pause_s=0.1)
    options: dict[str, Any] = {"transform": with_faults, "seed": 7}
    with cs.start_worker(cache, source, num_workers=2, **options, **OPTIONS) as worker:
        cache.wait(1, timeout_s=DEADLINE_S)
        os.kill(actor_pids(cluster)[0], signal.SIGKILL)
        assert worker.wait(DEADLINE_S)
    expected = locally(replace(source, pause_s=0.0), **options)
    assert (samples_of(cache), failures(cache)) == expected
    assert only_once(cache) == expected[0].keys()
    assert expected[0]


@pytest.mark.e2e
def test_the_command_line_has_files_read_by_actors_and_counts_them(
    cache: Cache, locally: Fill, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(50):
        np.save(tmp_path / f"{number}.npy", np.full((number % 3 + 1, 100), number))
    files = tmp_path / "*.npy"
    options = ("--workers", 2, "--engine", "ray", "--ray-option", "num_cpus=0.1")
    done(cli_here(capfd, "worker", files, cache.path, *options))
    counted = Board(cache.directory.worker_file("board")).totals()
    expected, _ = locally(cs.open_source(files))
    assert samples_of(cache) == expected
    assert len(expected) == 50
    assert counted.units == 50
    assert counted.fetched_bytes >= sum(path.stat().st_size for path in tmp_path.glob("*.npy"))


@pytest.mark.slow
def test_plug_ins_decode_in_actors_and_are_missed_where_they_are_not_installed(
    cache: Cache, locally: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = lay_site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    lay_package(site, "pairs", decoders={".dbl": "pairs_plugin:decode", ".bad": "pairs_plugin:damaged"})
    for number in range(20):
        (tmp_path / f"{number}.{'bad' if number % 5 == 4 else 'dbl'}").write_bytes(bytes([number]))
    source = cs.open_source([str(tmp_path / "*.dbl"), str(tmp_path / "*.bad")])
    try:
        fill(cache, source, num_workers=2, **OPTIONS)
        assert (samples_of(cache), failures(cache)) == locally(source)
        assert len(samples_of(cache)) == 16
        shutil.rmtree(site)  # it stays known in this process
        with closing(Cache(tmp_path / "other", size_limit="50MB", min_free=0)) as other:
            fill(other, source, num_workers=2, **OPTIONS)
            missed = failures(other)
    finally:
        forget_plugins()
    assert [count for *_, count in missed] == [4, 16]
    assert all("is of a package that this node lacks: install it on all nodes" in one[1] for one in missed)


@pytest.mark.slow
def test_a_unit_that_ends_its_process_is_left_out_and_the_rest_arrives(cache: Cache) -> None:
    source = Named(40, 2)
    fill(cache, source, num_workers=2, transform=with_killer, **OPTIONS)
    assert only_once(cache) == source.keys() - {"13/0", "13/1"}
    assert failures_of(cache) == {"quarantined": 1}


@pytest.mark.slow
def test_the_sampling_process_is_killed(cache: Cache, cluster: Any, tmp_path: Path) -> None:
    source = Named(80, 3)
    slow = functools.partial(slow_in_one_process, mark=str(tmp_path / "slow"), pause_s=0.05, factor=1)
    with cs.start_worker(cache, source, num_workers=2, transform=slow, **OPTIONS) as worker:
        cache.wait(1, timeout_s=DEADLINE_S)
        (pid,) = sampling_pids(cache)
        os.kill(pid, signal.SIGKILL)
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()
    wait_until(lambda: not actor_pids(cluster), "no actor is left")


@pytest.mark.slow
def test_a_slow_actor_does_not_hold_up_the_others(cache: Cache, tmp_path: Path) -> None:
    """One of four processes takes 20 times as long for each sample, and others do its work at the end."""
    slow = functools.partial(slow_in_one_process, mark=str(tmp_path / "slow"), pause_s=0.05, factor=20)
    source = Named(240, 1)
    with cs.start_worker(cache, source, num_workers=4, transform=slow, **OPTIONS) as worker:
        cache.wait(1, timeout_s=DEADLINE_S)
        begun_s = time.monotonic()
        assert worker.wait(DEADLINE_S)
        took_s = time.monotonic() - begun_s
    assert only_once(cache) == source.keys()
    assert took_s < 240 * 0.05 / 3 + 8.0  # 60 s if the slow one did a quarter


@pytest.mark.slow
def test_a_hanging_unit_is_left_out(cache: Cache) -> None:
    source = Named(20, 1)
    fill(cache, source, num_workers=2, transform=with_hanging, hang_timeout_s=2.0, **OPTIONS)
    assert only_once(cache) == source.keys() - {"7/0"}
    assert failures_of(cache) == {"quarantined": 1}


@pytest.mark.slow
def test_a_unit_whose_remote_does_not_answer_is_put_aside(cache: Cache, tmp_path: Path) -> None:
    (switch := tmp_path / "switch").write_text("3 4")
    source = Mute(20, 2, switch=str(switch))
    with cs.start_worker(cache, source, num_workers=2, hang_timeout_s=6.0, **OPTIONS) as worker:
        cache.wait(36, timeout_s=DEADLINE_S)
        board = Board(cache.directory.worker_file("board"))
        wait_until(lambda: "503" in board.silence(), "the board tells of the stall")
        switch.write_text("")
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()


@pytest.mark.e2e
def test_actors_read_all_groups_by_the_same_threads_and_a_stop_leaves_none(
    cache: Cache, cluster: Any
) -> None:
    source = Named(10_000, 1, pause_s=0.01)
    options: dict[str, Any] = {"num_workers": 2, "concurrency": 2, "transform": with_reading_threads}
    with cs.start_worker(cache, source, **options, **OPTIONS) as worker:
        wait_until(lambda: len(actor_pids(cluster)) == 2, "all actors run")
        cache.wait(600, timeout_s=DEADLINE_S)
        worker.stop(DEADLINE_S)
    wait_until(lambda: not actor_pids(cluster), "no actor is left")
    assert len(only_once(cache)) < 10_000
    threads = [int.from_bytes(value, "little") for _, (value,) in samples_of(cache).values()]
    assert 1 <= max(threads) <= 4  # besides the two, those of units that were silent for a second


@pytest.mark.e2e
def test_a_payload_that_actors_cannot_load_ends_the_worker(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "import os\nassert os.environ['ONLY_HERE']\ndef transform(sample): return sample\n"
    )
    monkeypatch.setenv("ONLY_HERE", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    transform = importlib.import_module("only_here").transform
    with pytest.raises(WorkerError, match=r"actor.*KeyError.*ONLY_HERE"):
        fill(cache, Named(5), transform=transform, **OPTIONS)


@pytest.mark.slow
def test_a_cluster_whose_head_is_replaced_is_used_again(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Named(300, 1)
    options: dict[str, Any] = {
        "initialize_head": True,
        "head_node_args": dict(NODE),
    }
    slow = functools.partial(slow_in_one_process, mark=str(tmp_path / "slow"), pause_s=0.05, factor=1)
    first = cluster_utils.Cluster(**options)
    address = first.address
    monkeypatch.setenv("RAY_ADDRESS", address)
    with cs.start_worker(cache, source, num_workers=2, transform=slow, **OPTIONS) as worker:
        cache.wait(1, timeout_s=DEADLINE_S)
        first.shutdown()
        board = Board(cache.directory.worker_file("board"))
        wait_until(lambda: "no Ray cluster answers" in board.silence(), "the board tells of it")
        options["head_node_args"]["gcs_server_port"] = int(address.rpartition(":")[2])
        second = cluster_utils.Cluster(**options)
        try:
            assert worker.wait(DEADLINE_S)
        finally:
            second.shutdown()
    assert only_once(cache) == source.keys()
    assert not cache.status().failures


@pytest.mark.e2e
def test_without_a_cluster_the_error_says_so(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(WorkerError, match="no Ray cluster answers"):
        fill(cache, Named(5), **OPTIONS)


@pytest.mark.e2e
def test_without_ray_the_engine_is_refused(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"cachestream\[ray\]"):
        cs.start_worker(cache, Named(5), **OPTIONS)
