"""Hedged requests: the second one only for what is slower than nearly all, and never many of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream.errors import ConfigError
from cachestream.transport.hedge import EXTRA_SHARE, FEWEST, MOST_SAVED, Hedge, first_answer
from tests.support.proxy import FaultyProxy
from tests.support.s3 import S3Server

AFTER_THE_SECOND: Final = -1.0


def experienced(hedge: Hedge, took_s: float = 0.01, answers: int = 100) -> Hedge:
    """`hedge` after so many answers of 1 kB."""
    for _ in range(answers):
        hedge.patience_s(1000)
        hedge.came(1000, took_s)
    return hedge


def answers(*plans: tuple[float, object]) -> tuple[Callable[[], Coroutine[Any, Any, object]], list[int]]:
    """A request whose nth call takes so long, and returns or raises that; and which calls were made, or cancelled (-n).

    One that takes `AFTER_THE_SECOND` ends when the second one has.
    """
    calls: list[int] = []
    second_ended = asyncio.Event()

    async def ask() -> object:
        number = len([call for call in calls if call > 0])
        calls.append(number + 1)
        delay_s, outcome = plans[number]
        try:
            await (second_ended.wait() if delay_s == AFTER_THE_SECOND else asyncio.sleep(delay_s))
        except asyncio.CancelledError:
            calls.append(-number - 1)
            raise
        if number == 1:
            second_ended.set()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return ask, calls


async def soon(request: Coroutine[Any, Any, object]) -> object:
    found = await asyncio.wait_for(request, 60)
    await asyncio.sleep(0)  # what was cancelled hears of it
    return found


def test_a_slow_first_request_loses_against_the_second_and_is_cancelled() -> None:
    ask, calls = answers((600, "slow"), (0.001, "fast"))
    assert asyncio.run(soon(first_answer(experienced(Hedge()), 1000, ask))) == "fast"
    assert calls == [1, 2, -1]


def test_a_usual_request_is_made_once() -> None:
    ask, calls = answers((0.001, "usual"))
    assert asyncio.run(soon(first_answer(experienced(Hedge(), 100.0), 1000, ask))) == "usual"
    assert calls == [1]


def test_a_request_that_fails_is_no_reason_for_a_second_one() -> None:
    ask, calls = answers((0.001, ConnectionError("busy")))
    with pytest.raises(ConnectionError, match="busy"):
        asyncio.run(soon(first_answer(experienced(Hedge(), 100.0), 1000, ask)))
    assert calls == [1]


def test_when_one_of_both_fails_the_other_one_counts_and_when_both_do_the_first_error_does() -> None:
    ask, calls = answers((AFTER_THE_SECOND, "first"), (0.001, ConnectionError("second")))
    assert asyncio.run(soon(first_answer(experienced(Hedge()), 1000, ask))) == "first"
    assert calls == [1, 2]
    ask, calls = answers((AFTER_THE_SECOND, ConnectionError("first")), (0.001, ConnectionError("second")))
    with pytest.raises(ConnectionError, match="first"):
        asyncio.run(soon(first_answer(experienced(Hedge()), 1000, ask)))


def test_an_answer_that_comes_too_late_is_let_go_of() -> None:
    dropped: list[object] = []

    async def stubborn() -> object:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass  # it had come already
        return "late"

    asks = iter((stubborn(), asyncio.sleep(0, "fast")))

    async def run() -> None:
        answer = await first_answer(experienced(Hedge()), 1000, asks.__next__, dropped.append)
        assert answer == "fast"
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert dropped == ["late"]


def test_nothing_is_asked_twice_before_it_is_known_what_is_slow() -> None:
    hedge = experienced(Hedge(), answers=FEWEST - 1)
    assert hedge.patience_s(1000) is None
    hedge.came(1000, 0.01)
    assert hedge.patience_s(1000) == 0.02  # twice the median, which is clearly slow
    assert hedge.patience_s(100_000_000) is None  # of that size nothing is known


@given(st.lists(st.booleans(), max_size=400))
def test_second_requests_are_at_most_one_in_twenty_and_a_few_at_once(wants: list[bool]) -> None:
    hedge, taken = Hedge(), 0
    for number, want in enumerate(wants):
        hedge.patience_s(1000)
        taken += want and hedge.take()
        assert taken <= EXTRA_SHARE * (number + 1) + 1e-9
    assert hedge.seconds == taken
    hedge = experienced(Hedge(), answers=1000)
    assert sum(hedge.take() for _ in range(100)) == MOST_SAVED


@pytest.mark.parametrize("option", ["yes", 2.0, 0.1, 7, 1.0])
def test_an_option_that_is_no_quantile_is_refused(tmp_path: Path, option: object) -> None:
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with pytest.raises(ConfigError, match="hedge="):
        cs.open_source(str(tmp_path), storage_options={"hedge": option})


@pytest.mark.parametrize(("option", "quantile"), [(True, 0.95), (0.99, 0.99), (False, None), (None, None)])
def test_the_option_is_true_or_a_quantile(option: object, quantile: float | None) -> None:
    found = Hedge.of(option)
    assert (found and found.quantile) == quantile


@pytest.mark.parametrize("kind", ["files", "windows", "tars"])
def test_one_request_that_hangs_does_not_hold_up_an_s3_source(
    s3_server: S3Server,
    s3_proxy: FaultyProxy,
    s3_bucket: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**s3_server.options_through(s3_proxy.port), "hedge": 0.99}
    options["config_kwargs"] = {"read_timeout": 300}
    rng = np.random.default_rng(0)
    source: Any
    if kind == "tars":
        import io
        import tarfile

        for number in range(60):
            with tarfile.open(s3_bucket / f"{number:02d}.tar", "w") as archive:
                member = tarfile.TarInfo("a.txt")
                member.size = 1
                archive.addfile(member, io.BytesIO(b"x"))
        source = cs.TarSource(f"s3://{s3_bucket.name}/*.tar", storage_options=options)
    elif kind == "windows":
        np.save(s3_bucket / "a.npy", np.arange(10_000))
        source = cs.ArraySource(f"s3://{s3_bucket.name}/a.npy", window=100, storage_options=options)
    else:
        for number in range(60):
            (s3_bucket / f"{number:02d}.bin").write_bytes(b"x" * 1000)
        source = cs.FileSource(f"s3://{s3_bucket.name}", storage_options=options)
    with monkeypatch.context() as patch:
        # A machine that is busy meanwhile shall not have used up the second requests that may be made.
        patch.setattr(Hedge, "take", lambda _: False)
        for unit in range(50):
            list(source.read(unit, rng))
    s3_proxy.requests = 0
    s3_proxy.hang(times=1)
    begun_s = time.monotonic()
    assert len(list(source.read(50, rng))) == 1
    assert time.monotonic() - begun_s < 150  # without, it would be the read timeout of 300 s
    assert s3_proxy.requests == 2
    list(source.read(51, rng))
    assert s3_proxy.requests in (3, 4)
