"""Errors and warnings for a trainer whose samples do not come, or only in part."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache, EpochLoader, NotEnoughSamplesError
from cachestream.cli.facts import one_line
from cachestream.errors import SourceUnavailableError
from cachestream.storage import status
from cachestream.storage.status import is_much
from tests.support.caches import add_shard, numbered, numbers, set_fill_state, skip_samples
from tests.training.conftest import NewCache
from tests.worker.support import wait_until

DEADLINE_S = 120.0


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        yield cache


@pytest.mark.e2e
def test_too_few_samples_because_most_decided_what_all_are_says_how_to_leave_the_others_out(
    cache: Cache, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number, kind in enumerate(["txt"] * 3 + ["bin"] * 4 + ["json"] * 3):
        (files / f"{number}.{kind}").write_bytes(b'{"x": 1}')
    source = cs.FileSource(files, extensions="*")
    with cs.start_worker(cache, source, num_workers=1, order="sequential") as worker:
        assert worker.wait(DEADLINE_S)
    with (
        EpochLoader(cache, 8) as loader,
        pytest.raises(NotEnoughSamplesError, match="6 skipped, most often: schema:") as caught,
    ):
        next(iter(loader))
    assert all(words in str(caught.value) for words in ("extensions=", "fields=", "transform=", "clear"))


def half_of(count: int) -> list[dict[str, int]]:
    """Samples of which every second one has a field that the first lacks."""
    return [{"x": number, **({"more": 1} if number % 2 else {})} for number in range(count)]


@pytest.mark.e2e
@pytest.mark.parametrize("by", ["loader", "worker"])
def test_that_much_was_skipped_is_said_once_to_who_waits_for_the_pass_and_to_who_trains(
    cache: Cache, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    with cs.start_worker(cache, half_of(40), num_workers=1, order="sequential") as worker:
        if by == "worker":
            assert worker.wait(DEADLINE_S)
            assert worker.wait(DEADLINE_S)
        with EpochLoader(cache, 5, min_samples=20) as loader:
            assert [len(list(loader)) for _ in range(2)] == [4, 4]
    (said,) = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert said.startswith(
        f"{cache.path}: 20 samples were cached, and 20 skipped, most often: schema: fields differ"
    )
    assert "transform=" in said


@pytest.mark.parametrize(
    ("skipped", "used", "much"), [(0, 0, False), (1, 99, False), (2, 99, True), (1, 0, True)]
)
def test_more_than_one_percent_is_much(skipped: int, used: int, much: bool) -> None:
    assert is_much(skipped, used) == much


@pytest.mark.e2e
def test_a_cache_too_small_for_what_is_waited_for_says_so_instead_of_fetching_on(cache: Cache) -> None:
    cache.size_limit = 3_000_000
    samples = [{"x": np.zeros(100_000, np.uint8)} for _ in range(100)]
    too_small = r"holds \d\d samples, 64 are needed, and no more fit into its size_limit of 3 MB: raise"
    too_many: list[dict[str, Any]] = [{"batch_size": 64}, {"batch_size": 4, "min_samples": 64}]
    with cs.start_worker(cache, samples, num_workers=1):
        for options in too_many:
            with (
                EpochLoader(cache, **options, timeout_s=2 * DEADLINE_S) as loader,
                pytest.raises(NotEnoughSamplesError, match=too_small),
            ):
                next(iter(loader))
        with pytest.raises(
            NotEnoughSamplesError, match=r"64 are needed, and no more fit into its size_limit of 3 MB"
        ):
            cache.wait(64, timeout_s=2 * DEADLINE_S)
        with EpochLoader(cache, 64, drop_last=False) as loader:
            assert len(next(iter(loader))["x"]) < 64
        cache.size_limit = 20_000_000
        for options in too_many:
            with EpochLoader(cache, **options) as loader:
                assert len(loader) >= 1


@pytest.mark.e2e
def test_a_checkpoint_of_a_cache_that_was_cleared_since_waits_for_the_worker(cache: Cache) -> None:
    samples = [{"x": number} for number in range(40)]
    with cs.start_worker(cache, samples, num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
    with EpochLoader(cache, 4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    cache.clear()
    with cs.start_worker(cache, samples, num_workers=1), EpochLoader(cache, 4, min_samples=40) as loader:
        loader.load_state_dict(state)
        with pytest.warns(UserWarning, match="36 samples of epoch 0 are not cached any more"):
            assert len(list(loader)) == 10


@pytest.mark.e2e
def test_what_is_left_to_the_filling_leaves_the_epoch_a_batch(cache: Cache) -> None:
    def draw(rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.random(1250)}

    cache.size_limit = "2MB"
    with cs.start_worker(cache, cs.CallableSource(draw), num_workers=1, shard_size="100KB"):
        wait_until(lambda: cache.fill_state() == "full", "the cache is full")
        batch_size = cache.num_samples * 3 // 4
        with EpochLoader(cache, batch_size, turnover=0.6, timeout_s=DEADLINE_S) as loader:
            for _ in range(4):
                assert [len(batch["x"]) for batch in loader] == [batch_size]


@pytest.fixture
def early_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warn a trainer after a second why there are no samples yet."""
    monkeypatch.setattr(status, "_WARN_AFTER_S", 1.0)


def warned_of(cache: Cache, caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return any(
        words in record.getMessage() and cache.path in record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    )


@pytest.mark.e2e
def test_a_web_server_that_accepts_and_says_nothing_is_told_of_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, early_warnings: None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts
        urls = [f"http://127.0.0.1:{silent.getsockname()[1]}/{number}.bin" for number in range(20)]
        with (
            Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache,
            cs.stream(urls, cache, batch_size=4, num_workers=1, timeout_s=DEADLINE_S) as loader,
            ThreadPoolExecutor(1) as trainer,
        ):
            waiting = trainer.submit(lambda: next(iter(loader)))
            wait_until(
                lambda: warned_of(cache, caplog, "holds no samples so far: waiting for the remote"),
                "a warning",
            )
            assert cache.status().remote_message.startswith("waiting for the remote: ")
            assert "waiting for the remote" in cache.status().worker.states  # type: ignore[union-attr]
            loader.close()
            assert waiting.exception(DEADLINE_S) is not None


@pytest.mark.e2e
def test_a_remote_that_is_silent_while_it_is_listed_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachestream.worker.worker._OPENING_S", 0.1)
    monkeypatch.setattr("cachestream.transport.remote.PAGE_TIMEOUT_S", 3.0)
    monkeypatch.setattr("cachestream.transport.remote_errors.ATTEMPTS", 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache,
    ):
        options = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with pytest.raises(SourceUnavailableError, match="does not answer"):
            cs.stream("s3://bucket/train/", cache, batch_size=4, storage_options=options)
    assert warned_of(cache, caplog, "opening the source has taken 0.1 s")


@pytest.mark.e2e
def test_a_transform_that_drops_everything_is_told_of_while_the_pass_goes_on(
    cache: Cache, caplog: pytest.LogCaptureFixture, early_warnings: None
) -> None:
    def draw(rng: np.random.Generator) -> dict[str, float]:
        time.sleep(0.005)  # what drops everything as fast as it can takes a core
        return {"x": float(rng.random())}

    why = "transform returned None for all"
    with cs.stream(
        draw, cache, batch_size=4, transform=lambda _: None, num_workers=1, timeout_s=8.0
    ) as loader:
        with pytest.raises(NotEnoughSamplesError, match=f"'filling': {why} [0-9]+ samples so far"):
            next(iter(loader))
        assert warned_of(cache, caplog, f"holds no samples so far: {why}")
        assert cache.status().fill_message.startswith(why)
        assert why in one_line(cache.status())


def test_too_few_samples_are_an_error_at_once_when_no_more_will_come(new_cache: NewCache) -> None:
    cache = new_cache(1, 3)
    set_fill_state(cache, "complete")
    with EpochLoader(cache, 4) as loader:
        began = time.monotonic()
        with pytest.raises(NotEnoughSamplesError, match=r"holds 3 samples, 4 are needed.*'complete'"):
            next(iter(loader))
        with pytest.raises(NotEnoughSamplesError):
            len(loader)
        assert time.monotonic() - began < 60  # not the loader's 120 s
        add_shard(cache, numbered(3, 5))
        assert len(numbers(loader)) == 8
        assert loader.epoch == 1
    with EpochLoader(cache, 20, drop_last=False) as loader:
        assert len(numbers(loader)) == 8


@pytest.mark.parametrize(
    ("have", "advice"), [(0, "correct what fails"), (3, "correct"), (8, "smaller batch")]
)
def test_too_few_samples_because_others_were_skipped_says_why(
    new_cache: NewCache, have: int, advice: str
) -> None:
    cache = new_cache(1, have) if have else new_cache(0, 0)
    set_fill_state(cache, "complete")
    skip_samples(cache, 7, "ValueError: even!")
    with EpochLoader(cache, 9) as loader, pytest.raises(NotEnoughSamplesError) as caught:
        next(iter(loader))
    assert "7 skipped, most often: transform: ValueError: even! (first: a.npy)" in str(caught.value)
    assert advice in str(caught.value)


@pytest.mark.e2e
def test_a_full_disk_is_what_those_who_wait_are_told(new_cache: NewCache) -> None:
    full = r"the disk has .* left, and min_free keeps 1 PB of it free"
    with Cache(new_cache(0, 0).path, min_free=10**15) as cache:
        set_fill_state(cache, "stopped")  # as it is while a worker waits for space, or after
        with EpochLoader(cache, 4, timeout_s=2.0) as loader, pytest.raises(NotEnoughSamplesError, match=full):
            next(iter(loader))
        with pytest.raises(NotEnoughSamplesError, match=full):
            cache.wait(1, timeout_s=0)
        assert "make room on it" in cache.status().disk_message


def test_a_cold_start_that_finds_nothing_but_what_is_skipped_warns_once(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples come only after the warning."""
    cache = new_cache(0, 0)
    skip_samples(cache, 7, "ValueError: even!")
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            add_shard(cache, numbered(0, 8))

    listener = Listener()
    monkeypatch.setattr(status, "_WARN_AFTER_S", 0.0)
    logging.getLogger("cachestream").addHandler(listener)
    try:
        with EpochLoader(cache, 4) as loader:
            assert len(numbers(loader)) == 8
    finally:
        logging.getLogger("cachestream").removeHandler(listener)
    assert len(said) == 1
    assert "0 samples were cached, and 7 skipped, most often: transform: ValueError: even!" in said[0]


@pytest.mark.e2e
def test_too_few_samples_are_an_error_at_the_deadline_when_more_might_come(new_cache: NewCache) -> None:
    with (
        EpochLoader(new_cache(1, 3), 4, timeout_s=2.0) as loader,
        pytest.raises(NotEnoughSamplesError, match="start a worker"),
    ):
        next(iter(loader))


@pytest.mark.e2e
def test_the_first_epoch_waits_for_the_samples_asked_for(new_cache: NewCache) -> None:
    cache = new_cache(1, 4)
    with EpochLoader(cache, 4, min_samples=12) as loader:
        filler = threading.Timer(0.2, lambda: [add_shard(cache, numbered(4 + 4 * i, 4)) for i in range(2)])
        filler.start()
        assert len(numbers(loader)) == 12
        filler.join()
