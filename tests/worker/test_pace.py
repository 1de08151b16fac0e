"""The sizes of shards: small first, then large, and never larger than the limit can turn over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachestream.worker.shard_writer import FIRST_BYTES, is_due, max_age_s, target_bytes


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
    assert 0.1 <= max_age_s(early_s) <= max_age_s(late_s) <= 60.0


def test_a_shard_is_due_when_it_is_full_or_old_and_not_before() -> None:
    assert is_due(100, 0.0, 100, 0.0)
    assert is_due(1, 0.25, 100, 0.0)
    assert is_due(1, 2.0, 100, 10.0)
    assert not is_due(99, 0.05, 100, 0.0)
    assert not is_due(99, 1.9, 100, 10.0)
