"""A cache, a checkpoint and manifests of version 0.1.0 open, resume and replay under this version."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cachestream as cs
from tests.baseline.make import FILES, LOADER, SAMPLES, make_remote, samples_of, start
from tests.contract.readers import Told, numbers_in


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    """A copy of the baseline's cache."""
    shutil.copytree(FILES / "cache", tmp_path / "cache")
    with cs.Cache(tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def recorded() -> Any:
    """The checkpoint, and the samples of the epoch and of its rest."""
    return json.loads((FILES / "state.json").read_text())


def test_a_cache_of_the_baseline_is_sound_and_holds_every_sample(cache: cs.Cache) -> None:
    assert cache.verify().ok
    with cache.snapshot() as dataset:
        assert sorted(
            int(sample["array"][0]) for sample in map(dataset.__getitem__, range(len(dataset)))
        ) == list(range(SAMPLES))


def test_a_checkpoint_of_the_baseline_resumes_exactly(cache: cs.Cache, recorded: Any) -> None:
    with cs.EpochLoader(cache, **LOADER) as loader:
        loader.load_state_dict(recorded["state"])
        assert [samples_of(batch) for batch in loader] == recorded["rest"]


def test_a_manifest_of_the_baseline_is_replayed(cache: cs.Cache, recorded: Any) -> None:
    with cs.EpochLoader(cache, replay=FILES / "manifests", batch_size=LOADER["batch_size"]) as loader:
        assert [samples_of(batch) for batch in loader] == recorded["epoch"]


@pytest.mark.e2e
def test_a_worker_takes_the_listing_of_the_baseline_and_fetches_nothing_again(cache: cs.Cache) -> None:
    make_remote()
    before = cache.status()
    with start(cache) as worker:
        worker.wait(timeout_s=60)
    after = cache.status()
    assert (after.num_samples, after.num_shards) == (before.num_samples, before.num_shards)
    assert after.num_units == SAMPLES


@pytest.mark.e2e
@pytest.mark.parametrize("command", ["status", "verify"])
def test_json_answers_keep_the_fields_of_the_baseline(cache: cs.Cache, command: str) -> None:
    before = json.loads((FILES / f"{command}.json").read_text())
    asked = [sys.executable, "-m", "cachestream", command, str(cache.path), "--json"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    now = json.loads(answer.stdout)
    assert set(before) <= set(now)
    for field in ("num_samples", "num_shards", "schema", "source", "ok", "num_units"):
        assert now.get(field) == before.get(field)


def test_a_cache_with_a_catalogue_of_version_1_half_way_through_a_pass_is_filled_to_the_end_each_unit_once(
    tmp_path: Path,
) -> None:
    """Made before the catalogue had one row a file, by `Told(units=30, samples=3, floats=16)`, of which 14 were read."""
    path = Path(shutil.copytree(FILES / "half", tmp_path / "cache"))
    source = Told(str(tmp_path), units=30, samples=3, floats=16)
    with cs.Cache(path) as cache:
        before = cache.status()
        assert (before.cache_id, before.size_limit) == ("027b433b6ee54ee491049b4af5a30dc9", 2_000_000)
        assert (before.num_samples, before.schema) == (42, "{number: int64[], x: float32[16]}")
        assert cache.verify().ok
        held = {number // 3 for number in numbers_in(cache)}
        with cs.start_worker(cache, source, num_workers=2, shard_size="500B", seed=5) as worker:
            assert worker.wait(120)
        assert sorted(source.units_read) == sorted(set(range(30)) - held)
        assert numbers_in(cache) == source.numbers
