"""The epoch's dataset in the ordinary torch tools, and with damaged, missing and evicted files."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from cachestream import CorruptShardError, EpochDataset, EpochError
from cachestream.storage.shard import MappedShard, shard_path
from tests.support.caches import add_shard, numbered
from tests.training.conftest import NewCache


def test_a_copy_that_comes_too_late_is_refused(new_cache: NewCache) -> None:
    cache = new_cache(1, 3)
    dataset = cache.snapshot()
    pickled = pickle.dumps(dataset)
    dataset.close()
    cache.evict(0)
    with pytest.raises(EpochError, match="take a new snapshot"):
        pickle.loads(pickled)


@pytest.mark.e2e
def test_no_flipped_bit_of_a_shard_is_ever_delivered(new_cache: NewCache) -> None:
    """One bit in each byte of the file: an error, or, in the padding of the header, the true sample."""
    cache = new_cache(1, 2)
    snapshot, lease = cache.take_snapshot()
    path = Path(shard_path(cache.path, int(snapshot.shard_ids[0])))
    sound = path.read_bytes()
    delivered = 0
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        try:
            sample = EpochDataset(snapshot)[1]
        except CorruptShardError:
            continue
        delivered += 1
        assert sample["x"].tolist() == [1.0] * 5
    assert delivered == 0
    path.write_bytes(sound)
    assert EpochDataset(snapshot)[1]["x"].tolist() == [1.0] * 5
    lease.release()


def test_a_shard_of_other_samples_than_the_snapshot_says_is_refused(new_cache: NewCache) -> None:
    cache = new_cache(2, 3)
    add_shard(cache, numbered(6, 4))
    with cache.snapshot() as dataset:
        paths = [shard_path(cache.path, int(i)) for i in dataset.snapshot.shard_ids]
        assert MappedShard(paths[2]).num_samples == 4
        os.replace(paths[2], paths[0])
        with pytest.raises(CorruptShardError, match="holds 4 samples"):
            dataset[0]
