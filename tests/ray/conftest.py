"""One Ray cluster for the tests of a file, and caches on its nodes for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.nodes import Members, RayCluster
from tests.worker.conftest import cache, processes  # noqa: F401  fixtures of all tests that start workers
from tests.worker.support import Processes


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    """Two nodes, which no test takes away."""
    cluster = RayCluster(2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def third_node(ray_cluster: RayCluster) -> None:
    """A third node of the cluster."""
    ray_cluster.add_node()


@pytest.fixture
def members(
    ray_cluster: RayCluster,
    fast_path: Path,
    processes: Processes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Members]:
    found = Members(ray_cluster, fast_path, monkeypatch)
    yield found
    found.close()
    processes.wait_until_gone()
