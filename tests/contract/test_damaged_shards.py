"""A shard that is damaged while a worker and a trainer are at work: its samples are left out, and fetched again."""

from __future__ import annotations

import time
from pathlib import Path

import torch

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, numbered


def test_what_training_finds_damaged_is_left_out_and_fetched_again_by_the_worker_that_rests(
    cache: cs.Cache,
) -> None:
    shard = min((Path(cache.path) / "shards").glob("*.safetensors"))
    with cs.start_worker(cache, numbered(NUM_SAMPLES), num_workers=1) as worker:
        worker.wait(timeout_s=120)
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1  # of a key, or of a sample: each column has its checksum
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
        with cs.EpochLoader(cache, 10, drop_last=False) as loader:
            batches = list(loader)
        numbers = [n for batch in batches for n in batch["number"].tolist()]
        assert 0 < len(numbers) == len(set(numbers))
        for batch in batches:
            assert torch.equal(batch["x"], batch["number"][:, None].expand(-1, 1024).float())
        assert cache.status().quarantined == 1
        deadline_s = time.monotonic() + 60
        while cache.num_samples < NUM_SAMPLES:
            assert time.monotonic() < deadline_s, cache.status()
        with cache.snapshot() as dataset:
            assert sorted(dataset[:]["number"].tolist()) == list(range(NUM_SAMPLES))
