"""The epoch's dataset in the ordinary torch tools, and with damaged, missing and evicted files."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import cachestream as cs
from cachestream import CorruptShardError, EpochDataset, EpochError
from cachestream.storage.shard import MappedShard, shard_path
from tests.support.caches import add_shard, numbered
from tests.training.conftest import NewCache


def check_batches(loader: DataLoader[Any], expected: list[int]) -> None:
    seen = []
    for batch in loader:
        assert isinstance(batch["x"], torch.Tensor)
        assert torch.equal(batch["x"], batch["number"].to(torch.float32)[:, None].expand(-1, 5))
        seen += batch["number"].tolist()
    assert sorted(seen) == sorted(expected)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns where threads run
@pytest.mark.parametrize(("workers", "start"), [(0, None), (1, "fork"), (2, "fork"), (1, "spawn")])
def test_a_dataloader_delivers_every_sample_once_with_any_workers_collate_and_sampler(
    workers: int, start: str | None, new_cache: NewCache
) -> None:
    with new_cache(3, 10).snapshot() as dataset:
        dataset[0]  # maps and locks exist before a fork
        for collate in (cs.collate, default_collate):
            check_batches(
                DataLoader(
                    dataset,
                    batch_size=7,
                    sampler=RandomSampler(dataset),
                    num_workers=workers,
                    multiprocessing_context=start,
                    collate_fn=collate,
                    timeout=180 if workers else 0,
                ),
                list(range(30)),
            )
            if start == "spawn":
                return  # one start of spawned workers is slow enough
        halves = [
            [
                number
                for batch in DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, rank))
                for number in batch["number"].tolist()
            ]
            for rank in range(2)
        ]
        assert sorted(halves[0] + halves[1]) == list(range(30))


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler,
        lambda _: SubsetRandomSampler([3, 1, 4]),
        lambda _: WeightedRandomSampler([0.0] * 9 + [1.0], 5),
    ],
)
def test_other_samplers_work_too(sampler: Any, new_cache: NewCache) -> None:
    with new_cache(2, 5).snapshot() as dataset:
        made = sampler(dataset)
        numbers = [n for batch in DataLoader(dataset, 2, sampler=made) for n in batch["number"].tolist()]
        assert len(numbers) == len(made)
        batches = list(DataLoader(dataset, batch_sampler=BatchSampler(made, 2, drop_last=True)))
        assert len(batches) == len(made) // 2


def test_indices_count_from_both_ends_and_no_further(new_cache: NewCache) -> None:
    with new_cache(2, 5).snapshot() as dataset:
        assert len(dataset) == 10
        assert [int(dataset[i]["number"]) for i in (0, 9, -1, -10)] == [0, 9, 9, 0]
        assert int(dataset[np.int64(3)]["number"]) == 3
        huge: list[Any] = [2**64 - 1, [np.uint64(2**64 - 1)], np.array([0, 2**64 - 10], np.uint64)]
        for outside in (10, -11, *huge):
            with pytest.raises(IndexError, match="10 samples"):
                dataset[outside]
        with pytest.raises(IndexError, match="10 samples"):
            dataset.__getitems__([0, 10])
        assert len(dataset.__getitems__([])) == 0


@pytest.mark.parametrize(
    "index",
    [
        slice(2, 8, 3),
        slice(-3, None),
        [9, 0, 0],
        range(4),
        (5, -1),
        np.array([3], np.uint8),
        torch.tensor([7, 2]),
        [],
    ],
    ids=repr,
)
def test_a_slice_or_a_sequence_of_indices_is_a_batch(new_cache: NewCache, index: Any) -> None:
    with new_cache(2, 5).snapshot() as dataset:
        batch = dataset[index]
        expected = list(range(10))[index] if isinstance(index, slice) else [int(i) % 10 for i in index]
        assert batch["number"].tolist() == expected
        assert batch["x"].shape == (len(expected), 5)
        assert [s["number"] for s in dataset.__getitems__(expected)] == expected


def test_the_samplers_of_torch_that_give_batches_work_without_a_collate_function(new_cache: NewCache) -> None:
    with new_cache(2, 5).snapshot() as dataset:
        sampler = BatchSampler(RandomSampler(dataset), 4, drop_last=False)
        batches = list(DataLoader(dataset, batch_size=None, sampler=sampler))
    assert [len(batch["x"]) for batch in batches] == [4, 4, 2]
    assert sorted(n for batch in batches for n in batch["number"].tolist()) == list(range(10))


@pytest.mark.parametrize(
    "index",
    [1.0, [1.5], [True, False], np.ones(10, np.bool_), "x", ["x"], [[1, 2], [3, 4]], [[1, 2], [3]], None],
)
def test_what_is_no_index_is_told_so(new_cache: NewCache, index: Any) -> None:
    with new_cache(2, 5).snapshot() as dataset, pytest.raises(TypeError, match="integer"):
        dataset[index]


def test_samples_own_their_memory(new_cache: NewCache) -> None:
    with new_cache(1, 4).snapshot() as dataset:
        first = dataset[1]
        first["x"].zero_()
        assert dataset[1]["x"].tolist() == [1.0] * 5
        batch = cs.collate(dataset.__getitems__([1, 2]))
        batch["x"].zero_()
        assert cs.collate(dataset.__getitems__([1, 2]))["x"][0].tolist() == [1.0] * 5


def test_a_snapshot_does_not_see_what_comes_later(new_cache: NewCache) -> None:
    cache = new_cache(1, 4)
    with cache.snapshot() as dataset:
        add_shard(cache, numbered(4, 4))
        assert len(dataset) == 4
        assert sorted(dataset.keys()) == ["k0", "k1", "k2", "k3"]


def test_its_shards_stay_while_it_is_open_and_are_evicted_after(new_cache: NewCache) -> None:
    cache = new_cache(3, 4)
    with cache.snapshot() as dataset:
        cache.evict(0)
        assert cache.num_shards == 3
        assert int(dataset[11]["number"]) == 11
        sample = dataset[5]
    cache.evict(0)
    assert cache.num_shards == 0
    assert sample["x"].tolist() == [5.0] * 5
    with pytest.raises(EpochError, match="closed"):
        dataset[0]
    with pytest.raises(EpochError, match="closed"):
        pickle.dumps(dataset)


def test_a_pickled_copy_holds_the_lease_itself(new_cache: NewCache) -> None:
    cache = new_cache(2, 3)
    dataset = cache.snapshot()
    copy: EpochDataset = pickle.loads(pickle.dumps(dataset))
    dataset.close()
    cache.evict(0)
    assert [int(copy[i]["number"]) for i in range(6)] == list(range(6))
    copy.close()
    cache.evict(0)
    assert cache.num_shards == 0


def test_a_copy_that_comes_too_late_is_refused(new_cache: NewCache) -> None:
    cache = new_cache(1, 3)
    dataset = cache.snapshot()
    pickled = pickle.dumps(dataset)
    dataset.close()
    cache.evict(0)
    with pytest.raises(EpochError, match="take a new snapshot"):
        pickle.loads(pickled)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns where threads run
def test_a_forked_child_reads_on_after_the_parent_has_closed(new_cache: NewCache) -> None:
    cache = new_cache(2, 3)
    dataset = cache.snapshot()
    dataset[0]
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = int(dataset[1]["number"]) == 1
            os.write(from_child, b"r")
            os.read(to_child, 1)
            ok = ok and [int(n) for n in cs.collate(dataset.__getitems__([5, 0]))["number"]] == [5, 0]
        finally:
            os._exit(0 if ok else 1)
    assert os.read(to_parent, 1) == b"r"
    dataset.close()
    cache.evict(0)
    assert cache.num_shards == 2
    os.write(from_parent, b"g")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for fd in (to_child, from_parent, to_parent, from_child):
        os.close(fd)
    cache.evict(0)
    assert cache.num_shards == 0


def test_threads_may_share_a_dataset(new_cache: NewCache) -> None:
    failures: list[str] = []
    with new_cache(5, 8).snapshot() as dataset:

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(100):
                wanted = rng.integers(0, 40, 6)
                got = cs.collate(dataset.__getitems__(wanted))["number"]
                if got.tolist() != wanted.tolist():
                    failures.append(f"{got} instead of {wanted}")

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures


def test_a_missing_shard_is_named(new_cache: NewCache) -> None:
    cache = new_cache(2, 3)
    with cache.snapshot() as dataset:
        path = shard_path(cache.path, int(dataset.snapshot.shard_ids[1]))
        os.unlink(path)
        assert int(dataset[0]["number"]) == 0
        with pytest.raises(CorruptShardError, match="missing") as caught:
            dataset[4]
        assert path in str(caught.value)


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
