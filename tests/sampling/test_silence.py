"""When a unit that does not answer is passed by, and when it is left out."""

from __future__ import annotations

import pytest

from cachestream.sampling.silence import Silence


@pytest.mark.parametrize(
    ("now_s", "is_long", "is_too_long"),
    [
        (1000, False, False),
        (1009, False, False),
        (1010, True, False),
        (1119, True, False),
        (1120, True, True),
    ],
)
def test_others_go_first_after_a_third_of_what_a_process_may_hang_and_it_ends_after_four_times_that(
    now_s: float, is_long: bool, is_too_long: bool
) -> None:
    silence = Silence(1000.0, "503")
    assert silence.is_long(now_s, 30.0) == is_long
    assert silence.is_too_long(now_s, 30.0) == is_too_long
