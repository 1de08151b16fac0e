"""Reading ahead: exactly what the coming batches need is asked of the disk, before they are gathered, and only while it is missing."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cachestream as cs
from cachestream import EpochDataset
from cachestream.linux import FileMap, ask_for_all, count_cached
from cachestream.permutation import Permutation
from cachestream.schema import IntArray
from cachestream.storage.shard import shard_path
from cachestream.training.batches import readahead
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.batches.readahead import MissingPages, ReadAhead, addresses_of, merged, runs_of
from cachestream.training.plan import (
    LocalOrder,
    OrderRecord,
    Plan,
    SampleOrder,
    ShuffledOrder,
    TailOrder,
    count_batches,
)
from cachestream.training.position import Position, Segment
from tests.support.caches import add_shard
from tests.training.conftest import NewCache
from tests.training.plans import batch_positions

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=12)


@given(RANGES)
def test_merged_ranges_hold_the_same_numbers_and_do_not_touch(ranges: list[tuple[int, int]]) -> None:
    begins = np.array([begin for begin, _ in ranges], np.int64)
    lows, highs = merged(begins, begins + np.array([length for _, length in ranges], np.int64))
    expected = {n for begin, length in ranges for n in range(begin, begin + length)}
    assert {n for low, high in zip(lows, highs, strict=True) for n in range(low, high)} == expected
    assert all(low < high for low, high in zip(lows, highs, strict=True))
    assert all(high < low for high, low in zip(highs[:-1], lows[1:], strict=True))


def varied(first: int, count: int) -> list[tuple[str, dict[str, Any]]]:
    return [
        (str(n), {"x": torch.full((3, 7), n), "r": torch.full((n % 5, 2), float(n)), "t": "ab" * (n % 3)})
        for n in range(first, first + count)
    ]


def opened(new_cache: NewCache) -> EpochMaps:
    """Maps of shards of 10, 1, 12 and 7 samples, the last one with one shape of `r` and `t` only."""
    cache = new_cache()
    for first, count in ((0, 10), (10, 1), (11, 12)):
        add_shard(cache, varied(first, count))
    add_shard(cache, [(key, {**s, "r": torch.ones(2, 2)}) for key, s in varied(23, 7)])
    snapshot, lease = cache.take_snapshot()
    maps = EpochMaps(snapshot)
    assert not maps.open(np.arange(4))
    lease.release()
    return maps


@pytest.mark.e2e
def test_the_addresses_of_samples_are_those_of_all_their_bytes_and_no_others(new_cache: NewCache) -> None:
    maps = opened(new_cache)
    with EpochDataset(maps.snapshot, maps=maps) as dataset:
        for start, stop in itertools.combinations(range(31), 2):
            sides = addresses_of(maps, *runs_of(maps, np.array([start]), np.array([stop])))
            lows, highs = (side.tolist() for side in sides)
            found = b"".join(ctypes.string_at(low, high - low) for low, high in zip(lows, highs, strict=True))
            values = [value for i in range(start, stop) for value in dataset[i].values()]
            parts = [v.encode() if isinstance(v, str) else v.numpy().tobytes() for v in values]
            by_shard = [range(10), range(10, 11), range(11, 23), range(23, 30)]
            # Shards and fields may lie in memory in any order.
            assert sorted(found) == sorted(b"".join(parts))
            num_shards = len([s for s in by_shard if set(s) & set(range(start, stop))])
            assert len(lows) <= num_shards * len(maps.snapshot.schema.fields)


def test_shards_that_are_not_mapped_are_left_out(new_cache: NewCache) -> None:
    maps = EpochMaps(opened(new_cache).snapshot)
    lows, highs = addresses_of(maps, *maps.locate(np.arange(30)))
    assert len(lows) == len(highs) == 0


def segment_of(maps: EpochMaps, order: SampleOrder, batch: int, ranks: int, place: int) -> Segment:
    snapshot = maps.snapshot
    batches = count_batches(order.size, batch, ranks, True)
    record = OrderRecord(snapshot.shard_ids, snapshot.counts, "shuffled", order.size)
    dataset = EpochDataset(snapshot, maps=maps)
    plan = Plan(order.size, batch, ranks, batches)
    return Segment(Position(0), dataset, maps, order, plan, place, batches, record)


ORDERS: dict[str, SampleOrder] = {
    "shuffled": ShuffledOrder(30, Permutation(30, 1)),
    "local": LocalOrder(30, 30, 8, 3, 1),
    "local, resumed": TailOrder(LocalOrder(30, 30, 8, 3, 1), 5),
    "local, a part": LocalOrder(17, 30, 8, 3, 1),
}


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_while_pages_are_missing_every_batch_is_asked_for_before_it_is_gathered(
    order: str, ranks: int, new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = opened(new_cache)
    monkeypatch.setattr("cachestream.training.batches.readahead.count_cached", lambda _: 0)
    for place in range(ranks):
        segment = segment_of(maps, ORDERS[order], 3, ranks, place)
        asked: list[tuple[IntArray, IntArray]] = []
        waits = itertools.count()
        ahead = ReadAhead(segment, MissingPages(lambda: next(waits)), lambda *ranges: asked.append(ranges))  # noqa: B023
        for batch in range(segment.plan.num_batches):
            ahead.reach(batch)
            for pending in ahead._pending:
                pending.result(120)
            lows, highs = (np.concatenate(side) for side in zip(*asked, strict=True))
            samples = segment.order.at(batch_positions(segment.plan, place, batch))
            for begin, end in zip(*addresses_of(maps, *maps.locate(samples)), strict=True):
                covered = sum(np.clip(np.minimum(highs, end) - np.maximum(lows, begin), 0, None))
                assert covered >= end - begin


def test_no_more_of_varying_size_is_asked_for_than_of_one_size(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    add_shard(cache, ((str(n), {"x": b"x" * (500 + n % 2 * 1000)}) for n in range(400)))
    snapshot, lease = cache.take_snapshot()
    lease.release()
    maps = EpochMaps(snapshot)
    assert not maps.open(np.arange(1))
    monkeypatch.setattr(readahead, "count_cached", lambda _: 0)
    monkeypatch.setattr(readahead, "AHEAD_BYTES", 40_000)
    asked: list[int] = []
    order = ShuffledOrder(400, Permutation(400, 1))
    ahead = ReadAhead(
        segment_of(maps, order, 4, 1, 0),
        MissingPages(lambda: 0),
        lambda starts, stops: asked.append(int((stops - starts).sum())),
    )
    ahead.reach(0)
    for pending in ahead._pending:
        pending.result(120)
    assert 20_000 < sum(asked) < 80_000  # a batch has 4,000 bytes on average; 64 of them have 256,000


def refuse(starts: IntArray, stops: IntArray) -> None:
    pytest.fail(f"{len(starts)} ranges were asked for")


def test_nothing_is_asked_for_while_all_is_there(
    new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = opened(new_cache)
    # What was written a moment ago is there, but nobody promises it.
    monkeypatch.setattr("cachestream.training.batches.readahead.count_cached", len)
    ahead = ReadAhead(segment_of(maps, ORDERS["shuffled"], 3, 1, 0), MissingPages(lambda: 0), refuse)
    for batch in range(10):
        ahead.reach(batch)
    assert not ahead._pending


def test_it_begins_with_what_is_missing_at_first_or_with_a_wait_and_ends_when_all_is_there() -> None:
    waited = [0]
    missing = MissingPages(lambda: waited[0])
    assert missing.may_miss_pages()
    missing.note(16, 16)
    assert not missing.may_miss_pages()
    waited[0] = 7
    assert missing.may_miss_pages()
    missing.note(4, 4)
    assert missing.may_miss_pages()
    for _ in range(100):
        missing.note(4, 4)
    assert not missing.may_miss_pages()

    missing = MissingPages(lambda: 0)
    assert missing.may_miss_pages()
    missing.note(16, 15)
    assert missing.may_miss_pages()


def test_what_was_asked_for_comes_from_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    size = 4 << 20
    path.write_bytes(b"x" * size)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = FileMap(file.fileno(), size)
    starts = mapped.address + np.arange(0, size, 64 << 10, dtype=np.int64) + 100
    ask_for_all(starts, starts + (64 << 10) - 100)
    pages = mapped.address + np.arange(0, size, mmap.PAGESIZE, dtype=np.int64)
    give_up = time.monotonic() + 30
    while count_cached(pages) < len(pages):
        assert time.monotonic() < give_up
        time.sleep(0.001)
    ask_for_all(
        np.array([1 << 40], np.int64), np.array([(1 << 40) + 8192], np.int64)
    )  # nothing is mapped there


ROWS, ROW_PAGES = 256, 4
PATIENCE_S = 30.0

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@pytest.fixture
def maps(new_cache: NewCache) -> EpochMaps:
    """A shard whose rows of 16 KiB hold their number, opened and verified, and not in memory any more."""
    cache = new_cache()
    add_shard(
        cache,
        ((str(n), torch.full((ROW_PAGES * mmap.PAGESIZE // 4,), n, dtype=torch.int32)) for n in range(ROWS)),
    )
    snapshot, lease = cache.take_snapshot()
    lease.release()
    maps = EpochMaps(snapshot)
    assert not maps.open(np.arange(1))
    drop(maps)
    return maps


def pages_of(maps: EpochMaps) -> IntArray:
    """The addresses of all pages of the rows."""
    first: int = next(iter(maps.fields.values())).base[0]
    return first + np.arange(ROWS * ROW_PAGES, dtype=np.int64) * mmap.PAGESIZE


def drop(maps: EpochMaps) -> None:
    """Take the shard out of the page cache, which may take a few tries; skip where pages are kept."""
    pages = pages_of(maps)
    start, give_up_s = int(pages[0]) // mmap.PAGESIZE * mmap.PAGESIZE, time.monotonic() + PATIENCE_S
    while count_cached(pages):
        if time.monotonic() > give_up_s:
            pytest.skip("this file system keeps pages in memory")
        _libc.madvise(start, len(pages) * mmap.PAGESIZE, mmap.MADV_DONTNEED)
        with open(shard_path(maps.snapshot.root, int(maps.snapshot.shard_ids[0])), "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_a_page_fault_reads_nothing_around_its_page(maps: EpochMaps) -> None:
    pages = pages_of(maps)
    assert ctypes.string_at(int(pages[ROWS * ROW_PAGES // 2]), 1)
    assert 1 <= count_cached(pages) <= ROW_PAGES


def test_the_samples_of_a_batch_are_asked_for_together_and_no_others_are_read(
    maps: EpochMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, asked = [3, 200, 77], []

    def ask(starts: IntArray, stops: IntArray) -> None:
        asked.append((stops - starts).tolist())
        ask_for_all(starts, stops)

    monkeypatch.setattr(readahead, "ask_for_all", ask)
    with EpochDataset(maps.snapshot, maps=maps) as dataset:
        batch = cs.collate(dataset.__getitems__(wanted))
    assert batch[:, 0].tolist() == batch[:, -1].tolist() == wanted
    assert asked == [[ROW_PAGES * mmap.PAGESIZE] * len(wanted)]
    # A row may begin in the midst of a page.
    assert len(wanted) * ROW_PAGES <= count_cached(pages_of(maps)) <= len(wanted) * (ROW_PAGES + 1)
