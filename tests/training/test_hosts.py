"""Jobs on several hosts, under torchrun: network namespaces, links that are cut, nodes that leave and come
back.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from cachestream import Cache
from tests.support.hosts import Host, Hosts, needs_hosts, run_hosts
from tests.support.s3 import run_s3_server
from tests.training.scripts.node import Settings

ROOT: Final = Path(__file__).parents[2]
SAMPLES: Final = 120
PATIENCE_S: Final = 180.0
TIMEOUT_S: Final = 16.0  # the loader's: a cut is noticed after half of it
ENOUGH: Final = 12  # steps

pytestmark = [pytest.mark.timeout(600)]


@dataclass
class Log:
    """The output of one process of a rank, which torchrun may start again."""

    events: list[dict[str, Any]]

    @property
    def begin(self) -> dict[str, Any]:
        return self.events[0]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]

    def numbers(self, epoch: int) -> list[list[int]]:
        return [step["numbers"] for step in self.of("step") if step["epoch"] == epoch]


class Cluster:
    """A job over hosts: a torchrun on each, and the output of their ranks."""

    def __init__(self, hosts: Hosts, folder: Path, settings: Settings, nodes: str, ranks: int) -> None:
        self.hosts = hosts
        self._folder = folder
        self._settings = settings
        self._nodes = nodes
        self._ranks = ranks
        self._agents: dict[str, subprocess.Popen[Any]] = {}
        for host in hosts.all:
            self.start(host)

    def start(self, host: Host) -> None:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", self._nodes, "--max-restarts", "9"),
            *("--nproc-per-node", str(self._ranks), "--rdzv-backend", "c10d", "--rdzv-id", "a-test"),
            *("--rdzv-endpoint", f"{self.hosts[0].address}:29400", "--local-addr", host.address),
            *("--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"),
            *("--module", "tests.training.scripts.node", self._settings.to_json()),
        ]
        # Without the last option gloo sometimes connects to ranks from before a restart: torch keeps its
        # store.
        own = {
            "GLOO_SOCKET_IFNAME": host.link,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with (self._folder / f"{host.name}.log").open("ab") as sink:
            self._agents[host.name] = host.popen(
                command, cwd=ROOT, env={**os.environ, **own}, stdout=sink, stderr=subprocess.STDOUT
            )

    def logs(self) -> list[Log]:
        """The processes of ranks that have made their loader."""
        texts = [path.read_text() for path in sorted(Path(self._settings.out).glob("*.jsonl"))]
        # A process that was killed while writing leaves an incomplete line.
        found = [
            [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")] for text in texts
        ]
        return [Log(events) for events in found if events]

    def lives(self, world: int, after: Sequence[Log] = ()) -> list[Log]:
        """The processes of the latest run of `world` ranks in which all of them train, if it is later than
        `after`.
        """
        since_s = max((log.begin["s"] for log in after), default=0.0)
        lives = [log for log in self.logs() if log.begin["world"] == world and log.begin["s"] > since_s]
        latest = sorted(lives, key=lambda log: float(log.begin["s"]))[-world:]
        at_work = {log.begin["rank"] for log in latest if len(log.of("step")) >= ENOUGH}
        return sorted(latest, key=lambda log: int(log.begin["rank"])) if at_work == set(range(world)) else []

    def all_of(self, lives: Sequence[Log]) -> list[Log]:
        """Return `lives` with their output so far."""
        names = {(log.begin["host"], log.begin["pid"]) for log in lives}
        return [log for log in self.logs() if (log.begin["host"], log.begin["pid"]) in names]

    def wait(self, what: str, condition: Callable[[], Any]) -> Any:
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s\n{self._said()}"
            pause.wait(0.05)
        return found

    def leave(self, host: Host) -> None:
        """End the torchrun of a node, and its ranks with it."""
        os.killpg(self._agents[host.name].pid, signal.SIGTERM)
        self._agents[host.name].wait(PATIENCE_S)

    def finish(self) -> None:
        """End the job normally."""
        Path(self._settings.out, "stop").touch()
        for agent in self._agents.values():
            assert agent.wait(PATIENCE_S) == 0, self._said()

    def _said(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-3000:]}" for path in self._folder.glob("*.log")
        )

    def end(self) -> None:
        for agent in self._agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait(PATIENCE_S)


@contextmanager
def run_job(folder: Path, hosts: int, nodes: str, ranks: int, **options: Any) -> Iterator[Cluster]:
    """A job over `hosts` hosts, on a real S3 server that all of them reach."""
    needs_hosts()
    (folder / "out").mkdir()
    with run_hosts(hosts) as found, run_s3_server(folder / "s3", address=found.address) as server:
        bucket = server.bucket("numbers")
        for number in range(SAMPLES):
            (bucket / f"{number:03d}.json").write_text(json.dumps({"number": number}))
        settings = Settings(
            "s3://numbers/",
            str(folder / "cache"),
            str(folder / "out"),
            first=True,
            timeout_s=TIMEOUT_S,
            storage_options=server.storage_options,
            **options,
        )
        cluster = Cluster(found, folder, settings, nodes, ranks)
        try:
            yield cluster
        finally:
            cluster.end()


def numbers_in(path: Path) -> list[int]:
    """The numbers in a cache, after a check of all shards."""
    with Cache(path) as cache:
        assert cache.verify().ok
        with cache.snapshot() as dataset:
            return sorted(int(dataset[i]["number"]) for i in range(len(dataset)))


def whole_epochs(lives: list[Log]) -> dict[int, list[list[list[int]]]]:
    """For each epoch that all ranks have finished: the steps of each rank."""
    done = Counter(epoch["epoch"] for log in lives for epoch in log.of("epoch"))
    return {epoch: [log.numbers(epoch) for log in lives] for epoch in done if done[epoch] == len(lives)}


def check_epochs(lives: list[Log], disjoint: bool = True) -> None:
    """Equal steps on all ranks, and no number twice in an epoch. The first epoch may have begun before a
    checkpoint.
    """
    epochs = whole_epochs(lives)
    assert epochs
    for ranks in epochs.values():
        assert len({len(steps) for steps in ranks}) == 1
        drawn = Counter(number for steps in ranks for numbers in steps for number in numbers)
        assert not disjoint or max(drawn.values()) == 1


@pytest.mark.e2e
def test_the_caches_of_two_nodes_hold_disjoint_shares_and_their_ranks_train_equal_epochs(
    tmp_path: Path,
) -> None:
    with run_job(tmp_path, hosts=2, nodes="2", ranks=1, epoch_size=48) as job:
        check_epochs(job.wait("both ranks train", lambda: job.lives(2)))
        job.finish()
    shares = [numbers_in(tmp_path / "cache" / host.name) for host in job.hosts.all]
    assert [len(share) for share in shares] == [SAMPLES // 2] * 2
    assert sorted(shares[0] + shares[1]) == list(range(SAMPLES))


@pytest.mark.slow
def test_nodes_go_on_after_one_was_cut_off(tmp_path: Path) -> None:
    with run_job(tmp_path, hosts=2, nodes="2", ranks=2, epoch_size=48) as job:
        lives = job.wait("all ranks train", lambda: job.lives(4))
        check_epochs(lives)
        here, there = job.hosts.all
        shares = [numbers_in(tmp_path / "cache" / host.name) for host in (here, there)]
        assert [len(share) for share in shares] == [SAMPLES // 2] * 2
        assert sorted(shares[0] + shares[1]) == list(range(SAMPLES))
        there.cut()
        told = job.wait(
            "the ranks here are told",
            lambda: [e for log in job.logs() if log.begin["host"] == here.name for e in log.of("error")],
        )
        there.restore()
        assert {error["kind"] for error in told} == {"RankMismatchError"}, told
        assert any(re.search(rf"rank [23] \(pid \d+ on {there.name}\)", error["message"]) for error in told)
        again = job.wait("all ranks train again", lambda: job.lives(4, lives))
        check_epochs(again)
        for log in again:
            assert log.begin["cached"] == SAMPLES // 2
            assert log.begin["epoch"] > 0
        job.finish()
    assert [numbers_in(tmp_path / "cache" / host.name) for host in (here, there)] == shares


@pytest.mark.slow
def test_a_directory_that_two_hosts_share_is_one_cache_and_survives_a_killed_rank(tmp_path: Path) -> None:
    with run_job(tmp_path, hosts=2, nodes="2", ranks=1, epoch_size=48, shared=True) as job:
        lives = job.wait("both ranks train", lambda: job.lives(2))
        check_epochs(lives)
        assert numbers_in(tmp_path / "cache") == list(range(SAMPLES))
        assert len({log.begin["host"] for log in lives}) == 2
        assert sorted(log.begin["attached"] for log in lives) == [False, True]
        with Cache(tmp_path / "cache") as cache:
            worker = cache.status().worker
            assert worker is not None
            os.kill(lives[1].begin["pid"], signal.SIGKILL)
            again = job.wait("both ranks train again", lambda: job.lives(2, lives))
            check_epochs(again)
            for log in again:
                assert log.begin["attached"]
                assert log.begin["worker"] == worker.pid
                assert log.begin["cached"] == SAMPLES
            job.finish()
            job.wait("the worker goes with the job", lambda: not cache.has_worker())
    assert numbers_in(tmp_path / "cache") == list(range(SAMPLES))


@pytest.mark.slow
def test_a_node_leaves_the_other_goes_on_alone_and_it_comes_back(tmp_path: Path) -> None:
    with run_job(tmp_path, hosts=2, nodes="1:2", ranks=1, epoch_size=24) as job:
        lives = job.wait("both nodes train", lambda: job.lives(2))
        job.leave(job.hosts[1])
        alone = job.wait("one goes on", lambda: job.lives(1))
        last = max(step["epoch"] for log in job.all_of(lives) for step in log.of("step"))
        assert 0 < alone[0].begin["epoch"] <= 1 + last
        job.wait(
            "it reads all shares", lambda: len(numbers_in(tmp_path / "cache" / job.hosts[0].name)) == SAMPLES
        )
        job.start(job.hosts[1])
        again = job.wait("both train again", lambda: job.lives(2, lives))
        check_epochs(again, disjoint=False)  # the node that was alone holds the other one's share, too
        assert min(log.begin["epoch"] for log in again) > alone[0].begin["epoch"]
        job.finish()
    assert len(numbers_in(tmp_path / "cache" / job.hosts[1].name)) == SAMPLES // 2


@pytest.mark.slow
def test_three_nodes_miss_the_one_that_is_cut_off_and_take_it_back(tmp_path: Path) -> None:
    with run_job(tmp_path, hosts=3, nodes="3", ranks=1, epoch_size=36) as job:
        lives = job.wait("all ranks train", lambda: job.lives(3))
        cut = job.hosts[2]
        cut.cut()
        errors: dict[str, list[str]] = defaultdict(list)

        def all_told() -> bool:
            errors.clear()
            for log in job.logs():
                errors[log.begin["host"]] += [error["message"] for error in log.of("error")]
            return all(errors[host.name] for host in job.hosts.all[:2])

        job.wait("both others are told", all_told)
        cut.restore()
        for host in job.hosts.all[:2]:
            assert any(f"on {cut.name}" in message for message in errors[host.name])
        check_epochs(job.wait("all ranks train again", lambda: job.lives(3, lives)))
        job.finish()
    found = [numbers_in(tmp_path / "cache" / host.name) for host in job.hosts.all]
    assert sorted(number for share in found for number in share) == list(range(SAMPLES))


@pytest.mark.e2e
def test_hosts_are_removed_with_all_that_runs_on_them() -> None:
    needs_hosts()
    with run_hosts(1) as hosts:
        process = hosts[0].popen(["sleep", "1000"])
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while not hosts[0].pids():
            assert time.monotonic() < deadline
            pause.wait(0.01)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert hosts[0].name not in listed
