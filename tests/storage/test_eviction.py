"""Eviction policies are pure, give a total order, and never evict more than needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream.errors import ConfigError, NotEnoughSamplesError
from cachestream.schema import ShardRow
from cachestream.storage import cache as cache_module
from cachestream.storage.cache import Cache
from cachestream.storage.eviction import ORDERS, check_policy, choose_victims, chosen_by, describe_shortage
from cachestream.storage.reservations import Owner
from cachestream.storage.snapshots import ReusableSnapshots
from cachestream.storage.tables import REPLACED
from cachestream.storage.view import make_view
from tests.storage.support import (
    DEADLINE_S,
    content,
    insert_rows,
    new_cache,
    publish,
    shard_ids,
    use_all,
    worker_runs,
)
from tests.worker.support import wait_until

rows = st.lists(
    st.builds(
        ShardRow,
        id=st.integers(1, 10**12),
        size_bytes=st.integers(1, 10**9),
        num_samples=st.integers(1, 1000),
        uses=st.integers(0, 5),
        last_used=st.integers(0, 5),
    ),
    unique_by=lambda row: row.id,
    max_size=12,
)

SORT_KEYS: dict[str, Callable[[ShardRow], tuple[int, ...]]] = {
    "lru": lambda row: (row.last_used, row.id),
    "fifo": lambda row: (row.id,),
    "least-fresh": lambda row: (-row.uses, row.last_used, row.id),
    "least-weight": lambda row: (row.last_used, row.id),  # nobody has weighed them: all are average
    "none": lambda row: (row.id,),
}


@pytest.mark.e2e
@given(rows=rows, need_bytes=st.integers(-5, 3 * 10**9))
def test_victims_are_the_shortest_beginning_that_frees_enough(rows: list[ShardRow], need_bytes: int) -> None:
    victims = choose_victims(rows, need_bytes)
    assert victims == rows[: len(victims)]
    freed = sum(row.size_bytes for row in victims)
    assert freed >= need_bytes or victims == rows
    assert not victims or freed - victims[-1].size_bytes < need_bytes


def test_choosing_reads_no_further_than_it_must() -> None:
    def endless() -> Any:
        yield from (ShardRow(i, 10, 1, 0, 0) for i in range(3))
        pytest.fail("read past the last victim")

    assert [row.id for row in choose_victims(endless(), 21)] == [0, 1, 2]


@pytest.mark.e2e
@pytest.mark.parametrize("policy", list(ORDERS))
@given(rows=rows)
def test_the_catalogue_sorts_as_the_policy_promises(
    policy: str, rows: list[ShardRow], sorting_cache: Cache
) -> None:
    put(sorting_cache, rows)
    with sorting_cache.catalogue.reading() as tables:
        ordered = sorted(rows, key=SORT_KEYS[policy])
        assert list(tables.evictable(policy, used_only=False)) == ordered
        (ids,) = tables.shard_columns("id", policy=policy)
        assert ids.tolist() == [row.id for row in ordered]


def put(cache: Cache, rows: list[ShardRow]) -> None:
    """Make `rows` the shards of the cache."""
    with cache.catalogue.transaction() as tables:
        tables.execute("DELETE FROM shards")
    if rows:
        insert_rows(cache, rows)


@pytest.mark.e2e
@given(rows=rows, data=st.data())
def test_the_lightest_go_first_and_what_nobody_has_weighed_counts_as_average(
    rows: list[ShardRow], data: st.DataObject, sorting_cache: Cache
) -> None:
    put(sorting_cache, rows)
    # Halves are exact, and so are their sums.
    number = st.integers(0, 8).map(lambda half: half / 2)
    weights = {row.id: data.draw(number) for row in rows if data.draw(st.booleans())}
    with sorting_cache.catalogue.transaction() as tables:
        pairs = [(weight, shard_id) for shard_id, weight in weights.items()]
        tables.executemany("UPDATE shards SET weight = ? WHERE id = ?", pairs)
        mean = sum(weights.values()) / max(1, len(weights))
        ordered = sorted(rows, key=lambda row: (weights.get(row.id, mean), row.last_used, row.id))
        assert list(tables.evictable("least-weight", used_only=False)) == ordered


@pytest.fixture(scope="module")
def sorting_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache = Cache(tmp_path_factory.mktemp("sorting"), "1GB", min_free=0, eviction="least-weight")
    yield cache
    cache.close()


ROWS = tuple(ShardRow(i, 10, 1, 0, 0) for i in range(1, 5))


@pytest.mark.parametrize(
    ("answer", "ids"),
    [
        ([], []),
        (ROWS[::-1], [4, 3, 2, 1]),
        ([3, 1], [3, 1]),
        (np.array([2, 4]), [2, 4]),
        ([ROWS[1], 4], [2, 4]),
        ({2: "x"}, [2]),
        ((row for row in ROWS), [1, 2, 3, 4]),
    ],
)
def test_a_function_may_return_rows_or_ids_in_anything_that_can_be_gone_through(
    answer: Any, ids: list[int]
) -> None:
    assert [row.id for row in chosen_by(lambda _: answer, ROWS)] == ids


def raises(rows: Sequence[ShardRow]) -> list[int]:
    raise KeyError("epoch")


@pytest.mark.parametrize("policy", [*ORDERS, len])
def test_the_policies_there_are_pass(policy: Any) -> None:
    assert check_policy(policy) is policy


def test_a_shortage_names_what_is_needed_free_leased_and_the_way_out() -> None:
    text = describe_shortage(64_000_000, 10**9, 990_000_000, 800_000_000)
    assert text == (
        "64 MB needed, 10 MB free of 1 GB, 800 MB leased by epochs in use; raise the limit "
        "('cachestream limit CACHE SIZE') or close epochs"
    )


def test_a_function_evicts_in_a_real_cache_and_nonsense_from_it_changes_nothing(
    make_cache: Callable[..., Cache],
) -> None:
    answers: list[Any] = [[3], None, "raise"]

    def policy(rows: Sequence[ShardRow]) -> Any:
        answer = answers[0]
        if answer == "raise":
            raise RuntimeError("no")
        return answer

    cache = make_cache("1MB", eviction=policy)
    while cache.reservations.footprint(80_000) + 80_000 < cache.size_limit - cache.size_bytes - 2**19:
        publish(cache, content(0, size_bytes=80_000))
    ids = shard_ids(cache)
    assert len(ids) >= 3
    use_all(cache)
    assert cache.evict(to=0) > 0
    assert shard_ids(cache) == [i for i in ids if i != 3]
    for answers[0] in (None, "raise"):
        with pytest.raises(ConfigError, match="the eviction function"):
            cache.evict(to=0)
        with pytest.raises(ConfigError, match="the eviction function"):
            publish(cache, content(0, size_bytes=500_000))
    assert shard_ids(cache) == [i for i in ids if i != 3]
    assert cache.status().reserved_bytes == 0


def test_lowering_the_limit_waits_for_what_is_being_written(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes promised under the old limit would otherwise exceed the new one."""
    monkeypatch.setattr(cache_module, "_WRITERS_TIMEOUT_S", DEADLINE_S)
    with new_cache(fast_path / "cache", "4MB") as cache:
        assert publish(cache, content(0, 2, 1_000_000)) is not None
        owner = Owner(cache.directory, "writer")
        shard_id = cache.reservations.reserve(1_500_000, owner.name)
        assert shard_id is not None
        lowering = threading.Thread(target=setattr, args=(cache, "size_limit", 1_100_000))
        lowering.start()
        wait_until(lambda: cache.num_shards == 0, "the shard there was is evicted")
        assert lowering.is_alive()
        cache.reservations.cancel(shard_id, owner.name)
        lowering.join(DEADLINE_S)
        assert not lowering.is_alive()
        owner.release()


def newest_first(rows: Sequence[ShardRow]) -> list[ShardRow]:
    return sorted(rows, key=lambda row: -row.id)


def fill_up(cache: Cache, size_bytes: int = 80_000) -> list[int]:
    """Publish until nothing fits any more."""
    for _ in range(1000):
        first = 3 * len(shard_ids(cache)) + 3
        if publish(cache, content(first, size_bytes=size_bytes)) is None:
            return shard_ids(cache)
    raise AssertionError("it evicts what it should keep, and is never full")


def begin_filling(cache: Cache) -> None:
    """Have the catalogue look as if a worker filled it from an endless source."""
    with cache.catalogue.transaction() as tables:
        tables.insert_pass("{}", None, 0)
        tables.set_meta("fill_state", "filling")


@pytest.mark.parametrize("policy", ["lru", "fifo", "least-fresh", "least-weight", newest_first])
def test_a_shard_that_no_epoch_has_used_is_no_victim(make_cache: Callable[..., Cache], policy: Any) -> None:
    cache = make_cache("1MB", eviction=policy)
    before = fill_up(cache)
    assert len(before) >= 3
    assert cache.status().evicted_shards == 0
    with cache.catalogue.transaction() as tables:
        tables.mark_used(np.array([[before[1], before[1]]]))
    after = fill_up(cache)
    assert set(before) - set(after) == {before[1]}, "the used one alone"
    assert cache.status().evicted_unused_samples == 0
    cache.evict(to=0)  # asked for by hand
    assert shard_ids(cache) == []
    status = cache.status()
    assert status.evicted_unused_samples == status.evicted_samples - 3, "all but those of the used one"


@pytest.mark.e2e
def test_a_limit_is_not_enforced_for_the_blocks_of_a_lease(make_cache: Callable[..., Cache]) -> None:
    """Each epoch has a lease, and an unused shard would have to be evicted for it."""
    cache = make_cache("1MB")
    fill_up(cache, 80_000)
    ids = fill_up(cache, 4_000)
    leases = [cache.reservations.hold(np.array([[1, 1]])) for _ in range(8)]
    assert cache.reservations.room().free_bytes < 0
    assert cache.enforce_limit() == 0
    Cache(cache.path, "1MB").close()
    assert shard_ids(cache) == ids
    for lease in leases:
        lease.release()


@pytest.mark.parametrize("policy", ["lru", "fifo", "least-fresh", "least-weight", newest_first])
def test_two_trainers_leave_the_same_shards_to_the_filling(
    make_cache: Callable[..., Cache], policy: Any
) -> None:
    """A shard that one of them holds cannot be replaced, even if the other leaves it out."""
    cache = make_cache("2MB", eviction=policy)
    fill_up(cache)
    begin_filling(cache)
    trainers = [ReusableSnapshots(cache), ReusableSnapshots(cache)]
    held: list[Any] = [None, None]
    with worker_runs(cache):
        for turn in range(8):
            snapshot, lease = trainers[turn % 2].take(None, 0.25)
            if held[turn % 2] is not None:
                held[turn % 2][1].release()
            held[turn % 2] = snapshot, lease
            if turn >= 3:
                left = [set(shard_ids(cache)) - set(taken.shard_ids.tolist()) for taken, _ in held]
                assert len(left[0] & left[1]) * 80_000 > 0.2 * cache.size_limit, f"turn {turn}: {left}"
    for _, lease in held:
        lease.release()


def left_out(cache: Cache, **options: Any) -> set[int]:
    """The shards that a snapshot leaves out."""
    snapshot, lease = cache.take_snapshot(**options)
    lease.release()
    return set(shard_ids(cache)) - set(snapshot.shard_ids.tolist())


def test_retiring_shards_are_left_out_and_go_first_until_the_filling_needs_them_no_more(
    make_cache: Callable[..., Cache],
) -> None:
    cache = make_cache("2MB", eviction="least-fresh")
    before = set(fill_up(cache))
    use_all(cache)
    begin_filling(cache)
    with worker_runs(cache):
        retiring = left_out(cache, turnover=0.25)
        assert 0.2 * len(before) <= len(retiring) <= 0.5 * len(before)
        assert left_out(cache, turnover=0.25) == retiring, "whoever asks"
        assert left_out(cache, turnover=0.0) == set(), "without turnover it has all"
        with cache.catalogue.transaction() as tables:
            tables.mark_used(
                np.array([[max(before), max(before)]]), 5
            )  # the policy would now have it go first
        assert cache.num_shards == len(before), "they count until they go"
        publish(cache, content(0, size_bytes=80_000))
        assert before - set(shard_ids(cache)) < retiring
        assert left_out(cache, turnover=0.25) > retiring & set(shard_ids(cache))
    assert left_out(cache, turnover=0.25) == set(), "no worker fills it any more"


@pytest.mark.parametrize("policy", ["lru", "none", newest_first])
def test_what_new_shards_replace_joins_no_epoch_and_goes_with_the_last_that_holds_it(
    make_cache: Callable[..., Cache], policy: Any
) -> None:
    cache = make_cache("2MB", eviction=policy)
    old = fill_up(cache)
    held, lease = cache.take_snapshot()
    with cache.catalogue.transaction() as tables:
        tables.retire(old[2:4], REPLACED)
    assert (cache.num_shards, left_out(cache)) == (len(old) - 2, set(old[2:4]))
    restored, again, gone = cache.restore_snapshot(held.shard_ids, held.counts)
    assert (restored.shard_ids.tolist(), gone) == (old, [])
    again.release()
    assert publish(cache, content(0, size_bytes=80_000)) is None, "an epoch holds them"
    assert cache.verify().ok
    lease.release()
    assert publish(cache, content(0, size_bytes=80_000)) is not None
    assert set(old) - set(shard_ids(cache)) == set(old[2:4])
    assert cache.status().evicted_shards == 0, "nothing is lost"


def oldest(rows: Sequence[ShardRow]) -> Sequence[ShardRow]:
    """Allow the eviction of one shard only."""
    return rows[:1]


def test_the_one_shard_that_a_function_gives_up_is_left_to_the_filling(
    make_cache: Callable[..., Cache],
) -> None:
    cache = make_cache("1MB", eviction=oldest)
    fill_up(cache)
    use_all(cache)
    begin_filling(cache)
    with worker_runs(cache):
        snapshot, lease = cache.take_snapshot(turnover=0.25)
        assert set(shard_ids(cache)) - set(snapshot.shard_ids.tolist()) == {shard_ids(cache)[0]}
        lease.release()


@pytest.mark.parametrize("is_cleared", [False, True])
def test_after_a_clearing_nothing_is_left_out_where_the_rest_of_the_remote_fits(
    make_cache: Callable[..., Cache], is_cleared: bool
) -> None:
    cache = make_cache("2MB")
    if is_cleared:
        publish(cache, content(0))
        cache.clear()
    for first in range(0, 27, 3):
        publish(cache, content(first, size_bytes=160_000))
    use_all(cache)
    with cache.catalogue.transaction() as tables:
        tables.insert_pass("{}", 20, int(tables.meta("evicted_shards", 0)))
        tables.execute("UPDATE passes SET next_position = 19")
        tables.set_meta("fill_state", "filling")
    assert 90_000 < cache.reservations.room().free_bytes < 0.25 * cache.size_limit
    with worker_runs(cache):
        snapshot, lease = cache.take_snapshot(turnover=0.25)
        assert len(snapshot.shard_ids) == 9
        lease.release()


@pytest.mark.parametrize("chosen", [[1], [1, 2], []])
def test_a_condition_whose_samples_would_all_be_left_out_still_has_one_shard_of_them(
    make_cache: Callable[..., Cache], chosen: list[int]
) -> None:
    """The shards that eviction takes first are the only ones with samples that the condition selects."""
    cache = make_cache("1MB")
    fill_up(cache)
    use_all(cache)
    begin_filling(cache)
    wanted = [3 * shard_id for shard_id in chosen]  # the first of the three samples in each
    view = make_view(lambda columns: np.isin(columns["n"], wanted), None)
    with worker_runs(cache):
        if not chosen:
            with pytest.raises(NotEnoughSamplesError, match="where= selects 0 of"):
                cache.take_snapshot(turnover=0.25, view=view)
        else:
            snapshot, lease = cache.take_snapshot(turnover=0.25, view=view)
            assert snapshot.shard_ids.tolist() == chosen[-1:]
            lease.release()
