"""Ranks that torchrun starts select, pack by tokens and weigh alike, over one cache or one each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import cachestream as cs
from cachestream import Cache
from tests.support.caches import add_shard
from tests.training.conftest import NewCache
from tests.training.scripts.ports import free_port
from tests.training.sources import Single
from tests.training.test_turnover import LIMIT_BYTES, SAMPLE_BYTES
from tests.worker.support import wait_until

ROOT: Final = Path(__file__).parents[2]
BUDGET: Final = 120
LESS: Final = Single(800, SAMPLE_BYTES)  # so few that all has come after a few epochs


def run_ranks(script: str, out: Path, *arguments: object) -> list[Any]:
    """What the two ranks of a job have written."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *(f"--master-port={free_port()}", "--module", f"tests.training.scripts.{script}"),
            *map(str, (out, *arguments)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def length_of(number: int) -> int:
    return 1 + 7 * number % 40


def fill(cache: Cache, numbers: range) -> None:
    """Two shards of samples of 1 to 40 tokens."""
    samples = [(f"k{n}", {"t": torch.zeros(length_of(n)), "number": n}) for n in numbers]
    for part in (samples[: len(samples) // 3], samples[len(samples) // 3 :]):
        add_shard(cache, part)


def epochs_of(found: dict[str, Any]) -> list[list[list[int]]]:
    """The batches of both epochs, each a list of numbers."""
    return [found["first"], found["begun"] + found["again"]]


@pytest.mark.e2e
def test_ranks_select_and_pack_by_tokens_in_equal_steps_and_go_on_from_one_state(
    new_cache: NewCache, tmp_path: Path
) -> None:
    shared, own = new_cache(5, 13), [new_cache(), new_cache()]
    of_own = range(200), range(1000, 1140)
    for cache, numbers in zip(own, of_own, strict=True):
        fill(cache, numbers)
    ranks = run_ranks("selecting", tmp_path, shared.path, *(cache.path for cache in own))
    for name in ("selected", "tokens"):
        found = [rank[name] for rank in ranks]
        assert found[0]["lengths"] == found[1]["lengths"]
        for share in found:
            assert share["lengths"] == [len(share["first"]), len(share["begun"]) + len(share["rest"])]
            assert share["again"] == share["rest"] != []
            assert share["fields"] == ["number"]
    for epoch in range(2):
        batches = [epochs_of(rank["selected"])[epoch] for rank in ranks]
        assert sorted(chain(*batches[0], *batches[1])) == list(range(0, 65, 3))
        for rank, numbers in zip(ranks, of_own, strict=True):
            drawn = epochs_of(rank["tokens"])[epoch]
            assert all(len(batch) * max(map(length_of, batch)) <= BUDGET for batch in drawn)
            together = [*chain(*drawn)]
            assert len(set(together)) == len(together)
            assert set(together) <= {n for n in numbers if length_of(n) <= 30}


@pytest.mark.slow
def test_ranks_of_a_cache_that_evicts_by_weight_keep_the_heaviest(tmp_path: Path) -> None:
    heavy = set(range(0, LESS.num_units, 40))
    options = {
        "turnover": 0.12,
        "weights": {str(n): 20.0 if n in heavy else 1.0 for n in range(LESS.num_units)},
    }
    (tmp_path / "options.json").write_text(json.dumps(options))
    with (
        cs.Cache(tmp_path / "cache", LIMIT_BYTES, min_free=0, eviction="least-weight") as cache,
        cs.start_worker(cache, LESS, num_workers=1, shard_size="16kB"),
    ):
        wait_until(lambda: cache.fill_state() == "full", "the cache is full")
        ranks = run_ranks("turning", tmp_path, 8, cache.path)
        status = cache.status()
    assert status.evicted_samples + status.num_samples > LESS.num_units, "all has come"
    assert status.evicted_unused_samples == 0
    last = {n for epochs in ranks for n in epochs[-1]}
    assert len(last) < LESS.num_units / 2
    assert len(last & heavy) > 0.8 * len(heavy)
