"""Remote sampling on a Ray cluster of this machine: the samples of local workers, whatever dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import cachestream as cs
from cachestream import Cache
from tests.worker.cluster.support import Sample, Tables, samples_of, with_faults, with_noise
from tests.worker.sources import Named, Numbers, Ragged
from tests.worker.support import DEADLINE_S, failures_of

cluster_utils = pytest.importorskip("ray.cluster_utils")

STORE_BYTES = 100 * 2**20
OPTIONS: dict[str, Any] = {"engine": "ray", "ray_options": {"num_cpus": 0.1}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE_BYTES}
    )
    cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    yield cluster
    cluster.shutdown()


@pytest.fixture(autouse=True)
def in_cluster(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)


def fill(cache: Cache, source: Any, **options: Any) -> None:
    with cs.start_worker(cache, source, **options) as worker:
        assert worker.wait(DEADLINE_S)


Fill = Callable[..., dict[str, Sample]]


@pytest.fixture
def locally(tmp_path: Path) -> Fill:
    """The samples and failures that a local worker caches."""

    def fill_locally(source: Any, **options: Any) -> tuple[dict[str, Sample], dict[str, int]]:
        with closing(Cache(tmp_path / "local", size_limit="50MB", min_free=0)) as cache:
            fill(cache, source, num_workers=1, **options)
            return samples_of(cache), failures_of(cache)

    return fill_locally


@pytest.mark.parametrize(
    ("source", "transform"),
    [
        (Named(40, 5), None),
        (Named(40, 5), with_noise),
        (Named(200, 2), with_faults),
        (Tables(5, 100), None),
        (Ragged(30, 3), None),
        (Numbers(3, 4, 3_000_000), None),
    ],
    ids=["numbers", "noise", "faults", "tables", "ragged", "large"],
)
def test_the_samples_are_those_of_a_local_worker(
    cache: Cache, locally: Fill, source: Any, transform: Any
) -> None:
    fill(cache, source, num_workers=2, transform=transform, seed=7, **OPTIONS)
    expected = locally(source, transform=transform, seed=7)
    assert (samples_of(cache), failures_of(cache)) == expected
    assert expected[0]
