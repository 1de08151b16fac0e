"""Reserving, publishing, leasing, evicting, limiting and dying, in any order, keep a cache sound."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cachestream.errors import NotEnoughSamplesError
from cachestream.schema import ShardRow, Snapshot
from cachestream.storage import cache as cache_module
from cachestream.storage.cache import Cache
from cachestream.storage.layout import BLOCK_BYTES
from cachestream.storage.leases import Lease
from cachestream.storage.reservations import HEADROOM_BYTES, Owner
from cachestream.storage.shard import shard_path
from cachestream.storage.tables import RESERVED
from tests.storage.support import (
    Child,
    Line,
    assert_books_cover_disk,
    assert_readable,
    assert_sound,
    content,
    disk_bytes,
    fork,
    new_cache,
    publish,
)
from tests.support.fixtures import MEMORY

LIMIT = 1_500_000
SIZES = st.integers(1, 150_000)


def newest_first(rows: Sequence[ShardRow]) -> Sequence[ShardRow]:
    return rows[::-1]


def every_other(rows: Sequence[ShardRow]) -> list[int]:
    return [row.id for row in rows[::2]]


@dataclass(eq=False, slots=True)
class Reserved:
    """A reservation of this process."""

    shard_id: int
    size_bytes: int


class CacheMachine(RuleBasedStateMachine):
    """Two open handles of one cache in this process, and children that reserve and die."""

    reservations = Bundle("reservations")
    snapshots = Bundle("snapshots")
    children = Bundle("children")

    def __init__(self) -> None:
        super().__init__()
        root = MEMORY if os.access(MEMORY, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="cachestream-", dir=root))
        self.caches: list[Cache] = []
        self.living: list[Child] = []
        self.held: dict[str, Snapshot] = {}
        self.leases: list[Lease] = []
        self.number = self.published = self.set_aside = 0
        self.ceiling = LIMIT

    @initialize(
        eviction=st.sampled_from(
            ["lru", "fifo", "least-fresh", "least-weight", "none", newest_first, every_other]
        ),
        shards=st.integers(0, 12),
    )
    def open(self, eviction: Any, shards: int) -> None:
        self.caches = [new_cache(self.folder / "cache", LIMIT, eviction=eviction) for _ in range(2)]
        self.owner = Owner(self.caches[0].directory, "machine")
        for _ in range(shards):
            self.publish_some(90_000, 0, may_evict=True)

    def any_cache(self, data: int) -> Cache:
        return self.caches[data % 2]

    @rule(size=SIZES, which=st.integers(0, 1))
    def publish(self, size: int, which: int) -> None:
        self.publish_some(size, which, may_evict=True)

    @rule(size=SIZES, which=st.integers(0, 1), may_evict=st.booleans(), times=st.integers(1, 4))
    def publish_several(self, size: int, which: int, may_evict: bool, times: int) -> None:
        for _ in range(times):
            self.publish_some(size, which, may_evict=may_evict)

    def publish_some(self, size: int, which: int, *, may_evict: bool) -> None:
        shard = content(self.number, 2, size)
        if publish(self.any_cache(which), shard, owner=self.owner.name, may_evict=may_evict) is not None:
            self.number += 2
            self.published += 2

    @rule(target=reservations, size=SIZES, which=st.integers(0, 1))
    def reserve(self, size: int, which: int) -> Any:
        size = self.caches[0].reservations.footprint(size)
        shard_id = self.any_cache(which).reservations.reserve(size, self.owner.name)
        return multiple() if shard_id is None else Reserved(shard_id, size)

    @rule(reserved=reservations, share=st.floats(0, 1), named=st.booleans())
    def write(self, reserved: Reserved, share: float, named: bool) -> None:
        """Write as much as was reserved, under the temporary or the final name."""
        directory = self.caches[0].directory
        path = directory.temporary_shard(reserved.shard_id)
        final = shard_path(directory.root, reserved.shard_id)
        if not self.is_reserved(reserved.shard_id) or os.path.exists(final):
            return
        with open(path, "wb") as file:
            file.write(bytes(int((reserved.size_bytes - 4096) * share)))
        if named:
            os.rename(path, final)

    @rule(reserved=consumes(reservations), which=st.integers(0, 1))
    def cancel(self, reserved: Reserved, which: int) -> None:
        self.any_cache(which).reservations.cancel(reserved.shard_id, self.owner.name)

    @rule(target=children, size=SIZES, halfway=st.booleans())
    @precondition(lambda self: len(self.living) < 2)
    def start_child(self, size: int, halfway: bool) -> Any:
        """Start another process that reserves, writes half of it, and waits."""
        cache = self.caches[0]

        def run(line: Line) -> None:
            owner = Owner(cache.directory, f"child-{os.getpid()}")
            need = cache.reservations.footprint(size)
            shard_id = cache.reservations.reserve(need, owner.name)
            if shard_id is not None and halfway:
                Path(cache.directory.temporary_shard(shard_id)).write_bytes(bytes(need // 2))
            _snapshot, _lease = cache.take_snapshot(1) if cache.num_shards else (None, None)
            line.say("ready")
            line.wait_for_word()

        child = fork(run)
        assert child.hear() == "ready"
        self.living.append(child)
        return child

    @rule(child=consumes(children))
    def kill_child(self, child: Child) -> None:
        child.kill()
        self.living.remove(child)

    @rule(to=st.integers(0, LIMIT), which=st.integers(0, 1))
    def evict(self, to: int, which: int) -> None:
        self.any_cache(which).evict(to=to)

    @rule(target=snapshots, epoch_size=st.none() | st.integers(1, 30), which=st.integers(0, 1))
    def take_snapshot(self, epoch_size: int | None, which: int) -> Any:
        try:
            snapshot, lease = self.any_cache(which).take_snapshot(epoch_size)
        except NotEnoughSamplesError:
            assert self.caches[0].num_shards == 0
            return multiple()
        self.held[lease.path] = snapshot
        self.leases.append(lease)
        return lease

    @rule(lease=consumes(snapshots))
    def release(self, lease: Lease) -> None:
        del self.held[lease.path]
        lease.release()

    @rule(limit=st.integers(1_000_000, 2_000_000), which=st.integers(0, 1))
    def set_limit(self, limit: int, which: int) -> None:
        self.any_cache(which).size_limit = limit
        self.ceiling = max(limit, disk_bytes(self.caches[0].path) + HEADROOM_BYTES)

    @rule(min_free=st.sampled_from([0, 10**15]))
    def others_fill_the_disk(self, min_free: int) -> None:
        """Leave only `min_free` of the disk: then nothing may be added."""
        Cache(self.caches[0].path, min_free=min_free).close()
        if min_free:
            assert self.caches[0].reservations.reserve(4096, self.owner.name, may_evict=False) is None

    @rule(data=st.data())
    @precondition(lambda self: self.caches and self.caches[0].num_shards)
    def quarantine(self, data: st.DataObject) -> None:
        with self.caches[0].catalogue.reading() as tables:
            shard_id = data.draw(st.sampled_from(sorted(tables.shard_ids())))
            row = next((row for row in tables.shards() if row.id == shard_id), None)
        assert row is not None
        self.caches[1].quarantine(shard_id, "x: broken")
        self.set_aside += row.num_samples
        for path, snapshot in self.held.items():
            keep = snapshot.shard_ids != shard_id
            self.held[path] = Snapshot(
                snapshot.cache_id,
                snapshot.root,
                path,
                snapshot.schema,
                snapshot.shard_ids[keep],
                snapshot.counts[keep],
            )

    @rule()
    def recover(self) -> None:
        self.caches[0].recover()

    def is_reserved(self, shard_id: int) -> bool:
        with self.caches[0].catalogue.reading() as tables:
            return any(row.id == shard_id and row.state == RESERVED for row in tables.unfinished())

    @invariant()
    def the_limit_holds(self) -> None:
        if not self.caches:
            return
        occupied = disk_bytes(self.caches[0].path)
        # A lowered limit holds from when it has room for the reserve, from which leases take their blocks.
        if self.caches[0].reservations.room().used_bytes <= self.caches[0].size_limit:
            self.ceiling = self.caches[0].size_limit
        assert occupied <= self.ceiling, f"{occupied} bytes, {self.ceiling} allowed"
        assert self.caches[0].size_bytes == occupied

    @invariant()
    def the_books_are_the_disk(self) -> None:
        if not self.caches:
            return
        assert_books_cover_disk(self.caches[0])
        with self.caches[1].catalogue.reading() as tables:
            rows = list(tables.shards())
            samples = tables.totals()[1]
            evicted = int(tables.meta("evicted_samples", 0))
        for row in rows:
            assert os.stat(shard_path(self.caches[0].path, row.id)).st_blocks * 512 == row.size_bytes
        assert samples == self.published - evicted - self.set_aside

    @invariant()
    def what_is_leased_is_there(self) -> None:
        for snapshot in self.held.values():
            assert_readable(snapshot)

    def teardown(self) -> None:
        for child in self.living:
            child.kill()
        for lease in self.leases:
            lease.release()
        if self.caches:
            self.owner.release()
            self.caches[0].recover()
            self.caches[0].enforce_limit()
            assert_sound(self.caches[0])
        for cache in self.caches:
            cache.close()
        shutil.rmtree(self.folder)


def run(examples: int, steps: int) -> None:
    machine_test: Any = run_state_machine_as_test  # has no types in the release for Python 3.10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cache_module, "_WRITERS_TIMEOUT_S", 0.0
        )  # those who write here go on only when they are told to
        machine_test(
            CacheMachine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )


def test_the_last_free_byte_is_given_and_none_beyond_it(cache: Cache) -> None:
    owner = Owner(cache.directory, "test")
    free_bytes = cache.reservations.room().free_bytes
    assert cache.reservations.reserve(free_bytes + 1, owner.name) is None
    assert cache.reservations.reserve(free_bytes, owner.name) is not None
    assert cache.reservations.room().used_bytes == cache.size_limit
    assert cache.reservations.reserve(1, owner.name) is None
    owner.release()


def test_a_limit_lowered_to_what_epochs_hold_is_exceeded_by_their_leases_alone_until_they_end(
    cache: Cache,
) -> None:
    for first in range(0, 36, 3):
        publish(cache, content(first, size_bytes=100_000))
    leases = [cache.take_snapshot()[1]]
    cache.size_limit = limit = cache.size_bytes
    assert cache.num_shards == 12, "all are leased"
    leases += [cache.take_snapshot()[1] for _ in range(3)]
    assert limit < disk_bytes(cache.path) <= limit + 3 * BLOCK_BYTES
    for lease in leases:
        lease.release()
    assert cache.enforce_limit() > 0
    assert cache.reservations.room().used_bytes <= limit
    assert_sound(cache)


@pytest.mark.e2e
def test_the_invariants_hold_after_every_step_of_thirty_histories() -> None:
    run(30, 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_invariants_hold_after_every_step_of_two_thousand_histories() -> None:
    run(2000, 50)
