"""`Cache.snapshot` and `EpochDataset`: a frozen map-style dataset for torch's own tools, whose options select samples."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, default_collate

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, NUM_VARIOUS, shown, various

EVERY: Final = list(range(NUM_SAMPLES))


def numbers(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["number"].tolist()]


# --- options of snapshot


def test_an_epoch_size_takes_the_least_used_shards_that_cover_it(cache: cs.Cache) -> None:
    with cache.snapshot(epoch_size=100) as one:
        first = set(one[:]["number"].tolist())
    with cache.snapshot(epoch_size=100) as other:
        second = set(other[:]["number"].tolist())
    assert 100 <= len(first) < 116
    assert 100 <= len(second) < 116
    assert not first & second
    with cache.snapshot(epoch_size=1000) as whole:
        assert len(whole) == NUM_SAMPLES


def test_where_and_columns_select_samples_and_fields(kinds: cs.Cache) -> None:
    def long_and_even(columns: cs.ShardColumns) -> Any:
        named = np.array([text.startswith("no. ") for text in columns["text"]])
        return (columns.lengths("tokens") >= 5) & (columns["number"] % 2 == 0) & named

    with kinds.snapshot(where=long_and_even, columns=["text", "number"]) as dataset:
        expected = [n for n in range(NUM_VARIOUS) if n % 7 >= 4 and n % 2 == 0]
        assert sorted(dataset[:]["number"].tolist()) == expected
        assert list(dataset[0]) == ["text", "number"]
        assert dataset.lengths("tokens").min() >= 5, "also of fields that are not delivered"


def test_splits_are_disjoint_and_complete(cache: cs.Cache) -> None:
    with cache.snapshot(split="train", holdout=0.2) as train, cache.snapshot(split="held-out") as held_out:
        drawn = [dataset[:]["number"].tolist() for dataset in (train, held_out)]
    assert sorted(drawn[0] + drawn[1]) == EVERY
    assert 30 < len(drawn[1]) < 90


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epoch_size": 0}, "epoch_size=0"),
        ({"turnover": 2}, "turnover=2"),
        ({"split": "test"}, "split='test'"),
        ({"where": "x > 1"}, "give a function of a shard's columns"),
        ({"where": lambda columns: columns["y"] > 1}, "no field 'y'"),
        ({"columns": ["y"]}, "columns= names 'y'"),
    ],
    ids=shown,
)
def test_what_cannot_be_selected_is_refused(options: dict[str, Any], words: str, kinds: cs.Cache) -> None:
    with pytest.raises(cs.ConfigError, match=words):
        kinds.snapshot(**options)
    assert kinds.status().leases == 0


def test_a_snapshot_of_nothing_is_an_error(tmp_path: Path, kinds: cs.Cache) -> None:
    with cs.Cache(tmp_path / "c", "4MB", min_free=0) as cache, pytest.raises(cs.NotEnoughSamplesError):
        cache.snapshot()
    with pytest.raises(cs.NotEnoughSamplesError, match=f"selects 0 of the {NUM_VARIOUS} samples"):
        kinds.snapshot(where=lambda columns: columns["number"] < 0)


# --- samples


def test_a_sample_is_what_was_stored(kinds: cs.Cache) -> None:
    with kinds.snapshot() as dataset:
        for index in range(len(dataset)):
            sample = dataset[index]
            expected = various(int(sample["number"]))
            assert set(sample) == set(expected)
            for name, value in expected.items():
                if isinstance(value, str | bytes):
                    assert sample[name] == value
                else:
                    assert np.array_equal(sample[name].numpy(), np.asarray(value)), name
        keys = dataset.keys()
        assert keys == [str(n) for n in dataset[:]["number"].tolist()]
        assert dataset.keys([5, -1]) == [keys[5], keys[-1]]
        assert repr(dataset) == f"<EpochDataset {NUM_VARIOUS} samples in {kinds.num_shards} shards>"


@pytest.mark.parametrize(
    "index",
    [
        *(slice(2, 80, 7), slice(-3, None), slice(None), slice(5, 5)),
        *([9, 0, 0], range(4), (5, -1), np.array([3], np.uint8), torch.tensor([7, 2]), []),
    ],
    ids=shown,
)
def test_a_slice_or_a_sequence_of_indices_is_a_batch(index: Any, kinds: cs.Cache) -> None:
    with kinds.snapshot() as dataset:
        order = [int(dataset[i]["number"]) for i in range(NUM_VARIOUS)]
        expected = order[index] if isinstance(index, slice) else [order[int(i)] for i in index]
        batch = dataset[index]
        assert batch["number"].tolist() == expected
        assert batch["x"].shape == (len(expected), 4)
        assert [tokens.tolist() for tokens in batch["tokens"]] == [[n] * (1 + n % 7) for n in expected]
        assert batch["text"] == [f"no. {n}" for n in expected]


@pytest.mark.parametrize("index", [NUM_VARIOUS, -NUM_VARIOUS - 1, 2**64 - 1, [0, NUM_VARIOUS]], ids=shown)
def test_an_index_past_either_end_is_an_index_error(index: Any, kinds: cs.Cache) -> None:
    with kinds.snapshot() as dataset:
        assert torch.equal(dataset[-1]["x"], dataset[np.int64(NUM_VARIOUS - 1)]["x"])
        assert torch.equal(dataset[-NUM_VARIOUS]["x"], dataset[0]["x"])
        with pytest.raises(IndexError, match=f"{NUM_VARIOUS} samples"):
            dataset[index]


@pytest.mark.parametrize(
    "index", [1.0, [1.5], [True, False], "x", [[1, 2], [3, 4]], [[1, 2], [3]], None], ids=shown
)
def test_what_is_no_index_is_a_type_error(index: Any, kinds: cs.Cache) -> None:
    with kinds.snapshot() as dataset, pytest.raises(TypeError, match="integer"):
        dataset[index]


def test_lengths_are_the_first_dimensions_of_what_varies(kinds: cs.Cache) -> None:
    with kinds.snapshot() as dataset:
        order = dataset[:]["number"].tolist()
        assert dataset.lengths("tokens").tolist() == [1 + n % 7 for n in order]
        assert dataset.lengths("text").tolist() == [len(f"no. {n}") for n in order]
        assert dataset.lengths("data").tolist() == [n % 3 for n in order]
        for name in ("number", "y"):
            with pytest.raises(cs.ConfigError, match=f"'{name}'"):
                dataset.lengths(name)


def test_threads_may_share_a_dataset(cache: cs.Cache) -> None:
    wrong: list[str] = []
    with cache.snapshot() as dataset:
        order = dataset[:]["number"]

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(40):
                indices = rng.integers(0, NUM_SAMPLES, 20)
                batch = dataset[indices]
                if not torch.equal(batch["number"], order[indices]) or not torch.equal(
                    batch["x"][:, -1], batch["number"].float()
                ):
                    wrong.append(f"{indices}")

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not wrong


def test_a_closed_dataset_says_so_and_its_samples_stay(cache: cs.Cache) -> None:
    dataset = cache.snapshot()
    sample, batch = dataset[3], dataset[:10]
    dataset.close()
    dataset.close()
    cache.clear()
    assert torch.equal(sample["x"], sample["number"].float().expand(1024))
    assert torch.equal(batch["x"][:, 0], batch["number"].float())
    for use in (lambda: dataset[0], lambda: dataset[:2], dataset.keys, lambda: dataset.lengths("x")):
        with pytest.raises(cs.EpochError, match="closed"):
            use()
    assert repr(dataset).startswith("<EpochDataset closed, ")


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_shard_is_named(damage: str, cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:
        victim = min((Path(cache.path) / "shards").rglob("*.safetensors"))
        if damage == "missing":
            victim.unlink()
        else:
            with victim.open("r+b") as file:
                file.seek(-5, os.SEEK_END)
                file.write(b"\x55")
        with pytest.raises(cs.CorruptShardError) as caught:
            dataset[:]
        assert str(victim) in str(caught.value)


# --- torch's tools


@pytest.mark.parametrize("collate", [cs.collate, default_collate, None], ids=["ours", "torch", "none"])
def test_a_data_loader_gives_each_sample_once_whatever_collates(collate: Any, cache: cs.Cache) -> None:
    with cache.snapshot(columns=["x", "number"]) as dataset:
        batches = list(DataLoader(dataset, 32, shuffle=True, collate_fn=collate))
    assert [len(batch["x"]) for batch in batches] == [32] * 9 + [12]
    assert sorted(numbers(batches)) == EVERY
    assert all(torch.equal(batch["x"][:, 9], batch["number"].float()) for batch in batches)


def test_samplers_of_torch_share_and_batch_it(cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:
        shares = [
            numbers(DataLoader(dataset, 7, sampler=DistributedSampler(dataset, 2, rank))) for rank in (0, 1)
        ]
        assert sorted(shares[0] + shares[1]) == EVERY
        sampler: Any = BatchSampler(RandomSampler(dataset), 40, drop_last=False)
        for loader in (
            DataLoader(dataset, batch_sampler=sampler),
            DataLoader(dataset, batch_size=None, sampler=sampler),
        ):
            batches = list(loader)
            assert [len(batch["x"]) for batch in batches] == [40] * 7 + [20]
            assert sorted(numbers(batches)) == EVERY


def test_collate_gives_the_loaders_layout_and_lists_for_what_varies(kinds: cs.Cache) -> None:
    with (
        kinds.snapshot() as dataset,
        cs.EpochLoader(kinds, 12, shuffle=False) as loader,
    ):
        for one, other in zip(DataLoader(dataset, 12, collate_fn=cs.collate), loader, strict=True):
            assert list(one) == list(other)
            for name, value in one.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(value, other[name])
                else:
                    assert str(value) == str(other[name])
        short, long = (int(np.flatnonzero(dataset.lengths("tokens") == n)[0]) for n in (2, 7))
        plain = [dict(dataset[i]) for i in (short, long)]
        assert str(cs.collate(plain)) == str(dataset[[short, long]])


def test_samples_that_a_dataset_of_ones_own_has_changed_are_collated_as_changed(cache: cs.Cache) -> None:
    with cache.snapshot() as dataset:

        def collate(samples: Any) -> Any:
            for sample in samples:
                sample["x"] = sample["x"][:2] + 1
            return cs.collate(samples)

        for batch in DataLoader(dataset, 30, collate_fn=collate):
            assert torch.equal(batch["x"], batch["number"][:, None].float().expand(-1, 2) + 1)


def test_tuples_and_bare_values_come_as_they_are(tmp_path: Path) -> None:
    sources: dict[str, list[Any]] = {
        "tuple": [(np.full(3, n, np.float32), f"no. {n}") for n in range(12)],
        "bare": [np.full(3, n, np.float32) for n in range(12)],
    }
    for name, source in sources.items():
        with (
            cs.Cache(tmp_path / name, "4MB", min_free=0) as cache,
            cs.start_worker(cache, source, num_workers=1) as worker,
        ):
            worker.wait(timeout_s=120)
            with cache.snapshot() as dataset, cs.EpochLoader(cache, 12, shuffle=False) as loader:
                for batch in (dataset[:], next(iter(loader)), next(iter(DataLoader(dataset, 12)))):
                    values = batch if name == "bare" else batch[0]
                    order = [int(row[0]) for row in values]
                    assert sorted(order) == list(range(12))
                    assert torch.equal(values, torch.tensor(order)[:, None].float().expand(-1, 3))
                    if name == "tuple":
                        assert len(batch) == 2
                        assert list(batch[1]) == [f"no. {n}" for n in order]
                assert isinstance(dataset[0], tuple if name == "tuple" else torch.Tensor)
