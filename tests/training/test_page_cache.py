"""Where pages are missing, what a batch needs is read, together, and nothing that lies around it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time

import numpy as np
import pytest
import torch

import cachestream as cs
from cachestream import EpochDataset
from cachestream.linux import ask_for_all, count_cached
from cachestream.schema import IntArray
from cachestream.storage.shard import shard_path
from cachestream.training.batches import readahead
from cachestream.training.batches.mapped_shards import EpochMaps
from tests.support.caches import add_shard
from tests.training.conftest import NewCache

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
