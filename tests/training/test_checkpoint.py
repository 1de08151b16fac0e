"""A checkpoint at any step: another loader goes on at the exact next sample."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestream import EpochLoader
from cachestream.schema import Schema, Snapshot
from cachestream.training.plan import OrderKind, OrderRecord, rebuild, translate
from tests.training.conftest import NewCache


def stream(loader: EpochLoader) -> Iterator[list[int]]:
    """The batches of one epoch, as numbers."""
    return (batch["number"].tolist() for batch in loader)


@pytest.mark.e2e
def test_a_loader_is_saved_and_loaded_by_a_distributed_checkpoint(
    new_cache: NewCache, tmp_path: Path
) -> None:
    """torch.distributed.checkpoint flattens states, and expects the keys that a new loader's state has."""
    from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
    from torch.distributed.checkpoint.stateful import Stateful

    cache, folder = new_cache(3, 8), str(tmp_path / "checkpoint")
    with EpochLoader(cache, 4, weights=True) as loader:
        assert isinstance(loader, Stateful)
        batches = stream(loader)
        next(batches)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no process group is there
            save_distributed({"loader": loader}, checkpoint_id=folder)
        rest = list(batches)
    with EpochLoader(cache, 4, weights=True) as loader:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_distributed({"loader": loader}, checkpoint_id=folder)
        assert list(stream(loader)) == rest


def snapshot_of(record: OrderRecord, gone: set[int]) -> Snapshot:
    keep = [i for i, shard_id in enumerate(record.shard_ids.tolist()) if shard_id not in gone]
    return Snapshot("id", "/", "/", Schema(()), record.shard_ids[keep], record.counts[keep])


@pytest.mark.e2e
@given(st.data())
def test_any_sequence_of_cuts_leaves_exactly_the_samples_not_drawn_and_not_gone(data: st.DataObject) -> None:
    """Against a model: lists of (shard, row), cut and filtered by hand."""
    counts = np.array(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)), np.int64)
    ids = np.array([3 * i + 1 for i in range(len(counts))], np.int64)
    total = int(counts.sum())
    kinds: list[OrderKind] = ["shuffled", "sequential"]
    kind = data.draw(st.sampled_from(kinds))
    record = OrderRecord(
        ids, counts, kind, data.draw(st.integers(1, total)), key=data.draw(st.integers(0, 2**64 - 1))
    )
    places = [(int(i), row) for i, count in zip(ids, counts, strict=True) for row in range(count)]
    order, _ = rebuild(record)
    model = [places[sample] for sample in order.at(np.arange(order.size)).tolist()]
    gone: set[int] = set()
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(model)))
        new = data.draw(st.sets(st.sampled_from(ids.tolist()), max_size=2)) - gone
        gone |= new
        record = record.cut(position, tuple(new))
        model = [place for place in model[position:] if place[0] not in gone]
        record = OrderRecord.from_state(json.loads(json.dumps(record.to_state())))
    snapshot = snapshot_of(record, gone)
    order = translate(rebuild(record)[0], record, snapshot)
    left = [
        (int(i), row) for i, n in zip(snapshot.shard_ids, snapshot.counts, strict=True) for row in range(n)
    ]
    assert [left[sample] for sample in order.at(np.arange(order.size)).tolist()] == model
