"""The forecast of a run: the limit is held, what is seen grows to all, and nothing is fetched twice that fits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestream.errors import ConfigError
from cachestream.storage.reservations import HEADROOM_BYTES
from cachestream.tools.forecast import RunPlan, Setup, simulate

SETUP = Setup(
    num_samples=4000,
    fetched_bytes=20_000,
    cached_bytes=20_000,
    fill_per_s=200.0,
    size_limit=20_000_000,
    batch_size=32,
    step_s=0.01,
    duration_s=600.0,
    num_workers=2,
    shard_bytes=1_000_000,
)

setups = st.builds(
    Setup,
    num_samples=st.none() | st.integers(1, 20_000),
    fetched_bytes=st.floats(0, 1e6),
    cached_bytes=st.floats(100, 1e5),
    fill_per_s=st.floats(1, 1e4),
    size_limit=st.integers(4_000_000, 10**9),
    batch_size=st.integers(1, 32),
    step_s=st.floats(0.01, 2),
    duration_s=st.floats(1, 1e4),
    first_s=st.floats(0, 10),
    turnover=st.floats(0, 1),
    min_samples=st.integers(0, 500),
    num_workers=st.integers(1, 8),
    shard_bytes=st.integers(10_000, 10**8),
)


@pytest.mark.e2e
@settings(deadline=None)
@given(setups)
def test_what_is_seen_grows_and_the_limit_is_held(setup: Setup) -> None:
    forecast = simulate(setup)
    seen = [epoch.seen for epoch in forecast.epochs]
    assert seen == sorted(seen)
    assert all(0 < epoch.samples * setup.cached_bytes <= setup.size_limit for epoch in forecast.epochs)
    assert [epoch.at_s for epoch in forecast.epochs] == sorted(epoch.at_s for epoch in forecast.epochs)
    share = forecast.seen_share or 0.0
    assert (forecast.seen_share is None) == (setup.num_samples is None)
    assert 0 <= share <= 1
    assert (forecast.seen_s is None) == (share < 1)
    assert 0 <= forecast.waited_s <= setup.duration_s
    whole = setup.whole * math.ceil(setup.cached_bytes) * 1.01
    if whole < setup.size_limit - HEADROOM_BYTES:
        assert forecast.fetched_bytes <= setup.whole * setup.fetched_bytes * (1 + 1e-9)
        assert forecast.full_s is None


def test_a_small_cache_turns_over_until_all_is_seen() -> None:
    forecast = simulate(SETUP)
    assert forecast.first_batch_s is not None
    assert forecast.first_batch_s < 2.0
    assert forecast.full_s is not None
    assert forecast.seen_s is not None
    assert 4.0 < forecast.full_s < 7.0, "a thousand samples, 200 a second"
    assert 20.0 < forecast.seen_s < 40.0, "four thousand"
    assert forecast.epochs[-1].samples < 1000, "a share is left out of each epoch"


def test_a_cache_that_holds_all_of_the_remote_says_when() -> None:
    forecast = simulate(replace(SETUP, size_limit=200_000_000))
    assert forecast.full_s is None
    assert forecast.complete_s == pytest.approx(SETUP.first_s + 4000 / 200, abs=2.0)
    assert "all cached   21 s\n" in str(forecast)
    assert simulate(SETUP).complete_s is None


def test_an_endless_source_is_seen_for_as_long_as_the_run_goes_on() -> None:
    short, long = (simulate(replace(SETUP, num_samples=None, duration_s=seconds)) for seconds in (600, 6000))
    assert (long.seen_s, long.seen_share) == (None, None)
    assert long.seen == pytest.approx(10 * short.seen, rel=0.2)
    assert "remote       endless" in str(long)
    assert f"seen         {long.seen:,.0f} samples in 1 h 40 min" in str(long)


def test_a_run_that_ends_before_the_first_batch_only_waits() -> None:
    forecast = simulate(replace(SETUP, first_s=1000.0))
    assert (forecast.first_batch_s, forecast.seen_share, forecast.waited_s) == (None, 0.0, 600.0)
    assert "first batch  never" in str(forecast)
    json.loads(json.dumps(forecast.to_dict(), allow_nan=False))


@pytest.mark.e2e
def test_without_turnover_a_full_cache_stays_as_it_is() -> None:
    forecast = simulate(replace(SETUP, turnover=0.0))
    assert forecast.seen < 0.4 * 4000
    assert forecast.seen_s is None
    assert forecast.fetched_bytes < 2 * SETUP.size_limit


@pytest.mark.e2e
def test_a_year_takes_no_longer_than_a_day() -> None:
    day, year = (simulate(replace(SETUP, duration_s=days * 86_400.0)) for days in (1, 365))
    assert len(year.epochs) == len(day.epochs)
    assert year.fetched_bytes == pytest.approx(365 * day.fetched_bytes, rel=0.01)


@pytest.mark.e2e
def test_a_run_of_more_epochs_than_are_simulated_has_the_same_forecast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setups = [replace(SETUP, num_samples=40_000, duration_s=duration_s) for duration_s in (100.0, 600.0)]
    whole = [simulate(setup) for setup in setups]
    monkeypatch.setattr("cachestream.tools.forecast._MOST_EPOCHS", 100)
    assert [one.seen_s is None for one in whole] == [True, False]
    for setup, expected in zip(setups, whole, strict=True):
        found = simulate(setup)
        assert len(found.epochs) == 100
        for name in ("seen_s", "seen_share", "uses", "fetched_bytes"):
            value = getattr(expected, name)
            assert getattr(found, name) == (value and pytest.approx(value, rel=0.1)), name


@pytest.mark.e2e
def test_advice_and_price_come_with_the_forecast() -> None:
    planned = RunPlan.of(SETUP, price_per_gb=0.1)
    assert "size_limit=" in planned.advice[0]
    assert planned.price == pytest.approx(planned.forecast.fetched_bytes / 1e10)
    assert max(map(len, str(planned).splitlines())) <= 80
    values = json.loads(json.dumps(planned.to_dict()))
    assert values["forecast"]["full_s"] == planned.forecast.full_s
    assert not RunPlan.of(replace(SETUP, size_limit=200_000_000)).advice


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step_s": 0.0}, "step_s=0.0: give a number above 0"),
        ({"fill_per_s": math.inf}, "fill_per_s=inf"),
        ({"size_limit": 800_000}, "a batch takes 640 kB, more than a cache of 800 kB holds"),
    ],
)
def test_a_run_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(replace(SETUP, **wrong))
