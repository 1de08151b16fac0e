"""Caches that share one filling while nodes, the head of the cluster or the driver go; each test has its cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachestream import EpochLoader
from tests.ray.nodes import Members, RayCluster, reads
from tests.worker.sources import Numbers
from tests.worker.support import Processes, log_of, wait_until

UNITS = 200
pytestmark = pytest.mark.slow


@pytest.fixture
def make_members(
    fast_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(nodes: int, **options: int) -> Members:
        made.append(Members(RayCluster(nodes, **options), fast_path, monkeypatch))
        return made[-1]

    yield make
    for members in made:
        members.close()
        members.ray.close()
    processes.wait_until_gone()


@pytest.fixture
def source(tmp_path: Path) -> Numbers:
    return Numbers(units=UNITS, nbytes=2000, pause_s=0.05, journal=str(tmp_path / "journal"))


def test_a_node_that_is_killed_loses_nothing(make_members: Callable[..., Members], source: Numbers) -> None:
    members = make_members(3)
    for _ in range(3):
        members.start(source)
    wait_until(lambda: members.caches[2].num_samples > 20, "the caches hold something")
    members.ray.kill(2)
    members.wait(source.keys(), 180.0)  # the cache of that node goes on alone


def test_the_head_is_killed_and_comes_back(make_members: Callable[..., Members], source: Numbers) -> None:
    members = make_members(1)
    members.is_placed = False
    for _ in range(2):
        members.start(source, node=0)
    first, second = members.caches
    wait_until(lambda: second.num_samples > 20, "the caches hold something")
    members.ray.kill(0)
    with EpochLoader(first, batch_size=4) as loader:
        assert sum(len(batch["x"]) for batch in loader)
    wait_until(lambda: "filling alone" in first.status().fill_message, "the first cache goes on alone")
    members.ray.restart_head()
    members.wait(source.keys(), 180.0)
    assert reads(source) <= 2 * UNITS  # each has made a part alone
    wait_until(
        lambda: all(log_of(cache).count("'group' answers") > 1 for cache in (first, second)),
        "they share again",
    )
    members.start(source, node=0)
    before = reads(source)
    members.wait(source.keys(), 180.0)
    assert reads(source) == before, [*map(log_of, members.caches)]


def test_shards_larger_than_the_object_store_together(make_members: Callable[..., Members]) -> None:
    members = make_members(2, store_bytes=80 << 20)
    source = Numbers(units=60, nbytes=3_000_000)
    for _ in range(3):
        members.start(source, size="400MB", shard_size="32MB")
    members.wait(source.keys(), 180.0)
