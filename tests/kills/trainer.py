"""A trainer: epoch after epoch over snapshots of a cache, each sample held against what its key says it must be.

What it finds wrong it writes into a file, one line each; it is killed at any point, so it cannot tell otherwise.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from cachestream import Cache
from cachestream.errors import NotEnoughSamplesError
from cachestream.storage.shard import MappedShard, shard_path
from tests.worker.sources import content

STEP_S = 0.05  # what a network would take
SLOW_S = 0.01


def check_shard(root: str, shard_id: int, count: int) -> list[str]:
    """Hold every sample of a shard against its key; returns the keys."""
    shard = MappedShard(shard_path(root, shard_id))
    keys, rows = shard.keys(), shard.array("x")
    assert len(keys) == len(rows) == count, (
        f"shard {shard_id}: {len(keys)} keys, {len(rows)} rows, {count} expected"
    )
    for key, row in zip(keys, rows, strict=True):
        assert row.tobytes() == content(key, len(row)).tobytes(), (
            f"shard {shard_id}: {key} holds something else"
        )
    del rows
    shard.close()
    return keys


def train_epoch(cache: Cache, step_s: float, turnover: float) -> int:
    """One epoch over what is cached, `step_s` for each shard; returns its samples."""
    cache.wait(1, timeout_s=300.0)
    snapshot, lease = cache.take_snapshot(turnover=turnover)
    try:
        keys: Counter[str] = Counter()
        for shard_id, count in zip(snapshot.shard_ids.tolist(), snapshot.counts.tolist(), strict=True):
            keys.update(check_shard(cache.path, shard_id, count))
            time.sleep(step_s)
        twice = [key for key, count in keys.items() if count > 1]
        assert not twice, f"twice in one snapshot: {twice[:5]}"
        return len(keys)
    finally:
        lease.release()


def train_with_loader(cache: Cache) -> None:
    """Epochs the way users run them, with torch."""
    from cachestream import EpochLoader  # torch takes seconds to load: only where it is wanted

    with EpochLoader(cache, batch_size=16, min_samples=16, drop_last=False) as loader:
        while True:
            seen: Counter[str] = Counter()
            for batch in loader:
                units, numbers = batch["unit"].tolist(), batch["number"].tolist()
                for unit, number, row in zip(units, numbers, batch["x"], strict=True):
                    key = f"{unit}/{number}"
                    assert row.numpy().tobytes() == content(key, len(row)).tobytes(), (
                        f"{key} holds something else"
                    )
                    seen[key] += 1
            twice = [key for key, count in seen.items() if count > 1]
            assert not twice, f"twice in one epoch: {twice[:5]}"
            time.sleep(STEP_S)


def main() -> None:
    root, errors, kind = sys.argv[1:]
    cache = Cache(root)
    try:
        if kind == "loader":
            train_with_loader(cache)
        while True:
            try:
                # The slow one holds for long all that there was: what it has not read yet must not go.
                train_epoch(cache, *((SLOW_S, 0.0) if kind == "slow" else (0.0, 0.25)))
                time.sleep(STEP_S)
            except NotEnoughSamplesError:
                continue  # nothing yet, or all of it was just evicted
    except BaseException:  # whatever it is, the test shall see it
        with open(errors, "a", encoding="utf-8") as file:
            file.write(f"trainer {os.getpid()}: {traceback.format_exc()}\n")
        raise


if __name__ == "__main__":
    Path(sys.argv[2]).touch()
    main()
