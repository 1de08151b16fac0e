"""A Ray cluster of several nodes on this machine, and caches on its nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from cachestream import Cache, Worker, start_worker
from tests.worker.sources import Numbers
from tests.worker.support import ROOT, log_of, only_once, wait_until

STORE_BYTES = 100 << 20
# Without what only looks at the cluster: the dashboard, the autoscaler, and what forwards the logs of workers.
NODE: Final[Mapping[str, Any]] = {
    "num_cpus": 1,
    "object_store_memory": STORE_BYTES,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,
}
ON_NODE = Path(__file__).parent / "on_node"
DONE_S = 90.0


def python_path() -> str:
    return os.pathsep.join([str(ON_NODE), str(ROOT)])


class RayCluster:
    """Nodes on this machine, each with an object store of its own."""

    def __init__(self, nodes: int, store_bytes: int = STORE_BYTES) -> None:
        self._options = {**NODE, "object_store_memory": store_bytes}
        cluster_utils = pytest.importorskip("ray.cluster_utils")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", python_path())
            patch.setenv("RAY_DISABLE_DOCKER_CPU_WARNING", "1")
            self.cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=self._options)
            self.address = str(self.cluster.address)
            self.nodes = [self.cluster.head_node]
            for _ in range(nodes - 1):
                self.add_node()

    def add_node(self) -> None:
        self.nodes.append(self.cluster.add_node(**self._options))

    def kill(self, index: int) -> None:
        """Kill the node, all of its processes at once."""
        self.cluster.remove_node(self.nodes[index], allow_graceful=False)

    def restart_head(self) -> None:
        """Start a head, killed before, at its old address; it knows of nothing."""
        port = int(self.address.rpartition(":")[2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", python_path())
            self.nodes[0] = self.cluster.add_node(gcs_server_port=port, **self._options)

    def close(self) -> None:
        self.cluster.shutdown()

    def actors(self, name: str) -> list[int]:
        """The processes of actors of the class `name`."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if f"ray::{name}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


class Members:
    """Caches that share one filling, each on a node of the cluster."""

    def __init__(self, cluster: RayCluster, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.ray, self.folder, self._patch = cluster, folder, patch
        self.caches: list[Cache] = []
        self.workers: list[Worker] = []
        self._stack = ExitStack()
        self.is_placed = True  # each cache is on a node of its own; else all of them are on the head
        patch.setenv("PYTHONPATH", python_path())
        patch.setenv("RAY_ADDRESS", cluster.address)

    def start(self, source: Any, *, size: str = "50MB", node: int | None = None, **options: Any) -> Cache:
        index = len(self.caches)
        node = index % len(self.ray.nodes) if node is None else node
        cache = Cache(self.folder / f"cache-{index}", size_limit=size, min_free=0)
        self._stack.callback(cache.close)
        self.caches.append(cache)
        self.restart(index, source, node=node, **options)
        return cache

    def restart(self, index: int, source: Any, *, node: int | None = None, **options: Any) -> None:
        node = index if node is None else node
        self._patch.setenv("RAY_TEST_NODE", self.ray.nodes[node].node_id if self.is_placed else "")
        settings: dict[str, Any] = {"num_workers": 1, "share": "group", "shard_size": "20KB"}
        worker = start_worker(self.caches[index], source, **(settings | options))
        self.workers.append(worker)

    def wait(self, keys: set[str] | None = None, timeout_s: float = DONE_S) -> None:
        """Wait until all caches are complete; each has all `keys` once."""
        for cache in self.caches:
            wait_for_end(cache, timeout_s)
            assert cache.fill_state() == "complete", log_of(cache)
        if keys is not None:
            for cache in self.caches:
                assert only_once(cache) == keys, log_of(cache)

    def close(self) -> None:
        for worker in self.workers:
            with suppress(Exception):
                worker.stop()
            worker.close()
        self._stack.close()


def wait_for_end(cache: Cache, timeout_s: float = DONE_S) -> None:
    """Wait until the filling of `cache` is complete, or has failed."""
    states = ("complete", "failed")
    wait_until(lambda: cache.fill_state() in states, f"{cache.path} is complete", timeout_s)


def reads(source: Numbers) -> int:
    """The number of units that all caches together have read."""
    try:
        return Path(source.journal).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def open_files(pid: int) -> str:
    """The open files of a process."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            pass
    return "\n".join(names)
