"""P8: ranks cannot hang on data. They agree on the snapshot and on the number of batches, with one cache or several;
a rank that is dead, late or called with other options is an error on the others, within a deadline.

Ranks are processes under gloo. Invariant 8: they agree through a store of their own, never through collectives.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, NUM_VARIOUS
from tests.contract.loader_acts import PATIENCE_S, Ranks


def below_100(columns: cs.ShardColumns) -> Any:
    return np.asarray(columns["number"]) < 100


LATE_S: Final = 12.0  # a rank that took part before is late after half of it
# Options that one rank has and the other has not, and the words of the error.
DIFFERENT: Final[list[tuple[dict[str, Any], str]]] = [
    ({"batch_size": 5}, "batch_size=5"),
    ({"shuffle": False}, "shuffle=False"),
    ({"seed": 1}, "seed=1"),
    ({"epoch_size": 100}, "epoch_size=100"),
    ({"drop_last": False}, "drop_last=False"),
    ({"locality": 32}, "locality=32"),
    ({"weights": True}, "weights=True"),
    ({"sampler": range(40)}, "sampler=True"),
    ({"where": below_100}, "where=True"),
]


def numbers(loader: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in loader]


def paths_of(path: Path | list[Path]) -> Path:
    """The cache of this rank."""
    return path[dist.get_rank()] if isinstance(path, list) else path


def epochs(path: Path | list[Path], count: int, options: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """What `len` says before each epoch, and the batches of each."""
    given: dict[str, Any] = {"batch_size": 7, "timeout_s": PATIENCE_S, **options}
    with cs.Cache(paths_of(path)) as cache, cs.EpochLoader(cache, **given) as loader:
        found = [(len(loader), numbers(loader)) for _ in range(count)]
    return [length for length, _ in found], [batches for _, batches in found]


@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_share_each_epoch_of_one_cache_in_equal_steps(
    drop_last: bool, two_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    (lengths, mine), (others, theirs) = two_ranks.run(epochs, new_path(), 3, {"drop_last": drop_last})
    steps, rest = divmod(NUM_SAMPLES, 2 * 7)
    assert lengths == others == [steps if drop_last else steps + 1] * 3
    for first, second in zip(mine, theirs, strict=True):
        assert len(first) == len(second) == lengths[0]
        drawn = [n for batches in (first, second) for batch in batches for n in batch]
        assert len(set(drawn)) == len(drawn) == NUM_SAMPLES - (rest if drop_last else 0)
        assert {len(batch) for batch in first[:steps] + second[:steps]} == {7}
    assert mine[0] != mine[1] != mine[2]


@pytest.fixture
def unequal(new_path: Callable[[], Path], varied: Path, tmp_path: Path) -> list[Path]:
    """Two caches; the second one has fewer samples."""
    return [new_path(), Path(shutil.copytree(varied, tmp_path / "varied"))]


def test_ranks_with_unequal_caches_make_as_many_steps_as_the_smaller_one_has(
    two_ranks: Ranks, unequal: list[Path]
) -> None:
    options = {"columns": ["number"], "drop_last": False}
    (lengths, mine), (others, theirs) = two_ranks.run(epochs, unequal, 2, options)
    assert lengths == others == [NUM_VARIOUS // 7] * 2
    for first, second in zip(mine, theirs, strict=True):
        assert [len(batch) for batch in first] == [len(batch) for batch in second] == [7] * lengths[0]
        assert len({n for batch in first for n in batch}) == NUM_VARIOUS
        assert sorted(n for batch in second for n in batch) == list(range(NUM_VARIOUS))


def test_epochs_of_a_fixed_length_are_that_long_on_ranks_with_unequal_caches(
    two_ranks: Ranks, unequal: list[Path]
) -> None:
    options = {"epoch_size": 1000, "batch_size": 10, "columns": ["number"]}
    for lengths, found in two_ranks.run(epochs, unequal, 2, options):
        assert lengths == [50, 50]
        assert [len(batch) for batches in found for batch in batches] == [10] * 100


def failures(path: Path) -> list[tuple[str, str]]:
    """The class and words of the error that each of `DIFFERENT` is, and what an equal loader gives afterwards."""
    found = []
    with cs.Cache(path) as cache:
        for more, _ in DIFFERENT:
            given = {"batch_size": 4} | (more if dist.get_rank() else {})
            with cs.EpochLoader(cache, timeout_s=PATIENCE_S, **given) as loader:
                try:
                    next(iter(loader))
                    found.append(("none", ""))
                except cs.CacheStreamError as error:
                    found.append((type(error).__name__, str(error)))
        with cs.EpochLoader(cache, 4, timeout_s=PATIENCE_S) as loader:
            found.append((str(len(numbers(loader))), ""))
    return found


def test_options_that_differ_between_ranks_are_an_error_on_all_of_them(
    two_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    for found in two_ranks.run(failures, new_path()):
        assert len(found) == len(DIFFERENT) + 1
        for (_, words), (kind, message) in zip(DIFFERENT, found, strict=False):
            assert kind == "RankMismatchError"
            assert message.startswith("rank 1 (pid ")
            assert words in message
        assert found[-1][0] == str(NUM_SAMPLES // 8)


class OwnError(Exception):
    """An error that only the test knows."""


def broken(dataset: Any) -> Any:
    """A sampler function that fails on rank 1."""
    if dist.get_rank():
        raise OwnError("in the sampler")
    return range(len(dataset))


def unlike(dataset: Any) -> Any:
    """A sampler function that orders otherwise on rank 1."""
    return range(len(dataset)) if dist.get_rank() else range(len(dataset) - 1, -1, -1)


def test_a_failure_on_one_rank_is_an_error_on_all(two_ranks: Ranks, new_path: Callable[[], Path]) -> None:
    other, own = two_ranks.run(epochs, new_path(), 1, {"sampler": broken})
    assert isinstance(own, OwnError)
    assert isinstance(other, cs.EpochError)
    assert "rank 1" in str(other)
    assert "OwnError: in the sampler" in str(other)


def test_a_sampler_that_differs_between_ranks_is_an_error_on_all(
    two_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    for error in two_ranks.run(epochs, new_path(), 1, {"sampler": unlike}):
        assert isinstance(error, cs.RankMismatchError)
        assert "sampler" in str(error)


def test_too_few_samples_for_one_rank_are_the_same_error_on_all(
    two_ranks: Ranks, unequal: list[Path]
) -> None:
    for rank, error in enumerate(two_ranks.run(epochs, unequal, 1, {"batch_size": 100})):
        assert isinstance(error, cs.NotEnoughSamplesError)
        assert f"holds {NUM_VARIOUS} samples" in str(error)
        assert str(error).startswith("rank 1 (pid ") == (rank == 0)


def draws(path: Path) -> list[float]:
    def transform(batch: Any, generator: torch.Generator) -> Any:
        return batch | {"drawn": torch.rand(1, generator=generator)}

    given: dict[str, Any] = {"batch_transform": transform, "timeout_s": PATIENCE_S}
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 50, **given) as loader:
        return [float(batch["drawn"]) for batch in loader]


def test_the_generator_of_a_batch_transform_is_another_one_on_each_rank(
    two_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    path = new_path()
    first, second = two_ranks.run(draws, path)
    assert len(first) == len(second) == 3
    assert len(set(first + second)) == 6
    assert two_ranks.run(draws, path) == [first, second]


def interleaved(path: Path) -> int:
    """The number of batches, where an all_reduce of rank 0 is under way from the first of them to the last."""
    total = torch.ones(1)
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 10, timeout_s=PATIENCE_S) as loader:
        pending = dist.all_reduce(total, async_op=True) if dist.get_rank() == 0 else None
        steps = len(numbers(loader)) + len(numbers(loader))
        if pending is None:
            dist.all_reduce(total)
        else:
            pending.wait()
    assert total.item() == 2
    return steps


def test_ranks_agree_while_a_collective_of_the_trainer_is_under_way(
    two_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    assert two_ranks.run(interleaved, new_path()) == [30, 30]


def streams(remote: list[dict[str, int]], caches: list[Path]) -> tuple[list[int], bool, list[list[int]]]:
    """The samples that the cache of this rank holds in the end, whether its worker was there, and an epoch."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, "min_free": 0, "timeout_s": PATIENCE_S}
    with cs.stream(remote, caches[dist.get_rank()], "4MB", min_samples=8, **options) as loader:
        loader.worker.wait(timeout_s=PATIENCE_S)
        dist.barrier()
        batches = numbers(loader)
        with loader.cache.snapshot() as dataset:
            found = sorted(dataset[:]["number"].tolist())
        dist.barrier()
        return found, loader.worker.attached, batches


@pytest.mark.e2e
def test_streams_with_a_cache_on_each_rank_read_disjoint_shares_and_with_one_cache_have_one_worker(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    remote = [{"number": number} for number in range(40)]
    own = two_ranks.run(streams, remote, [tmp_path / "a", tmp_path / "b"])
    assert [len(found) for found, _, _ in own] == [20, 20]
    assert sorted(own[0][0] + own[1][0]) == list(range(40))
    assert [attached for _, attached, _ in own] == [False, False]
    together = two_ranks.run(streams, remote, [tmp_path / "c"] * 2)
    assert [found for found, _, _ in together] == [list(range(40))] * 2
    assert sorted(attached for _, attached, _ in together) == [False, True]
    for outcome in (own, together):
        first, second = (batches for _, _, batches in outcome)
        assert len(first) == len(second)
        assert not {n for batch in first for n in batch} & {n for batch in second for n in batch}


def alone(path: Path) -> str:
    """The error of rank 0, where rank 1 makes a loader and never asks for a batch."""
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 4, timeout_s=3) as loader:
        told = ""
        if dist.get_rank() == 0:
            with pytest.raises(cs.RankMismatchError) as caught:
                next(iter(loader))
            told = str(caught.value)
        dist.barrier()
        return told


def test_a_rank_that_does_not_come_is_named_within_the_timeout(
    two_ranks: Ranks, new_path: Callable[[], Path]
) -> None:
    told, _ = two_ranks.run(alone, new_path())
    assert "rank 1 has not come to its EpochLoader within" in told


@pytest.fixture
def mortal(two_ranks: Ranks) -> Iterator[Ranks]:
    """Two ranks that a test may kill; the others have started the server that forks them, which stays."""
    del two_ranks
    ranks = Ranks(2)
    yield ranks
    ranks.kill()
    ranks.close()


def until_an_error(path: Path, victim: int, how: int) -> str:
    """The error on the other rank, when `victim` has died in its first epoch."""
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 4, prefetch=1, timeout_s=LATE_S) as loader:
        for epoch in range(4):
            for step, _ in enumerate(loader):
                if (epoch, step) == (0, 3):
                    dist.barrier()
                    if dist.get_rank() == victim:
                        os.kill(os.getpid(), how)
        return "no error"


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.e2e),
    ],
)
def test_a_rank_that_dies_is_an_error_on_the_other_one_and_leaves_no_lease(
    victim: int, how: int, mortal: Ranks, new_path: Callable[[], Path]
) -> None:
    path = new_path()
    outcomes = mortal.run(until_an_error, path, victim, how)
    assert isinstance(outcomes[victim], EOFError)
    assert isinstance(outcomes[1 - victim], cs.RankMismatchError), outcomes
    assert ("rank 1 (pid " if victim else "the process that hosts it") in str(outcomes[1 - victim])
    with cs.Cache(path) as cache:
        assert cache.evict(to=0) > 0
        assert (cache.num_samples, cache.status().leases) == (0, 0)
