"""Caches that share one filling on hosts of their own, while the network of one of the hosts is cut."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cachestream import Cache
from tests.ray.nodes import STORE_BYTES, python_path, reads
from tests.ray.trainer import LIMIT_BYTES
from tests.storage.support import disk_bytes
from tests.support.hosts import Host, needs_hosts, run_hosts
from tests.worker.sources import Numbers
from tests.worker.support import log_of, only_once, wait_until

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

HOSTS, UNITS, PAUSE_S = 3, 900, 0.15
START_S, JOIN_S, DONE_S, EPOCH_S = 120.0, 30.0, 240.0, 15.0
PORT = 6379
# The head gives up a node that is silent for 10 s; else that takes a minute.
IMPATIENT = {
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class Site:
    """Hosts, each with a Ray node, a cache and a training; the head of the cluster is on the first one."""

    def __init__(self, hosts: tuple[Host, ...], folder: Path, stack: ExitStack, **environment: str) -> None:
        self.hosts, self._folder, self._stack, self._environment = hosts, folder, stack, environment
        self.source = Numbers(units=UNITS, nbytes=2000, pause_s=PAUSE_S, journal=str(folder / "journal"))
        self.caches: list[Cache] = []
        for index in range(len(hosts)):
            self.start_node(index)
        for index in range(len(hosts)):
            self._train(index)
        self.wait_until(
            lambda: all(cache.num_samples > 20 for cache in self.caches), "the caches hold something"
        )
        self.wait_until(
            lambda: min(cache.num_samples for cache in self.caches) > reads(self.source) // 2, "they share"
        )

    def _run(self, index: int, log: str, *command: str) -> None:
        file = self._stack.enter_context((self._folder / log).open("ab"))
        address = f"{self.hosts[0].address}:{PORT}"
        environment = {"PYTHONPATH": python_path(), "RAY_TEST_NODE": "here", "RAY_ADDRESS": address}
        environment |= {"RAY_AUTH_MODE": "disabled", **self._environment}
        process = self.hosts[index].popen(
            [sys.executable, "-m", *command], stdout=file, stderr=file, env={**os.environ, **environment}
        )
        self._stack.callback(process.wait, START_S)
        self._stack.callback(process.kill)

    def start_node(self, index: int) -> None:
        """Start the Ray node of a host, as what watches over a cluster does when a node has ended."""
        head = self.hosts[0].address
        where = ["--address", f"{head}:{PORT}"] if index else ["--head", "--port", str(PORT)]
        if not index:
            where += ["--include-dashboard", "false", "--temp-dir", str(self._folder / "ray")]
        size = ["--num-cpus", "1", "--object-store-memory", str(STORE_BYTES), "--disable-usage-stats"]
        name = f"node-{index}.txt"
        before = self._log(name).count("Ray runtime started")
        ip = self.hosts[index].address
        self._run(
            index, name, "ray.scripts.scripts", "start", "--block", "--node-ip-address", ip, *where, *size
        )
        wait_until(
            lambda: self._log(name).count("Ray runtime started") > before, f"node {index} runs", START_S
        )

    def has_node(self, index: int) -> bool:
        """True if the Ray node of the host runs."""
        for pid in self.hosts[index].pids():
            try:
                if b"/raylet\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return True
            except OSError:
                pass
        return False

    def _train(self, index: int) -> None:
        path = self._folder / f"cache-{index}"
        arguments = [str(path), self.source.journal, str(UNITS), str(PAUSE_S)]
        self._run(index, f"trainer-{index}.txt", "tests.ray.trainer", *arguments)
        wait_until(lambda: "begun" in self._log(f"trainer-{index}.txt"), f"cache {index} is there", START_S)
        self.caches.append(self._stack.enter_context(Cache(path)))

    def _log(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = DONE_S) -> None:
        """Wait until `condition()` is true; checks that the limit of each cache holds meanwhile."""

        def look() -> object:
            time.sleep(0.1)
            assert max(disk_bytes(cache.path) for cache in self.caches) <= LIMIT_BYTES
            return condition()

        wait_until(look, what, timeout_s)

    def cut(self, index: int, cut_s: float) -> int:
        """Cut the network of a host for `cut_s`; returns how many samples its cache gained alone."""
        before, until_s = self.caches[index].num_samples, time.monotonic() + cut_s
        self.hosts[index].cut()
        self.wait_until(lambda: time.monotonic() > until_s, "the cut is over")
        self.hosts[index].restore()
        return self.caches[index].num_samples - before

    def wait_for_end(self) -> None:
        """Wait until each cache has all samples once; checks that the trainings went on all the time."""
        self.wait_until(
            lambda: all(cache.fill_state() == "complete" for cache in self.caches), "all are complete"
        )
        for index, cache in enumerate(self.caches):
            assert only_once(cache) == self.source.keys(), log_of(cache)
            lines = self._log(f"trainer-{index}.txt").splitlines()
            times_s = [*(float(line.split()[0]) for line in lines if line[:1].isdigit()), time.monotonic()]
            assert max(after - before for before, after in itertools.pairwise(times_s)) < EPOCH_S


@pytest.fixture
def make_site(fast_path: Path) -> Iterator[Callable[..., Site]]:
    needs_hosts()
    with ExitStack() as stack:
        hosts = stack.enter_context(run_hosts(HOSTS))
        yield lambda **environment: Site(hosts.all, fast_path, stack, **environment)


def answers(cache: Cache) -> int:
    """The number of times that the cache has found its group."""
    return log_of(cache).count("'group' answers")


def test_a_cache_that_is_cut_off_goes_on_alone_and_joins_again(make_site: Callable[..., Site]) -> None:
    site = make_site()
    alone = site.cut(2, 35.0)
    assert alone > 50
    site.wait_for_end()
    assert answers(site.caches[2]) >= 2
    assert reads(site.source) <= 1.25 * UNITS + alone  # the others have shared all the time


def test_a_node_that_the_cluster_gives_up_joins_again_as_another_one(make_site: Callable[..., Site]) -> None:
    site = make_site(**IMPATIENT)
    alone = site.cut(2, 35.0)
    site.wait_until(lambda: not site.has_node(2), "the node is told that it is given up")
    site.start_node(2)
    site.wait_for_end()
    assert answers(site.caches[2]) >= 2
    assert reads(site.source) <= 1.25 * UNITS + alone


def test_a_head_that_is_cut_off_leaves_each_cache_alone_for_a_while(make_site: Callable[..., Site]) -> None:
    site = make_site()
    before = [cache.num_samples for cache in site.caches]
    site.cut(0, 35.0)
    assert min(cache.num_samples - held for cache, held in zip(site.caches, before, strict=True)) > 50
    site.wait_until(lambda: min(map(answers, site.caches[1:])) >= 2, "all have joined again", JOIN_S)
    alone = sum(cache.num_samples for cache in site.caches) - sum(before)
    site.wait_for_end()
    assert reads(site.source) <= 1.25 * UNITS + alone
