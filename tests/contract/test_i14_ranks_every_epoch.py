"""Invariant 14: ranks are looked for at every epoch, not once. A loader that was asked before the ranks know one another
joins them, and goes on in a job that is made anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES
from tests.contract.loader_acts import PATIENCE_S, Ranks

Epoch = list[int]


def numbers(batches: Any) -> Epoch:
    return [n for batch in batches for n in batch["number"].tolist()]


def leave() -> None:
    """Leave the job when the other rank has joined it: it would fail to."""
    dist.barrier()
    dist.destroy_process_group()


def anew(path: Path, address: str) -> list[Epoch]:
    """An epoch of one loader in each of three jobs: this one, one of a single rank, and one of both in other places."""
    rank = dist.get_rank()
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 10, timeout_s=PATIENCE_S) as loader:
        found = [numbers(loader)]
        leave()
        dist.init_process_group("gloo", init_method=f"{address}-{rank}", rank=0, world_size=1)
        found.append(numbers(loader))
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=address, rank=1 - rank, world_size=2)
        found.append(numbers(loader))
        return found


def test_a_loader_goes_on_in_a_job_that_is_made_anew(
    two_ranks: Ranks, new_path: Callable[[], Path], tmp_path: Path
) -> None:
    first, second = two_ranks.run(anew, new_path(), f"file://{tmp_path}/meeting")
    everything = list(range(NUM_SAMPLES))
    for epoch in (0, 2):
        assert len(first[epoch]) == len(second[epoch]) == NUM_SAMPLES // 2
        assert sorted(first[epoch] + second[epoch]) == everything
    assert sorted(first[1]) == sorted(second[1]) == everything


def early(path: Path, address: str) -> tuple[list[int], str, Epoch, list[str]]:
    """The lengths before and after the ranks know one another, the error of an iteration that was begun alone, the
    next epoch, and what was warned of.
    """
    rank = dist.get_rank()
    leave()
    with (
        warnings.catch_warnings(record=True) as caught,
        cs.Cache(path) as cache,
        cs.EpochLoader(cache, 10, timeout_s=PATIENCE_S) as loader,
        cs.EpochLoader(cache, 10, timeout_s=PATIENCE_S) as begun,
    ):
        warnings.simplefilter("always")
        lengths = [len(loader)]
        batches = iter(begun)
        next(batches)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        epoch = numbers(loader)
        lengths.append(len(loader))
        try:
            message = f"{len(list(batches))} batches"
        except cs.EpochError as error:
            message = str(error)
        epoch += numbers(begun)
        early = [warning for warning in caught if "init_process_group" in str(warning.message)]
        assert {warning.filename for warning in early} == {__file__}, "the line of the caller's own code"
        return lengths, message, epoch, [str(warning.message) for warning in early]


def test_a_loader_that_was_asked_too_early_warns_and_joins_the_ranks(
    two_ranks: Ranks, new_path: Callable[[], Path], tmp_path: Path
) -> None:
    outcomes = two_ranks.run(early, new_path(), f"file://{tmp_path}/meeting")
    for rank, (lengths, message, _, told) in enumerate(outcomes):
        assert lengths == [NUM_SAMPLES // 10, NUM_SAMPLES // 20]
        assert "epoch 0 was begun before torch.distributed.init_process_group()" in message
        assert any(f"it is rank {rank} of 2 from now on" in text for text in told), told
    drawn = outcomes[0][2] + outcomes[1][2]
    assert sorted(drawn) == sorted(2 * list(range(NUM_SAMPLES)))
