"""The actor of a group, without Ray around it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

from cachestream.worker.cluster.directory import SILENT_S, CacheReport
from cachestream.worker.cluster.group import GroupActor, identity_of
from cachestream.worker.order import Partition
from tests.worker.cluster.group_model import plan_of


@dataclass(frozen=True)
class JobOfGroup:
    """The part of a job that caches of a group have in common."""

    fingerprint: str = "files"
    num_units: int = 10
    listing: str = "digest"
    kind: str = "shuffle"
    seed: int = 0
    partition: Partition | None = None
    transform: str = "t1"


JOB = JobOfGroup()


@pytest.mark.parametrize(
    ("job", "difference"),
    [
        (
            replace(JOB, fingerprint="other"),
            "it is filled from the source other, and the group has files",
        ),
        (replace(JOB, num_units=11), "it lists the units 11 digest, and the group has 10 digest"),
        (replace(JOB, transform=""), "it has the transform none, and the group has t1"),
        (replace(JOB, kind="sequential"), "it has the order sequential, and the group has shuffle"),
        (replace(JOB, seed=7), "it has the seed 7, and the group has 0"),
        (
            replace(JOB, partition=Partition(0, 3)),
            "it divides the units among nodes: 3, and the group has none",
        ),
    ],
)
def test_a_cache_is_told_its_difference(job: JobOfGroup, difference: str) -> None:
    identity = identity_of(JOB)  # type: ignore[arg-type]
    group = GroupActor(identity)
    assert group.join("a", identity, "server of a") == ""
    assert group.join("b", identity_of(job), "server of b") == difference  # type: ignore[arg-type]


def test_what_caches_that_are_gone_had_in_common_binds_no_one() -> None:
    ours, theirs = (identity_of(replace(JOB, seed=seed)) for seed in (0, 1))  # type: ignore[arg-type]
    group = GroupActor(ours)
    assert group.join("a", ours, None) == ""
    assert group.join("b", theirs, None)
    group.leave("a")
    assert group.join("b", theirs, None) == ""


def test_a_cache_that_has_joined_but_not_reported_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    identity = identity_of(JOB)  # type: ignore[arg-type]
    group = GroupActor(identity)
    first = CacheReport(plan_of(4), 4, ((0, 4),), joins=True)
    for name in ("a", "b"):
        group.join(name, identity, f"server of {name}")
    assert group.sync("b", first)[0].is_known
    assert group.sync("a", first)[0].is_known
    now_s += SILENT_S + 1
    assert not group.sync("a", replace(first, joins=False))[0].is_known
    assert not group.sync("c", first)[0].is_known
