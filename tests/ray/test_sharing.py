"""Caches that share one filling, on the nodes of a real Ray cluster."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cachestream import Cache, ConfigError, WorkerError, start_worker
from cachestream.storage.shard import shard_path
from tests.ray.nodes import DONE_S, Members, open_files, reads, wait_for_end
from tests.storage.support import disk_bytes, shard_ids
from tests.worker.sources import Numbers
from tests.worker.support import (
    Processes,
    in_use,
    log_of,
    only_once,
    sampling_pids,
    supervisor_pid,
    wait_until,
)

UNITS = 200


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def numbers(folder: Path, **options: Any) -> Numbers:
    settings: dict[str, Any] = {"units": UNITS, "nbytes": 2000, "journal": str(folder / "journal")}
    return Numbers(**(settings | options))


def passes_of(cache: Cache) -> int:
    """The number of passes that `cache` has begun."""
    row = cache.filling.state().last_pass
    return 0 if row is None else row.id


def assert_read_once(members: Members, source: Numbers) -> None:
    """Check that all caches together have read the source once."""
    read = Path(source.journal).read_text(encoding="utf-8").split()
    again = {unit: count for unit, count in Counter(read).items() if count > 1}
    assert len(read) <= 1.02 * len(source.keys()), (again, *map(log_of, members.caches))


def sharing_pid(cache: Cache, processes: Processes) -> int:
    """The process of `cache` that shares its filling."""

    def found() -> list[int]:
        return [
            pid
            for pid in processes.called("cs-sharing")
            if os.readlink(f"/proc/{pid}/cwd") and cache.path in open_files(pid)
        ]

    wait_until(found, "there is a process that shares")
    return found()[0]


@pytest.mark.e2e
def test_all_caches_hold_all_samples_read_once_and_one_with_another_transform_is_refused(
    members: Members, tmp_path: Path
) -> None:
    source = numbers(tmp_path, pause_s=0.05)
    for _ in range(2):
        members.start(source)
    wait_until(lambda: members.caches[0].num_samples, "the first cache is in the group")
    with Cache(members.folder / "other", size_limit="50MB", min_free=0) as other:
        worker = start_worker(other, source, num_workers=1, share="group", transform=dict)
        with pytest.raises(
            WorkerError, match=r"does not fit the group 'group': it has the transform .*; give the"
        ):
            worker.wait(timeout_s=60.0)
        worker.close()
    members.wait(source.keys())
    assert_read_once(members, source)
    before = reads(source)
    late = members.start(source)  # it comes late, and reads nothing
    members.wait(source.keys())
    assert reads(source) == before, log_of(late)
    wait_until(lambda: len(members.ray.actors("ShardServer")) == 3, "all shard servers run")
    members.close()
    wait_until(lambda: not members.ray.actors("ShardServer"), "the actors of the caches have ended")
    wait_until(lambda: not members.ray.actors("GroupActor"), "the actor of the group has ended")


@pytest.mark.e2e
def test_the_limit_holds_while_shards_come(members: Members, tmp_path: Path) -> None:
    source = numbers(tmp_path, nbytes=20_000)  # 4 MB, of which the cache of 2 MB has room for some
    members.start(source, shard_size="200KB")
    small = members.start(source, size="3MB", shard_size="200KB")
    largest = 0
    with in_use(small):
        deadline_s = time.monotonic() + 90.0
        while members.caches[0].fill_state() != "complete" and time.monotonic() < deadline_s:
            largest = max(largest, disk_bytes(small.path))
            time.sleep(0.02)
        for _ in range(50):
            largest = max(largest, disk_bytes(small.path))
            time.sleep(0.02)
    assert members.caches[0].fill_state() == "complete"
    assert 1_000_000 < largest <= 3_000_000
    only_once(small)


@pytest.mark.slow
@pytest.mark.usefixtures("third_node")
def test_a_cache_that_joins_full_ones_reads_nothing_that_they_hold(members: Members, tmp_path: Path) -> None:
    source = numbers(tmp_path, nbytes=20_000)
    for _ in range(2):
        members.start(source, size="3MB", shard_size="200KB")
    with ExitStack() as users:
        for cache in members.caches:
            users.enter_context(in_use(cache))
        wait_until(lambda: min(map(passes_of, members.caches)) > 1, "they have begun further passes", DONE_S)
    with ExitStack() as leases:
        for cache in members.caches:  # nothing is evicted from now on
            leases.callback(cache.take_snapshot()[1].release)
        held = set().union(*map(only_once, members.caches))
        late_source = numbers(tmp_path, nbytes=20_000, journal=str(tmp_path / "late"))
        late = members.start(late_source)
        wait_until(lambda: only_once(late) >= held and reads(late_source) > 5, "it has all of that", DONE_S)
    read = {f"{unit}/0" for unit in Path(late_source.journal).read_text(encoding="utf-8").split()}
    assert 0 < len(held) < UNITS
    assert not read & held, (len(read), len(held), log_of(late))


@pytest.mark.slow
def test_a_full_cache_stops_though_the_others_make_everything(members: Members, tmp_path: Path) -> None:
    source = numbers(tmp_path, nbytes=20_000)
    members.start(source)
    members.wait()
    small = members.start(source, size="3MB", shard_size="200KB", when_full="stop")
    wait_until(lambda: small.fill_state() == "full", "it is full", 60.0)
    assert reads(source) == UNITS
    only_once(small)


@pytest.mark.e2e
def test_a_process_that_attaches_must_want_the_same_group(members: Members, tmp_path: Path) -> None:
    source = numbers(tmp_path)
    members.start(source)
    runs = "engine='local', share='group'"
    for options, wanted in (
        ({"share": None}, "engine='local'"),
        ({"share": "other"}, "engine='local', share='other'"),
        ({"share_required": True}, "engine='local', share='group', share_required=True"),
        ({"engine": "ray"}, "engine='ray', share='group'"),
    ):
        with pytest.raises(ConfigError, match=f"with {runs}, not {wanted}; give all processes"):
            members.restart(0, source, **options)
    members.restart(0, source)
    for worker in members.workers:
        worker.close()
    members.restart(0, source, share=None)  # nobody needs the first worker any more
    assert [worker.attached for worker in members.workers] == [False, True, False]
    with pytest.raises(ConfigError, match=f"with engine='local', not {runs};"):
        members.restart(0, source)


@pytest.mark.e2e
def test_what_cannot_be_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = numbers(tmp_path)
    with Cache(tmp_path / "cache", size_limit="50MB", min_free=0) as cache:
        for options, message in (
            ({"order": [1.0] * UNITS}, "order='shuffle'"),
            ({"share": ""}, "give the group of caches a name"),
            ({"share": None, "share_required": True}, "name it with share="),
        ):
            with pytest.raises(ConfigError, match=message):
                start_worker(cache, source, **({"share": "group"} | options))
        with pytest.raises(ConfigError, match="no end"):
            start_worker(cache, Numbers(units=None), share="group")
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ConfigError, match=r"pip install 'cachestream\[ray\]'"):
            start_worker(cache, source, share="group")
    monkeypatch.setattr("cachestream.ray.connection.current_address", lambda: "auto")
    with (
        Cache(tmp_path / "held", size_limit="50MB", min_free=0) as cache,
        pytest.raises(ConfigError, match="holdout="),
    ):
        start_worker(cache, source, share="group", holdout=0.1)


# --- faults


@pytest.mark.e2e
@pytest.mark.parametrize("victim", [slow("supervisor"), slow("sampler"), "sharing"])
def test_a_process_that_is_killed_costs_nothing(
    members: Members, tmp_path: Path, processes: Processes, victim: str
) -> None:
    source = numbers(tmp_path, pause_s=0.02)
    for _ in range(2):
        members.start(source)
    cache = members.caches[1]
    wait_until(lambda: cache.num_samples > 20, "the second cache holds something")
    if victim == "supervisor":
        pids = set(processes.pids())
        kill_supervisor_of(members, 1)
        wait_until(lambda: len(set(processes.pids()) & pids) < len(pids), "it is gone")
        members.restart(1, source)
    else:
        os.kill(
            sampling_pids(cache)[0] if victim == "sampler" else sharing_pid(cache, processes), signal.SIGKILL
        )
    members.wait(source.keys())


def kill_supervisor_of(members: Members, index: int) -> None:
    """Kill the supervisor of a cache, and wait until its lock is free."""
    cache = members.caches[index]
    os.kill(supervisor_pid(cache), signal.SIGKILL)
    members.workers[index].close()
    wait_until(lambda: not cache.has_worker(), "the supervisor is gone")


@pytest.mark.slow
def test_a_damaged_shard_is_set_aside_and_made_again(members: Members, tmp_path: Path) -> None:
    source = numbers(tmp_path)
    first = members.start(source)
    members.wait(source.keys())
    path = Path(shard_path(first.path, shard_ids(first)[3]))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    second = members.start(source)
    wait_for_end(second)
    assert only_once(second) == source.keys()
    wait_until(lambda: first.status().quarantined == 1, "the first cache has set it aside")
    assert "came damaged" in log_of(second)


@pytest.mark.slow
def test_the_actor_of_the_group_is_killed(members: Members, tmp_path: Path) -> None:
    source = numbers(tmp_path, pause_s=0.02)
    for _ in range(2):
        members.start(source)
    wait_until(lambda: members.caches[1].num_samples > 20, "the caches hold something")
    for pid in members.ray.actors("GroupActor"):
        os.kill(pid, signal.SIGKILL)
    members.wait(source.keys())
    assert reads(source) <= 1.5 * UNITS, [log_of(cache) for cache in members.caches]
