"""A training job that is killed at random, repeatedly, trains on the samples of one that is not."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from cachestream import Cache, EpochLoader
from cachestream.training.manifests import load_manifest, save_manifest
from cachestream.training.plan import rebuild
from tests.support.forked import run_forked
from tests.training.conftest import NewCache
from tests.training.scripts import killed

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("forked")
Steps = list[list[list[str]]]  # [step][rank] is a list of keys


def run_killed(cache: str, out: Path, kills: int, mode: str) -> dict[int, Steps]:
    """The samples of the interrupted job, by epoch."""
    seed = os.environ.get("KILLS_SEED", str(secrets.randbelow(10**6)))
    sys.stdout.write(f"\nreplay: KILLS_SEED={seed} pytest {Path(__file__).name}\n")
    done = run_forked(killed.main, (cache, out, kills, seed, mode), cwd=ROOT, timeout_s=900)
    errors = [path.read_text() for path in out.glob("error-*")]
    # Ranks that outlive another for a moment are told so: that is how it should be.
    assert not [
        error for error in errors if "RankMismatchError" not in error and "Connection" not in error
    ], errors[0]
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(epoch): steps for epoch, steps in json.loads((out / "result.json").read_text()).items()}


def in_order(steps: Steps) -> list[str]:
    """The keys as the ranks together went through them."""
    return list(chain.from_iterable(chain.from_iterable(steps)))


def check_alone(new_cache: NewCache, out: Path, kills: int) -> None:
    cache = new_cache(8, 20)
    trained = run_killed(cache.path, out, kills, "alone")
    assert len(trained) >= 3
    with EpochLoader(cache, 4, drop_last=False, with_keys=True) as loader:
        for epoch in sorted(trained):
            assert loader.epoch == epoch
            assert [ranks for (ranks,) in trained[epoch]] == [batch["__key__"] for batch in loader]


def uninterrupted(folder: Path, to: Path) -> list[int]:
    """Write the manifests of `folder` as if nothing had been interrupted: their first orders, whole; the
    epochs.
    """
    to.mkdir()
    for path in folder.glob("*.json"):
        manifest = load_manifest(str(path))
        first = manifest.segments[0]
        assert not first.done
        size = rebuild(first.record)[0].size
        whole = replace(first, batches=size, samples=size, batch_size=1, ranks=1)
        save_manifest(str(to / path.name), replace(manifest, segments=(whole,)))
    return sorted(int(path.stem.removeprefix("epoch-")) for path in to.iterdir())


def replayed(cache: Cache, manifest: Path) -> list[str]:
    """The keys of one recorded epoch, from a single rank that nobody interrupts."""
    with EpochLoader(cache, 1, with_keys=True, replay=manifest) as loader:
        return [key for batch in loader for key in batch["__key__"]]


def check_changing(new_cache: NewCache, out: Path, kills: int) -> None:
    cache = new_cache(8, 20)
    trained = run_killed(cache.path, out, kills, "changing")
    assert len(trained) >= 3
    recorded = uninterrupted(out / "run", out / "whole")
    assert set(recorded) >= trained.keys()
    seen = 0
    for epoch in sorted(trained):
        keys = in_order(trained[epoch])
        assert len(keys) == len(set(keys)), f"twice in epoch {epoch}"
        assert len(keys) >= seen - 2
        seen = len(keys)
        whole = replayed(cache, out / "whole" / f"epoch-{epoch:06d}.json")
        assert keys == whole[: len(keys)]
        assert len(whole) - len(keys) <= 2  # at its end fewer samples than ranks are dropped
        assert keys == replayed(cache, out / "run" / f"epoch-{epoch:06d}.json")


@pytest.mark.e2e
def test_eight_kills_change_no_batch_of_any_epoch(new_cache: NewCache, tmp_path: Path) -> None:
    check_alone(new_cache, tmp_path, 8)


@pytest.mark.e2e
def test_six_kills_with_other_ranks_and_batch_sizes_and_a_growing_cache_lose_and_repeat_nothing(
    new_cache: NewCache, tmp_path: Path
) -> None:
    check_changing(new_cache, tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", [check_alone, check_changing])
def test_fifty_kills(check: object, new_cache: NewCache, tmp_path: Path) -> None:
    assert callable(check)
    check(new_cache, tmp_path, 50)
