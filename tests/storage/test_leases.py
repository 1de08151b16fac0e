"""A lease protects the shards of a snapshot for as long as a process that holds it lives, and no longer."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cachestream.errors import CorruptShardError, EpochError
from cachestream.storage.cache import Cache
from cachestream.storage.leases import join_lease
from cachestream.storage.shard import MappedShard, shard_path
from tests.storage.support import (
    Line,
    assert_readable,
    assert_sound,
    content,
    fork,
    leftovers,
    publish,
    shard_ids,
)


@pytest.fixture
def filled(cache: Cache) -> Cache:
    for first in range(0, 30, 3):
        publish(cache, content(first))
    return cache


@pytest.mark.e2e
def test_a_forked_child_keeps_no_lease_alive_unless_it_joins(filled: Cache) -> None:
    """A DataLoader worker that outlives its trainer must not hold the shards; one that reads must."""
    _snapshot, lease = filled.take_snapshot()

    def outlive(line: Line) -> None:
        line.say("running")
        line.wait_for_word()
        joined = join_lease(lease.path)
        line.say(f"{joined.held}")
        line.wait_for_word()

    idle, reader = fork(outlive), fork(outlive)
    assert idle.hear() == reader.hear() == "running"
    reader.tell()
    assert reader.hear() == "True"
    lease.release()
    filled.evict(to=0)
    assert filled.num_shards == 10, "the reader has joined"
    reader.kill()
    filled.evict(to=0)
    assert filled.num_shards == 0, "the idle child holds nothing"
    idle.kill()


@pytest.mark.e2e
def test_a_started_process_joins_a_lease_by_its_path(filled: Cache) -> None:
    """An unpickled dataset does so in a spawned worker."""
    snapshot, lease = filled.take_snapshot()
    program = (
        "import pickle, sys\n"
        "from cachestream.storage.leases import join_lease\n"
        "snapshot = pickle.load(sys.stdin.buffer)\n"
        "lease = join_lease(snapshot.lease)\n"
        "print('joined', snapshot.num_samples, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | _PATH
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(pickle.dumps(snapshot))
        started.stdin.flush()
        assert started.stdout.readline() == b"joined 30\n"
        lease.release()
        filled.evict(to=0)
        assert filled.num_shards == 10
        started.kill()
    filled.evict(to=0)
    assert filled.num_shards == 0


_PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_lease_that_has_ended_cannot_be_joined(filled: Cache) -> None:
    _, lease = filled.take_snapshot()
    lease.release()
    filled.evict(to=0)
    with pytest.raises(EpochError, match="has ended, its shards may be gone; take a new snapshot"):
        join_lease(lease.path)


def test_a_lease_that_nobody_refers_to_is_released(filled: Cache) -> None:
    """Otherwise a dataset dropped without a close would hold its shards for the life of the process."""
    _, lease = filled.take_snapshot()
    assert filled.status().leases == 1
    del lease
    gc.collect()
    assert filled.status().leases == 0


def interrupt_at(step: int) -> Callable[[object, str, object], None]:
    """A profiler that raises KeyboardInterrupt at the `step`-th place where CPython may handle a signal."""
    places = itertools.count()

    def profile(_frame: object, event: str, _arg: object) -> None:
        if event in ("call", "c_return") and next(places) == step:
            raise KeyboardInterrupt

    return profile


@pytest.mark.e2e
def test_a_release_that_was_interrupted_anywhere_is_completed_when_the_lease_is_dropped(
    filled: Cache,
) -> None:
    for step in itertools.count():
        _, lease = filled.take_snapshot()
        is_interrupted = False
        sys.setprofile(interrupt_at(step))
        try:
            lease.release()
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            sys.setprofile(None)
        del lease
        gc.collect()
        assert filled.status().leases == 0, f"interrupted at step {step}"
        if not is_interrupted:
            break
    assert step > 5


def test_a_failed_snapshot_holds_nothing(filled: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("cachestream.storage.tables.Tables.mark_used", fail)
        with pytest.raises(ZeroDivisionError):
            filled.take_snapshot()
    assert filled.status().leases == 0
    assert filled.status().snapshots == 0


def test_a_reader_is_unharmed_when_somebody_deletes_a_leased_shard(filled: Cache) -> None:
    snapshot, lease = filled.take_snapshot()
    path = shard_path(filled.path, int(snapshot.shard_ids[0]))
    mapped = MappedShard(path)
    os.unlink(path)
    mapped.verify()
    assert mapped.array("n").tolist() == [0, 1, 2]
    with pytest.raises(CorruptShardError, match="missing; run 'cachestream verify CACHE --repair'"):
        MappedShard(path)
    mapped.close()
    filled.quarantine(int(snapshot.shard_ids[0]), "x: missing")
    assert filled.num_shards == 9
    lease.release()
    assert_sound(filled)


@pytest.mark.e2e
def test_several_leases_at_once_hold_what_any_of_them_holds(filled: Cache) -> None:
    early = filled.take_snapshot(epoch_size=6)[1]
    late = filled.take_snapshot(epoch_size=6)
    assert late[0].shard_ids.tolist() == [3, 4], "the least used first"
    filled.evict(to=0)
    assert shard_ids(filled) == [1, 2, 3, 4]
    early.release()
    filled.evict(to=0)
    assert shard_ids(filled) == [3, 4]
    assert_readable(late[0])
    late[1].release()


def test_a_snapshot_taken_again_holds_what_is_left_of_it_and_names_what_is_gone(filled: Cache) -> None:
    snapshot, lease = filled.take_snapshot()
    ids, counts = snapshot.shard_ids, snapshot.counts.copy()
    lease.release()
    publish(filled, content(100))
    filled.quarantine(4)
    counts[7] += 1  # not the shard that it was
    shuffled = np.random.default_rng(0).permutation(len(ids))
    again, lease, gone = filled.restore_snapshot(ids[shuffled], counts[shuffled])
    assert gone == [4, 8]
    assert again.shard_ids.tolist() == [1, 2, 3, 5, 6, 7, 9, 10]
    filled.evict(to=0)
    assert_readable(again)
    lease.release()
    filled.evict(to=0)
    with pytest.raises(
        EpochError, match=r"none of the 10 shards of this epoch is cached .* begin a new epoch"
    ):
        filled.restore_snapshot(ids, counts)
    with pytest.raises(EpochError, match="none of the 0 shards"):
        filled.restore_snapshot([], [])


def test_leases_of_the_dead_are_cleared_away_and_take_no_space(filled: Cache) -> None:
    for _ in range(5):
        filled.take_snapshot()[1].release()
    assert len(leftovers(filled)) == 1, "a snapshot clears those before it"
    publish(filled, content(100))
    assert leftovers(filled) == []


def test_a_reused_process_id_does_not_make_a_dead_lease_look_alive(filled: Cache) -> None:
    """A forged lease with the pid of a running process: only the kernel's lock counts."""
    forged = Path(filled.directory.leases) / f"{os.getppid()}-forged.lease"
    forged.write_bytes(np.array([[1, 10]], np.int64).tobytes())
    (Path(filled.directory.leases) / f"{os.getppid()}-forged.owner").touch()
    assert filled.status().leases == 0
    filled.evict(to=0)
    assert filled.num_shards == 0
    assert leftovers(filled) == []


@pytest.mark.e2e
def test_a_lease_of_a_scattered_hundred_thousand_shards_stays_small(make_cache: Callable[..., Cache]) -> None:
    """After months of turnover, the ids in a cache have gaps everywhere."""
    cache = make_cache("100MB")
    with cache.catalogue.transaction() as tables:
        schema = content(0).schema
        tables.set_meta("schema", schema.to_json())
        shapes = json.dumps([field.shape for field in schema.fields])
        tables.execute(
            "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000) "
            "INSERT INTO shards (id, state, owner, size_bytes, num_samples, shapes) "
            "SELECT i * 3, 'live', '', 100, 2, ? FROM n",
            (shapes,),
        )
    snapshot, lease = cache.take_snapshot()
    assert snapshot.num_samples == 40_000
    assert os.path.getsize(lease.path) == 16
    lease.release()


def test_a_status_sees_a_lease_that_is_being_written(filled: Cache) -> None:
    snapshot, lease = filled.take_snapshot()
    with open(snapshot.lease, "ab") as file:
        file.write(b"torn")
    assert filled.status().leased_bytes == filled.num_shards * 12_288
    json.dumps(filled.status().to_dict())
    lease.release()
