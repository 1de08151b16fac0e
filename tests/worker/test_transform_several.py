"""A transform that returns several samples for one: all of them, exactly once, whatever dies in between."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream import Cache, WorkerError
from cachestream.storage.shard import MappedShard
from cachestream.worker.sampling.transformer import collected, to_records
from tests.worker.sources import Numbers, content
from tests.worker.support import failures_of, fill, only_once, sampling_pids, wait_until

DEADLINE_S = 60.0


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["x"][0])


def pieces(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """None to three pieces of a sample, by its first byte."""
    for piece in range(number_of(sample) % 4):
        yield {"piece": sample["x"][piece * 100 : (piece + 1) * 100]}


def expected(source: Numbers) -> set[str]:
    keys = [f"{unit}/{sample}" for unit in range(source.units or 0) for sample in range(source.samples)]
    counts = {key: int(content(key, source.nbytes)[0]) % 4 for key in keys}
    return {f"{key}/{piece}" for key, count in counts.items() for piece in range(count)}


def in_list_or_not(sample: dict[str, Any]) -> Any:
    return list(pieces(sample)) if sample["x"][1] % 2 else pieces(sample)


@pytest.mark.e2e
def test_each_piece_is_cached_once_under_a_key_of_its_own(cache: Cache) -> None:
    source = Numbers(units=40, samples=3)
    with cs.start_worker(cache, source, num_workers=2, transform=in_list_or_not) as worker:
        worker.wait(timeout_s=DEADLINE_S)
        totals = worker.status().worker.totals  # type: ignore[union-attr]
    assert only_once(cache) == expected(source)
    assert totals.samples == len(expected(source))
    assert totals.dropped == 120 - len({key.rpartition("/")[0] for key in expected(source)})
    for shard in map(MappedShard, glob(f"{cache.directory.shards}/*.safetensors")):
        for key, data in zip(shard.keys(), shard.array("piece"), strict=True):
            whole, _, piece = key.rpartition("/")
            start = 100 * int(piece)
            assert np.array_equal(data, content(whole, source.nbytes)[start : start + 100])


@pytest.mark.e2e
def test_kills_cost_no_piece_and_bring_none_twice(cache: Cache) -> None:
    source, killed = Numbers(units=75, samples=4, pause_s=0.1), 0
    with cs.start_worker(
        cache, source, num_workers=2, transform=pieces, shard_size="20KB", concurrency=1
    ) as worker:
        for wanted in (20, 75, 150, 225):
            wait_until(lambda wanted=wanted: cache.num_samples > wanted, "more samples are cached")  # type: ignore[misc]
            with suppress(ProcessLookupError):  # a restarted one is not on the board yet
                os.kill(sampling_pids(cache)[0], signal.SIGKILL)
                killed += 1
        worker.wait(timeout_s=2 * DEADLINE_S)
    assert killed
    assert only_once(cache) == expected(source)


@pytest.mark.e2e
def test_a_generator_that_fails_leaves_the_whole_sample_out(cache: Cache) -> None:
    def fails(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"piece": sample["x"][:10]}
        if number_of(sample) % 2:
            raise ValueError("odd")
        yield {"piece": sample["x"][10:20]}

    source = Numbers(units=30)
    fill(cache, source, transform=fails)
    odd = sum(int(content(f"{unit}/0", source.nbytes)[0]) % 2 for unit in range(30))
    assert len(only_once(cache)) == 2 * (30 - odd)
    assert failures_of(cache) == {"transform": odd}


@pytest.mark.e2e
def test_pieces_are_packed_together_however_small_the_cache(cache: Cache) -> None:
    """More than a quarter of the limit in pieces of one sample."""
    cache.size_limit = "2MB"

    def many(sample: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"piece": np.full(1000, number % 256, np.uint8)} for number in range(600)]

    with cs.start_worker(cache, Numbers(units=2), num_workers=1, transform=many, when_full="wait") as worker:
        cache.wait(1200, timeout_s=DEADLINE_S)
        worker.wait(timeout_s=DEADLINE_S)
    assert len(only_once(cache)) == 1200
    assert cache.num_shards == 2


@pytest.mark.e2e
def test_several_samples_where_samples_are_held_out_are_refused(cache: Cache) -> None:
    with (
        cs.start_worker(cache, Numbers(), num_workers=1, transform=pieces, holdout=0.2) as worker,
        pytest.raises(WorkerError, match="returns several samples, and holdout= holds out single ones"),
    ):
        worker.wait(timeout_s=DEADLINE_S)


def test_a_tuple_is_one_sample_and_a_list_is_several() -> None:
    assert [record.keys for record in to_records(collected([1, 2]), "key")] == [(b"key/0",), (b"key/1",)]
    (record,) = to_records(collected((1, 2)), "key")
    assert (record.keys, record.schema.names) == ((b"key",), ("0", "1"))
    assert to_records(collected(None), "key") == to_records(collected(iter(())), "key") == []
    assert to_records([1, 2], "key")[0].schema.names == ("0", "1")  # as a source gives it


@pytest.mark.e2e
def test_what_a_slow_generator_takes_counts_as_transform(cache: Cache) -> None:
    def slow(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        time.sleep(0.02)
        yield {"piece": sample["x"]}

    with cs.start_worker(cache, Numbers(units=20), num_workers=1, transform=slow) as worker:
        worker.wait(timeout_s=DEADLINE_S)
        assert worker.status().worker.totals.transform_s > 0.4  # type: ignore[union-attr]
