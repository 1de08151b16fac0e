"""P9: resume exactly. A state is plain values that any checkpoint can hold; the rest of an epoch is exact in another loader,
and what was lost meanwhile is told; a recorded epoch can be replayed; states and manifests of something else are refused.

`test_loader_machine.py` resumes every kind of draw at any step, with other ranks and batch sizes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed
from torch.distributed.checkpoint.stateful import Stateful

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, shown
from tests.contract.loader_acts import PATIENCE_S, Ranks

BATCH: Final = 10


def numbers(loader: Any) -> list[int]:
    return [n for batch in loader for n in batch["number"].tolist()]


def begun(cache: cs.Cache, steps: int, **options: Any) -> tuple[list[int], dict[str, Any], list[int]]:
    """The samples of the first `steps` batches of an epoch, the state after them, and the rest of the epoch."""
    with cs.EpochLoader(cache, BATCH, **options) as loader:
        batches = iter(loader)
        head = numbers(next(batches) for _ in range(steps))
        return head, loader.state_dict(), numbers(batches)


def rest(cache: cs.Cache, state: dict[str, Any], batch_size: int = BATCH, **options: Any) -> list[int]:
    """The samples of the epoch that a new loader goes on with."""
    with cs.EpochLoader(cache, batch_size, **options) as loader:
        loader.load_state_dict(state)
        return numbers(loader)


# --- the state


@pytest.mark.parametrize(
    "options", [{}, {"weights": True}, {"sampler": lambda data: range(len(data))}], ids=shown
)
def test_a_state_is_plain_values_that_json_and_torch_hold(cache: cs.Cache, options: dict[str, Any]) -> None:
    with cs.EpochLoader(cache, BATCH, **options) as loader:
        assert isinstance(loader, Stateful)
        batches = iter(loader)
        for _ in range(4):
            state = loader.state_dict()
            assert json.loads(json.dumps(state)) == state
            file = io.BytesIO()
            torch.save({"loader": state}, file)
            file.seek(0)
            assert torch.load(file, weights_only=True) == {"loader": state}
            next(batches)
        state = loader.state_dict()
        tail = numbers(batches)
    assert rest(cache, json.loads(json.dumps(state)), **options) == tail


def test_a_state_counts_the_batches_that_were_given_and_not_those_gathered_ahead(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, BATCH, prefetch=8) as loader:
        states = [loader.state_dict()]
        for step, _ in enumerate(loader, 1):
            states.append(loader.state_dict())
            assert loader.batches_done == step
    assert len({json.dumps(state) for state in states}) == 31
    with cs.EpochLoader(cache, BATCH) as loader:
        loader.load_state_dict(states[7])
        assert loader.state_dict() == states[7]
        assert (loader.epoch, len(loader)) == (0, 30)
        batches = iter(loader)
        assert loader.state_dict() == states[7]
        next(batches)
        assert loader.batches_done == 8
        assert rest(cache, loader.state_dict()) == rest(cache, states[8])
        loader.load_state_dict(states[30])
        assert (loader.epoch, loader.batches_done) == (1, 0)


def test_the_state_of_a_closed_loader_is_that_of_its_last_batch(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, BATCH) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    assert loader.state_dict() == state


def test_loading_a_state_ends_a_running_iteration_and_setting_its_epoch_keeps_the_place(
    cache: cs.Cache,
) -> None:
    _, state, tail = begun(cache, 3)
    with cs.EpochLoader(cache, BATCH) as loader:
        running = iter(loader)
        next(running)
        loader.load_state_dict(state)
        with pytest.raises(cs.EpochError):
            next(running)
        loader.set_epoch(0)
        assert numbers(loader) == tail
        assert len(numbers(loader)) == NUM_SAMPLES
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert len(numbers(loader)) == NUM_SAMPLES


# --- what has changed meanwhile


def test_what_was_evicted_is_left_out_and_counted_in_a_warning(cache: cs.Cache) -> None:
    _, state, tail = begun(cache, 4)
    cache.evict(to=cache.size_bytes * 2 // 3)
    with cache.snapshot() as dataset:
        left = set(numbers([dataset[:]]))
    expected = [n for n in tail if n in left]
    assert 0 < len(expected) < len(tail)
    words = rf"^{len(tail) - len(expected)} samples of epoch 0 are not cached any more"
    with pytest.warns(UserWarning, match=words):
        assert rest(cache, state, drop_last=False) == expected


def test_the_state_of_another_cache_begins_the_epoch_anew_and_says_so(
    cache: cs.Cache, kinds: cs.Cache
) -> None:
    with cs.EpochLoader(kinds, 4) as loader:
        loader.set_epoch(3)
        next(iter(loader))
        state = loader.state_dict()
    with cs.EpochLoader(cache, BATCH) as loader:
        loader.load_state_dict(state)
        assert loader.epoch == 3
        with pytest.warns(UserWarning, match=r"samples of epoch 3 are not cached"):
            drawn = numbers(loader)
    assert len(set(drawn)) == len(drawn) > 0


def is_even(columns: cs.ShardColumns) -> Any:
    return columns["number"] % 2 == 0


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"where": is_even}, {}, "where"),
        ({}, {"where": is_even}, "where"),
        ({"split": "train", "holdout": 0.2}, {}, "split"),
        ({"split": "train", "holdout": 0.2}, {"split": "held-out"}, "split"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*holds out")
def test_a_state_of_other_samples_is_refused(
    before: dict[str, Any], after: dict[str, Any], words: str, cache: cs.Cache
) -> None:
    _, state, tail = begun(cache, 2, **before)
    with pytest.raises(cs.CacheStreamError, match=words):
        rest(cache, state, **after)
    assert rest(cache, state, **before) == tail


def test_what_is_no_state_is_refused_and_changes_nothing(cache: cs.Cache) -> None:
    head, state, tail = begun(cache, 1)
    wrong: list[dict[str, Any]] = [{}, {"epoch": 3}]
    wrong += [{key: value for key, value in state.items() if key != name} for name in state]
    wrong += [state | {name: value} for name in state for value in ("x", -1)]
    with cs.EpochLoader(cache, BATCH) as loader:
        for one in wrong:
            with pytest.raises(cs.ConfigError, match="state"):
                loader.load_state_dict(one)
        assert numbers(loader) == head + tail


def test_weights_go_with_the_state(cache: cs.Cache) -> None:
    favoured = [str(n) for n in range(NUM_SAMPLES)]
    with cs.EpochLoader(cache, BATCH, weights=True) as loader:
        loader.update_weights(favoured, [1.0 if n < 100 else 0.0 for n in range(NUM_SAMPLES)])
        assert loader.dataset is not None
        state = loader.state_dict()
    with cs.EpochLoader(cache, BATCH, weights=True) as loader:
        loader.load_state_dict(state)
        drawn = numbers(loader)
    assert sorted(drawn) == sorted(3 * list(range(100)))


# --- replay


def record(cache: cs.Cache, folder: Path, epochs: int = 2, **options: Any) -> list[list[list[int]]]:
    """[epoch][batch] of epochs recorded in `folder`."""
    with cs.EpochLoader(cache, BATCH, record=folder, **options) as loader:
        return [[batch["number"].tolist() for batch in loader] for _ in range(epochs)]


@pytest.mark.parametrize(
    "options", [{}, {"epoch_size": 75, "drop_last": False}, {"where": is_even}], ids=shown
)
def test_recorded_epochs_come_again_batch_by_batch(
    options: dict[str, Any], cache: cs.Cache, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    trained = record(cache, folder, **options)
    assert sorted(path.name for path in folder.iterdir()) == ["epoch-000000.json", "epoch-000001.json"]
    where = {"where": options["where"]} if "where" in options else {}
    with cs.EpochLoader(cache, BATCH, seed=99, replay=folder, **where) as loader:
        assert len(loader) == len(trained[0])
        assert [[batch["number"].tolist() for batch in loader] for _ in range(2)] == trained
        with pytest.raises(cs.EpochError, match=r"epoch 2 is not recorded in .* the epochs 0 to 1"):
            next(iter(loader))


def test_a_manifest_of_one_epoch_gives_its_samples_in_order_to_other_batches_and_after_a_resume(
    cache: cs.Cache, tmp_path: Path
) -> None:
    _, second = record(cache, tmp_path / "run")
    manifest = tmp_path / "run" / "epoch-000001.json"
    with cs.EpochLoader(cache, 7, replay=manifest) as loader:
        assert loader.epoch == 1
        batches = iter(loader)
        drawn, state = next(batches)["number"].tolist(), loader.state_dict()
    drawn += rest(cache, state, 11, replay=manifest)
    assert drawn == [n for batch in second for n in batch]


def test_a_manifest_is_replayed_from_a_copy_of_the_cache_and_not_from_one_that_lacks_its_shards(
    new_path: Callable[[], Path], tmp_path: Path
) -> None:
    with cs.Cache(new_path()) as cache:
        trained = record(cache, tmp_path / "run", epochs=1)
    with cs.Cache(new_path()) as copy:
        with cs.EpochLoader(copy, BATCH, replay=tmp_path / "run") as loader:
            assert [[batch["number"].tolist() for batch in loader]] == trained
        copy.evict(to=copy.size_bytes * 2 // 3)
        with (
            cs.EpochLoader(copy, BATCH, replay=tmp_path / "run") as loader,
            pytest.raises(cs.EpochError, match=r"shards .* not cached.*cachestream refetch"),
        ):
            next(iter(loader))


def test_a_file_that_is_no_manifest_is_refused(cache: cs.Cache, tmp_path: Path) -> None:
    (tmp_path / "epoch-000000.json").write_text("{}")
    for path in (tmp_path, tmp_path / "epoch-000000.json", tmp_path / "absent"):
        with (
            pytest.raises(cs.CacheStreamError, match=str(path)),
            cs.EpochLoader(cache, BATCH, replay=path) as loader,
        ):
            next(iter(loader))


def recorded(path: Path, folder: Path) -> list[list[int]]:
    given: dict[str, Any] = {"record": folder, "timeout_s": PATIENCE_S}
    with cs.Cache(path) as cache, cs.EpochLoader(cache, BATCH, **given) as loader:
        return [batch["number"].tolist() for batch in loader]


def replayed(path: Path, folder: Path) -> list[list[int]]:
    given: dict[str, Any] = {"replay": folder, "timeout_s": PATIENCE_S}
    with cs.Cache(path) as cache, cs.EpochLoader(cache, BATCH, **given) as loader:
        return [batch["number"].tolist() for batch in loader]


def test_an_epoch_of_two_ranks_is_the_same_on_two_and_the_same_samples_in_order_on_one(
    two_ranks: Ranks, new_path: Callable[[], Path], tmp_path: Path
) -> None:
    path = new_path()
    first, second = two_ranks.run(recorded, path, tmp_path / "run")
    assert two_ranks.run(replayed, path, tmp_path / "run") == [first, second]
    in_order = [n for pair in zip(first, second, strict=True) for batch in pair for n in batch]
    with cs.Cache(path) as cache, cs.EpochLoader(cache, BATCH, replay=tmp_path / "run") as loader:
        assert numbers(loader) == in_order


def left_early(paths: list[Path], steps: int) -> tuple[list[int], dict[str, Any]]:
    """The samples of the first batches of an epoch on this rank's own cache, and the state after them."""
    rank = torch.distributed.get_rank()
    with cs.Cache(paths[rank]) as cache, cs.EpochLoader(cache, BATCH, timeout_s=PATIENCE_S) as loader:
        batches = iter(loader)
        return numbers(next(batches) for _ in range(steps)), loader.state_dict()


def test_a_state_of_two_caches_that_goes_on_with_one_says_what_is_missing(
    two_ranks: Ranks, new_path: Callable[[], Path], tmp_path: Path
) -> None:
    paths = [new_path(), tmp_path / "other"]
    source = [{"x": [0.0] * 8, "number": n} for n in range(1000, 1200)]
    with (
        cs.Cache(paths[1], "4MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1) as worker,
    ):
        worker.wait(timeout_s=PATIENCE_S)
    (head, state), _ = two_ranks.run(left_early, paths, 3)
    with (
        cs.Cache(paths[0]) as cache,
        pytest.warns(UserWarning, match="^170 samples of epoch 0 are not cached any more"),
    ):
        drawn = rest(cache, state)
    assert sorted(head + drawn) == list(range(NUM_SAMPLES))


def test_a_state_in_mid_epoch_holds_a_long_order_once(cache: cs.Cache) -> None:
    """An order that only a list gives is part of every state: it is not copied, let alone encoded, for each."""
    size = 300_000
    with cs.EpochLoader(cache, BATCH, sampler=lambda dataset: np.arange(size) * 7 % len(dataset)) as loader:
        batches = iter(loader)
        next(batches)
        first = loader.state_dict()
        next(batches)
        second = loader.state_dict()
        expected = numbers(next(batches) for _ in range(20))
    assert first["orders"] is second["orders"]
    assert len(second["orders"]) < 3 * size
    assert len(second["segment"]) < 5000
    with cs.EpochLoader(cache, BATCH, sampler=lambda dataset: range(len(dataset))) as loader:
        loader.load_state_dict(json.loads(json.dumps(second)))
        assert loader.epoch == 0
        batches = iter(loader)
        assert numbers(next(batches) for _ in range(20)) == expected
