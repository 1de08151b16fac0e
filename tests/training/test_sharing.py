"""Which number of threads copies faster is found by trying, and found again when it changes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from cachestream.training.threads import Sharing


def turns_with(sharing: Sharing, rate: Callable[[int], float], turns: int) -> tuple[Sharing, list[int]]:
    used = []
    for _ in range(turns):
        used.append(sharing.threads)
        sharing = sharing.next(rate(sharing.threads))
    return sharing, used


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(2, 8))
def test_the_faster_number_is_used_almost_always(alone: float, shared: float, most: int) -> None:
    _, used = turns_with(Sharing.begin(most), lambda threads: alone if threads == 1 else shared, 1000)
    assert set(used) == {1, most}
    if alone != shared:
        assert used.count(1 if alone > shared else most) > 950


@given(st.integers(0, 2000))
def test_a_change_is_noticed_at_once_where_it_slows_copying_down(before: int) -> None:
    sharing, _ = turns_with(Sharing.begin(2), lambda threads: 10.0 * threads, before)
    _, used = turns_with(sharing, lambda threads: 8.0 if threads == 1 else 1.0, 20)
    assert used.count(2) <= 6


def test_a_core_that_is_free_again_is_found_by_the_next_trial() -> None:
    sharing, _ = turns_with(Sharing.begin(2), lambda threads: 8.0 if threads == 1 else 1.0, 3000)
    assert sharing.threads == 1
    _, used = turns_with(sharing, lambda threads: 10.0 * threads, 300)
    assert used[-1] == 2


def test_one_thread_stays_one() -> None:
    assert set(turns_with(Sharing.begin(1), lambda _: 1.0, 10)[1]) == {1}


@given(st.integers(0, 2000), st.floats(0.1, 100))
def test_no_second_thread_is_used_for_a_trainer_that_does_not_wait(before: int, rate: float) -> None:
    sharing, _ = turns_with(Sharing.begin(2), lambda threads: 10.0 * threads, before)
    for _ in range(20):
        sharing = sharing.next(rate, hurried=False)
        assert sharing.threads == 1
    _, used = turns_with(sharing, lambda threads: 10.0 * threads, 100)
    assert used.count(2) > 80
