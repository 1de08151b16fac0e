"""Ranks of one group get equal batches, groups get disjoint ones: `EpochLoader(mesh=, replicate=)`, under gloo."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler, RandomSampler

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES
from tests.contract.loader_acts import PATIENCE_S, Ranks
from tests.contract.test_p08_ranks import numbers, paths_of

BATCH = 7


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def layout(names: tuple[str, ...] | int, replicate: Any) -> dict[str, Any]:
    """The options for a mesh of 2 × 2 with these names of its dimensions; for a number without one."""
    if isinstance(names, int):
        return {"replicate": replicate}
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names), "replicate": replicate}


def epochs(path: Path, names: Any, replicate: Any, options: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """What `len` says before each of two epochs, and their batches."""
    given = {"batch_size": BATCH, "timeout_s": PATIENCE_S, **layout(names, replicate), **options}
    with cs.Cache(path) as cache, cs.EpochLoader(cache, **given) as loader:
        found = [(len(loader), numbers(loader)) for _ in range(2)]
    return [length for length, _ in found], [batches for _, batches in found]


@pytest.mark.parametrize(
    ("names", "replicate", "pairs"),
    [
        (("dp", "tp"), "tp", ((0, 1), (2, 3))),
        (("tp", "dp"), ("tp",), ((0, 2), (1, 3))),
        (0, 2, ((0, 1), (2, 3))),
    ],
)
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_group_gets_equal_batches_and_groups_share_the_epoch(
    names: Any,
    replicate: Any,
    pairs: tuple[tuple[int, int], ...],
    drop_last: bool,
    four_ranks: Ranks,
    new_path: Callable[[], Path],
) -> None:
    found = four_ranks.run(epochs, new_path(), names, replicate, {"drop_last": drop_last})
    steps, rest = divmod(NUM_SAMPLES, 2 * BATCH)
    for one, other in pairs:
        assert found[one] == found[other]
        assert found[one][0] == [steps if drop_last else steps + 1] * 2
    for epoch in range(2):
        drawn = [n for one, _ in pairs for batch in found[one][1][epoch] for n in batch]
        assert len(set(drawn)) == len(drawn) == NUM_SAMPLES - (rest if drop_last else 0)


def test_all_ranks_of_a_mesh_get_one_sequence_where_all_dimensions_are_named(
    four_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    first, *others = four_ranks.run(epochs, new_path(), ("cp", "tp"), ("cp", "tp"), {"epoch_size": 100})
    assert others == [first] * 3
    assert first[0] == [100 // BATCH] * 2


class OwnShare:
    """A sampler of one's own that gives each group its share."""

    num_replicas = 2

    def __init__(self, dataset: Any) -> None:
        self._numbers = range(dist.get_rank() // 2, len(dataset), 2)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)


def divided(dataset: Any) -> DistributedSampler[Any]:
    return DistributedSampler(dataset, 2, dist.get_rank() // 2)


@pytest.mark.parametrize("sampler", [RandomSampler, divided, OwnShare])
def test_samplers_are_shared_by_groups(sampler: Any, four_ranks: Ranks, new_path: Callable[[], Path]) -> None:
    found = four_ranks.run(epochs, new_path(), 0, 2, {"sampler": sampler})
    assert found[0] == found[1]
    assert found[2] == found[3]
    drawn = [n for rank in (0, 2) for batch in found[rank][1][0] for n in batch]
    assert len(set(drawn)) == len(drawn) == NUM_SAMPLES // (2 * BATCH) * 2 * BATCH


def noisy(batch: Any, generator: torch.Generator) -> Any:
    return {"number": torch.rand(len(batch["number"]), generator=generator)}


def test_transforms_of_a_group_draw_the_same(four_ranks: Ranks, new_path: Callable[[], Path]) -> None:
    found = four_ranks.run(epochs, new_path(), ("dp", "tp"), "tp", {"batch_transform": noisy})
    assert found[0] == found[1] != found[2] == found[3]


def begin(path: Path, names: Any, replicate: Any, steps: int) -> tuple[list[int], dict[str, Any]]:
    """What the first `steps` batches hold, and the state after them."""
    with (
        cs.Cache(path) as cache,
        cs.EpochLoader(cache, BATCH, timeout_s=PATIENCE_S, **layout(names, replicate)) as loader,
    ):
        batches = iter(loader)
        return [n for _ in range(steps) for n in next(batches)["number"].tolist()], loader.state_dict()


def go_on(path: Path, names: Any, replicate: Any, state: dict[str, Any]) -> list[int]:
    """What the rest of the epoch holds."""
    options = {"timeout_s": PATIENCE_S, "drop_last": False, **layout(names, replicate)}
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 1, **options) as loader:
        loader.load_state_dict(state)
        return [n for batch in numbers(loader) for n in batch]


@pytest.mark.parametrize(
    ("names", "replicate", "readers"),
    [(("tp", "dp"), "tp", (0, 1)), (("dp", "tp"), ("dp", "tp"), (0,)), (0, None, (0, 1, 2, 3))],
)
def test_a_state_goes_on_with_another_mesh(
    names: Any,
    replicate: Any,
    readers: tuple[int, ...],
    four_ranks: Ranks,
    new_path: Callable[[], Path],
) -> None:
    path = new_path()
    begun = four_ranks.run(begin, path, ("dp", "tp"), "tp", 5)
    assert begun[0][1] == begun[3][1], "any rank's state is that of the job"
    first = begun[0][0] + begun[2][0]
    found = four_ranks.run(go_on, path, names, replicate, begun[0][1])
    rest = [n for rank in readers for n in found[rank]]
    assert len(set(first + rest)) == len(first + rest), "none comes twice"
    assert len(rest) == (NUM_SAMPLES - len(first)) // len(readers) * len(readers), "as each rank gets one"


def refusal(path: Path | list[Path], names: Any, replicate: Any, part: bool = False) -> str:
    with cs.Cache(paths_of(path)) as cache:
        options = layout(names, replicate)
        if part:
            options["mesh"] = options["mesh"]["dp"]
        try:
            with cs.EpochLoader(cache, BATCH, timeout_s=PATIENCE_S, **options) as loader:
                next(iter(loader))
        except cs.CacheStreamError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("names", "replicate", "part", "words"),
    [
        (("dp", "tp"), "pp", False, "ConfigError: replicate='pp': the mesh has the dimensions dp, tp"),
        (("dp", "tp"), None, False, "ConfigError: mesh= and replicate=None: give the dimensions"),
        (("dp", "tp"), "dp", True, "give the mesh of all ranks of the job, not a part of it"),
        (0, 3, False, "the 4 ranks of the job make no groups of 3"),
        (0, "tp", False, "ConfigError: replicate='tp': give the number"),
        (0, 0, False, "ConfigError: replicate=0: give the number"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    names: Any, replicate: Any, part: bool, words: str, four_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    for message in four_ranks.run(refusal, new_path(), names, replicate, part):
        assert words in message


def test_equal_batches_from_different_caches_are_refused(
    four_ranks: Ranks, new_path: Callable[[], Path], varied: Path, tmp_path: Path
) -> None:
    path = new_path()
    caches = [path, Path(shutil.copytree(varied, tmp_path / "varied")), path, path]
    for message in four_ranks.run(refusal, caches, 0, 2):
        assert "are to get equal batches (replicate=), and have caches of their own" in message


def test_a_process_alone_makes_no_group(cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, BATCH, replicate=1) as loader:
        assert len(numbers(loader)) == NUM_SAMPLES // BATCH
    with (
        cs.EpochLoader(cache, BATCH, replicate=2) as loader,
        pytest.raises(cs.ConfigError, match=r"make no groups of 2; call init_process_group\(\) first"),
    ):
        next(iter(loader))
