"""When a shard is published: small first, then large, and never larger than the limit can turn over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachestream.sampling.pace import FIRST_BYTES, Concurrency, is_due, max_age_s, target_bytes


def test_shards_double_up_to_the_full_size() -> None:
    sizes = [target_bytes(published, 64 * 2**20, 10**12) for published in range(12)]
    assert sizes[:3] == [FIRST_BYTES, 2 * FIRST_BYTES, 4 * FIRST_BYTES]
    assert sizes[8:] == [64 * 2**20] * 4


@given(st.integers(0, 10**6), st.integers(1, 10**12), st.integers(1, 10**15))
def test_a_shard_is_never_empty_nor_larger_than_asked_nor_than_an_eighth_of_the_limit(
    published: int, shard_bytes: int, limit_bytes: int
) -> None:
    target = target_bytes(published, shard_bytes, limit_bytes)
    assert 1 <= target <= max(1, min(shard_bytes, limit_bytes // 8))


@given(st.floats(0, 10**7), st.floats(0, 10**7))
def test_samples_wait_longer_as_the_worker_grows_older_but_never_over_a_minute(
    one_s: float, other_s: float
) -> None:
    early_s, late_s = sorted((one_s, other_s))
    assert 0.25 <= max_age_s(early_s) <= max_age_s(late_s) <= 60.0


def test_a_shard_is_due_when_it_is_full_or_old_and_not_before() -> None:
    assert is_due(100, 0.0, 100, 0.0)
    assert is_due(1, 0.25, 100, 0.0)
    assert is_due(1, 2.0, 100, 10.0)
    assert not is_due(99, 0.2, 100, 0.0)
    assert not is_due(99, 1.9, 100, 10.0)


@given(st.integers(1, 64), st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1)), max_size=60))
def test_the_number_of_reads_stays_within_its_bounds_whatever_is_measured(
    most: int, turns: list[tuple[float, float]]
) -> None:
    state = Concurrency(min(4, most), min(4, most))
    for rate, waiting in turns:
        state = state.next(rate, waiting, most)
        assert 1 <= state.active <= most


def test_reads_double_while_that_pays_and_go_back_when_it_does_not() -> None:
    state = Concurrency(4, 4)
    for _ in range(10):
        state = state.next(100.0 * state.active, 1.0, 64)  # latency-bound: each read brings as much
    assert state.active == 64
    state = Concurrency(4, 4)
    for _ in range(3):
        state = state.next(100.0, 1.0, 64)  # bound by something else
    assert state.active == 4


@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1), st.booleans()), max_size=60),
)
def test_a_remote_that_asks_to_slow_down_gets_fewer_reads_and_never_none(
    most: int, turns: list[tuple[float, float, bool]]
) -> None:
    state = Concurrency(min(4, most), min(4, most))
    for rate, waiting, throttled in turns:
        before, state = state, state.next(rate, waiting, most, throttled=throttled)
        assert 1 <= state.active <= most
        if throttled:
            # What was under way is forgiven for one turn after each halving, and may end a recovery, no more.
            assert state.active == max(1, before.active // 2) or before.goal
        if before.goal:
            assert state.active <= before.active + 1


def test_reads_are_halved_at_once_and_come_back_one_by_one() -> None:
    state = Concurrency(32, 32).next(100.0, 1.0, 64, throttled=True)
    assert state.active == 16
    state = state.next(100.0, 1.0, 64, throttled=True)
    assert state.active == 16  # that was still the burst
    state = state.next(100.0, 1.0, 64, throttled=True)
    assert state.active == 8
    seen = [state.active]
    while state.goal:
        state = state.next(100.0, 1.0, 64)
        seen.append(state.active)
    assert sorted(set(seen)) == list(range(8, 33))
    assert seen == sorted(seen)
    assert len(seen) > 2 * 24  # at least two turns, 0.6 s, each


@given(st.integers(2, 40))
def test_against_a_remote_that_takes_so_many_the_reads_stay_near_that(capacity: int) -> None:
    state, refused, served = Concurrency(4, 4), 0, 0
    for _ in range(400):
        throttled = state.active > capacity
        refused += throttled
        served += min(state.active, capacity)
        state = state.next(100.0 * min(state.active, capacity), 1.0, 64, throttled=throttled)
    assert refused < 100
    assert served > 0.6 * 400 * capacity
