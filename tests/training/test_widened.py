"""A field of integers, read as floats from the epoch on that comes after the first float."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from cachestream import Cache, EpochLoader
from cachestream.training.batches import memory
from cachestream.training.batches.mapped_shards import EpochMaps
from tests.support.caches import add_shard
from tests.training.conftest import NewCache

INTEGERS = list(range(8))
FLOATS = [n + 0.5 for n in range(4)]


def add_scores(cache: Cache, scores: list[Any]) -> None:
    """Publish a shard of samples whose field `n` is twice their `score`."""
    add_shard(cache, [(f"k{score}", {"score": score, "n": int(2 * score)}) for score in scores])


@pytest.fixture
def cache(new_cache: NewCache) -> Cache:
    """A cache of two shards of four integers each."""
    cache = new_cache()
    add_scores(cache, INTEGERS[:4])
    add_scores(cache, INTEGERS[4:])
    return cache


def epoch(loader: EpochLoader) -> tuple[set[torch.dtype], list[float]]:
    """The dtypes of an epoch's scores, and the scores, sorted; each beside the sample's own `n`."""
    batches = list(loader)
    assert all(torch.equal(2 * batch["score"], batch["n"].to(batch["score"].dtype)) for batch in batches)
    assert {batch["n"].dtype for batch in batches} == {torch.int64}
    scores = [batch["score"] for batch in batches]
    return {each.dtype for each in scores}, sorted(torch.cat(scores).tolist())


def test_an_epoch_keeps_its_integers_and_the_next_one_has_floats_and_says_so(
    cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    with EpochLoader(cache, 2, prefetch=1) as loader:
        batches = iter(loader)
        first = next(batches)["score"]
        add_scores(cache, FLOATS)
        assert {batch["score"].dtype for batch in (*batches, {"score": first})} == {torch.int64}
        assert epoch(loader)[1] in (INTEGERS, sorted(INTEGERS + FLOATS))  # it may have been made before
        assert epoch(loader) == ({torch.float64}, sorted(INTEGERS + FLOATS))
        epoch(loader)
    assert caplog.text.count("the integers of 'score' are floats from the next epoch on") == 1
    assert str(cache.schema) == "{n: int64[], score: float64[]}"
    assert cache.verify().ok


@pytest.mark.parametrize("left", ["integers", "floats"])
def test_the_field_stays_one_of_floats_whichever_shards_are_evicted(cache: Cache, left: str) -> None:
    add_scores(cache, FLOATS)
    with EpochLoader(cache, 2) as loader:
        epoch(loader)
    with cache.catalogue.transaction() as tables:
        ids = sorted(tables.shard_ids())
        tables.doom(ids[2:] if left == "integers" else ids[:2])
    add_scores(cache, [100])
    with EpochLoader(cache, 1) as loader:
        assert epoch(loader) == ({torch.float64}, [*(INTEGERS if left == "integers" else FLOATS), 100.0])


def test_an_epoch_begun_before_is_resumed_and_replayed_with_equal_values(
    cache: Cache, tmp_path: Path
) -> None:
    with EpochLoader(cache, 2, record=tmp_path / "run") as loader:
        batches = iter(loader)
        trained = [next(batches)["score"].tolist()]
        state = loader.state_dict()
        trained += [batch["score"].tolist() for batch in batches]
    add_scores(cache, FLOATS)
    with EpochLoader(cache, 2) as loader:
        loader.load_state_dict(state)
        assert [batch["score"].tolist() for batch in loader] == trained[1:]
    with EpochLoader(cache, 2, replay=tmp_path / "run") as loader:
        assert [batch["score"].tolist() for batch in loader] == trained


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns where threads run
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_dataset_gives_floats_here_and_in_the_workers_of_a_dataloader(cache: Cache, start: str) -> None:
    add_scores(cache, FLOATS)
    with cache.snapshot() as dataset:
        assert [dataset[i]["score"].item() for i in range(len(dataset))] == INTEGERS + FLOATS
        loader = DataLoader(dataset, 5, num_workers=2, multiprocessing_context=start, timeout=180)
        scores = torch.cat([batch["score"] for batch in loader])
        assert scores.dtype == torch.float64
        assert scores.tolist() == INTEGERS + FLOATS


def test_maps_that_are_handed_on_or_dropped_keep_the_floats(cache: Cache) -> None:
    add_scores(cache, FLOATS)
    with cache.snapshot() as dataset:
        first = EpochMaps(dataset.snapshot)
        assert not first.open(torch.arange(3).numpy())
        address = first.fields["score"].base[0]
        second = EpochMaps(dataset.snapshot, first)
        assert second.all_mapped
        assert second.fields["score"].base[0] == address
        assert second.fields["score"].base[0] != second.fields["n"].base[0]


def test_readers_without_the_module_in_c_convert_the_same(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "in_c", None)
    add_scores(cache, FLOATS)
    with EpochLoader(cache, 3, drop_last=False) as loader:
        assert epoch(loader) == ({torch.float64}, sorted(INTEGERS + FLOATS))
