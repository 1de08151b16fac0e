"""`EpochLoader(group_by=)`: every batch is of one shape, and one tensor; each sample comes once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cachestream as cs
from tests.contract.loader_acts import PATIENCE_S, Ranks

SHAPES = [(3, 8, 8)] * 20 + [(3, 8, 6)] * 13 + [(3, 4, 9)] * 7 + [(3, 2, 2)]
COUNT = len(SHAPES)


def sample(number: int) -> dict[str, Any]:
    image = np.full(SHAPES[number], number, np.uint8)
    return {
        "image": image,
        "number": number,
        "text": "x" * number,
        "boxes": np.zeros((number % 3, 4), np.float32),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shapes") / "cache"
    samples = [sample(number) for number in np.random.default_rng(0).permutation(COUNT).tolist()]
    with (
        cs.Cache(path, size_limit="50MB", min_free=0) as cache,
        cs.start_worker(cache, samples, num_workers=1, shard_size="2KB", order="sequential") as worker,
    ):
        assert worker.wait(PATIENCE_S)
    return path


def check(batch: dict[str, Any], size: int) -> list[int]:
    """The numbers of a batch whose images are one tensor of one shape, with their own values."""
    image, numbers = batch["image"], batch["number"].tolist()
    assert isinstance(image, torch.Tensor)
    assert 1 <= len(image) == len(numbers) == len(batch["text"]) <= size
    for values, number in zip(image, numbers, strict=True):
        assert tuple(values.shape) == SHAPES[number]
        assert (values == number).all()
    return [int(number) for number in numbers]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_batches_have_one_shape_and_all_samples_come_once(path: Path, shuffle: bool, batch_size: int) -> None:
    fewest = sum(-(-count // batch_size) for count in Counter(SHAPES).values())
    with (
        cs.Cache(path) as cache,
        cs.EpochLoader(cache, batch_size, group_by="image", shuffle=shuffle, min_samples=COUNT) as loader,
    ):
        epochs = []
        for _ in range(2):
            length = len(loader)
            epochs.append([check(batch, batch_size) for batch in loader])
            assert length == len(epochs[-1]) == fewest
    for batches in epochs:
        assert sorted(number for batch in batches for number in batch) == list(range(COUNT))
    assert (epochs[0] == epochs[1]) == (not shuffle)


def test_other_fields_keep_their_layout(path: Path) -> None:
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 4, group_by="image", ragged="padded") as loader:
        batch = next(iter(loader))
    assert isinstance(batch["image"], torch.Tensor)
    assert isinstance(batch["boxes"], cs.Padded)


def test_a_state_goes_on_with_the_batches_that_are_left(path: Path) -> None:
    def make(cache: cs.Cache) -> cs.EpochLoader:
        return cs.EpochLoader(cache, 4, group_by="image", seed=3)

    with cs.Cache(path) as cache:
        with make(cache) as loader:
            whole = [check(batch, 4) for batch in loader]
        for step in (0, 1, len(whole) - 1):
            with make(cache) as loader:
                batches = iter(loader)
                assert [check(next(batches), 4) for _ in range(step)] == whole[:step]
                state = loader.state_dict()
            with make(cache) as loader:
                loader.load_state_dict(state)
                assert [check(batch, 4) for batch in loader] == whole[step:]


def test_batches_that_were_drawn_otherwise_are_refused_and_not_filled_with_zeros(path: Path) -> None:
    with cs.Cache(path) as cache:
        with cs.EpochLoader(cache, 4) as plain:
            next(iter(plain))
            state = plain.state_dict()
        with cs.EpochLoader(cache, 4, group_by="image") as loader:
            loader.load_state_dict(state)
            with pytest.raises(cs.ConfigError, match=r"several shapes; give the state .* without group_by="):
                list(loader)


def epoch(path: Path) -> tuple[int, list[list[int]]]:
    with (
        cs.Cache(path) as cache,
        cs.EpochLoader(cache, 4, group_by="image", timeout_s=PATIENCE_S) as loader,
    ):
        return len(loader), [check(batch, 4) for batch in loader]


def test_ranks_make_equal_steps_and_lose_less_than_a_batch_each(path: Path, two_ranks: Ranks) -> None:
    (steps, mine), (others, theirs) = two_ranks.run(epoch, path)
    assert steps == others == len(mine) == len(theirs)
    drawn = [number for batch in (*mine, *theirs) for number in batch]
    assert len(set(drawn)) == len(drawn) >= COUNT - 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_by": "none"}, "no field 'none'"),
        ({"group_by": "text"}, "'text' is str, which has no shape"),
        ({"group_by": 5}, "group_by=5: give the name of the field"),
        ({"group_by": "image", "locality": 8}, "locality= and group_by= do not go together"),
        ({"group_by": "image", "ragged": {"image": "padded"}}, "group_by= and ragged= both name 'image'"),
    ],
)
def test_what_has_no_shape_or_another_draw_is_refused(
    path: Path, options: dict[str, Any], words: str
) -> None:
    with (
        cs.Cache(path) as cache,
        pytest.raises(cs.ConfigError, match=words),
        cs.EpochLoader(cache, 4, **options) as loader,
    ):
        next(iter(loader))
