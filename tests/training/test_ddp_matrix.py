"""Combinations of DDP: start methods of processes, numbers of ranks, caches, with or without the last batch."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.forked import run_forked
from tests.training.scripts import matrix
from tests.training.scripts.matrix import BATCH_SIZE, CASES, SIZES, Case

ROOT: Final = Path(__file__).parents[2]
METHODS: Final = ("fork", "spawn", "forkserver")
EPOCHS: Final = 10
SOAK_EPOCHS: Final = int(os.environ.get("MATRIX_EPOCHS", "2000"))

Epoch = tuple[list[list[int]], ...]  # [rank][step] is a list of numbers


def run_matrix(method: str, epochs: int, out: Path, sizes: tuple[int, ...], timeout_s: float) -> None:
    if method == "fork":
        arguments = (method, epochs, out, *sizes)
        threads = {"OMP_NUM_THREADS": "1"}
        done = run_forked(matrix.main, arguments, cwd=ROOT, environment=threads, timeout_s=timeout_s)
        assert done.returncode == 0, done.stderr[-5000:]
        return
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.training.scripts.matrix",
            method,
            str(epochs),
            str(out),
            *map(str, sizes),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def check_epoch(epoch: Epoch, case: Case, cached: int) -> None:
    """Check equal steps on all ranks and no sample twice; with one cache of at least `cached` samples, none
    left out.
    """
    steps = {len(rank) for rank in epoch}
    assert len(steps) == 1
    assert min(steps) > 0
    drawn = [number for rank in epoch for step in rank for number in step]
    assert len(drawn) == len(set(drawn))
    sizes = [len(step) for rank in epoch for step in rank]
    assert max(sizes) <= BATCH_SIZE
    if case.drop_last:
        assert min(sizes) == BATCH_SIZE
    if case.caches == 1:
        whole, rest = divmod(cached, BATCH_SIZE * len(epoch))
        assert len(drawn) == cached - (rest if case.drop_last or rest < len(epoch) else 0)
        assert whole <= min(steps) <= whole + 1


def check_matrix(epochs: int, out: Path, sizes: tuple[int, ...]) -> None:
    for size, case in itertools.product(sizes, CASES):
        ranks = json.loads((out / f"{size}-{case.name}.json").read_text())
        assert [len(rank) for rank in ranks] == [epochs] * size
        by_epoch: list[Epoch] = list(zip(*ranks, strict=True))
        # The epoch after the one in which the cache has grown may have been prepared before.
        for number, epoch in enumerate(by_epoch):
            if number <= epochs // 3 or number > epochs // 3 + 2:
                check_epoch(epoch, case, 33 if number <= epochs // 3 else 44)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("fork", SIZES),
        pytest.param("spawn", (2,), marks=pytest.mark.slow),  # the examples do, with equal epochs
        pytest.param("forkserver", (2,), marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked")
def test_ranks_make_even_steps_and_no_sample_comes_twice_however_they_are_started(
    method: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    run_matrix(method, EPOCHS, tmp_path, sizes, 590)
    check_matrix(EPOCHS, tmp_path, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("forked")
def test_thousands_of_epochs_stay_even(method: str, tmp_path: Path) -> None:
    run_matrix(method, SOAK_EPOCHS, tmp_path, SIZES, 7190)
    check_matrix(SOAK_EPOCHS, tmp_path, SIZES)
