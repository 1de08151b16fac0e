"""P5: eviction never hurts a reader. Live epochs lease their shards; the kernel drops the lease of a dead process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, SHARD_SIZE, numbered

HOLDER = """
import sys, cachestream as cs
dataset = cs.Cache(sys.argv[1]).snapshot()
print(len(dataset), flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that holds a snapshot of the cache at `path` until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == str(NUM_SAMPLES)
    return process


def test_no_shard_of_a_snapshot_is_evicted_while_it_is_open_and_all_are_when_it_is_closed(
    cache: cs.Cache,
) -> None:
    with cache.snapshot() as dataset:
        assert cache.evict(to=0) == 0
        assert cache.status().leases == 1
        assert torch.equal(dataset[:]["number"].sort().values, torch.arange(NUM_SAMPLES))
    assert cache.evict(to=0) > 0
    assert cache.num_samples == 0


def test_a_lease_in_another_process_holds_until_that_process_is_killed(cache: cs.Cache) -> None:
    process = hold(Path(cache.path))
    try:
        assert cache.evict(to=0) == 0
        assert cache.num_samples == NUM_SAMPLES
    finally:
        process.kill()
        process.communicate()
    assert cache.evict(to=0) > 0
    assert (cache.num_samples, cache.status().leases) == (0, 0)


def test_a_copy_of_a_dataset_holds_its_shards_when_the_first_is_closed(cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:
        sent = pickle.dumps(dataset)  # as for a DataLoader's workers
        copy = pickle.loads(sent)
    assert cache.evict(to=0) == 0
    assert sorted(copy[:]["number"].tolist()) == list(range(NUM_SAMPLES))
    copy.close()
    assert cache.evict(to=0) > 0
    with pytest.raises(cs.EpochError, match="new snapshot"):
        pickle.loads(sent)


def test_a_lower_limit_leaves_what_is_leased_and_takes_it_afterwards(cache: cs.Cache) -> None:
    with cache.snapshot():
        cache.size_limit = 1_000_000
        cache.evict(to=1_000_000)
        assert cache.num_samples == NUM_SAMPLES
    cache.evict(to=1_000_000)
    assert 0 < cache.size_bytes <= 1_000_000


def test_a_repair_takes_what_a_lower_limit_had_to_leave(cache: cs.Cache) -> None:
    with cache.snapshot():
        cache.size_limit = 1_000_000
    assert cache.num_samples == NUM_SAMPLES
    assert cache.verify(repair=True).ok
    assert 0 < cache.num_samples < NUM_SAMPLES
    assert cache.size_bytes <= 1_000_000


def test_batches_that_were_delivered_stay_valid_after_everything_is_gone(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 30) as loader:
        batches = list(loader)
    cache.clear()
    numbers = [n for batch in batches for n in batch["number"].tolist()]
    assert sorted(numbers) == list(range(NUM_SAMPLES))
    for batch in batches:
        assert torch.equal(batch["x"], batch["number"][:, None].expand(-1, 1024).float())


def test_a_full_cache_goes_on_filling_beside_a_reader_that_holds_half_of_it(cache: cs.Cache) -> None:
    with cache.snapshot(epoch_size=NUM_SAMPLES // 2) as half:
        cache.evict(to=0)
        assert NUM_SAMPLES // 2 <= len(half) == cache.num_samples < NUM_SAMPLES
        with cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1, shard_size=SHARD_SIZE) as worker:
            worker.wait(timeout_s=120)
        assert cache.num_samples == NUM_SAMPLES


def test_an_epoch_of_many_short_passes_leases_few_of_them_at_a_time(cache: cs.Cache) -> None:
    """Otherwise nothing of a full cache could be replaced while it is trained on."""
    with cs.EpochLoader(cache, batch_size=NUM_SAMPLES // 3, epoch_size=30 * NUM_SAMPLES) as loader:
        assert max(cache.status().leases for _ in loader) <= 5
