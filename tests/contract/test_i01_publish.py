"""Invariant 1: a shard becomes live in one transaction with the progress of its units, and an evicted one is unlinked
after its row is gone. A crash leaves an orphan file at worst.

`test_crashes.py` kills and fails each step of it; this looks from another process's side while it goes well.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES
from tests.contract.readers import endless, until


def test_whoever_looks_while_shards_come_and_go_sees_whole_ones_and_no_sample_twice(tmp_path: Path) -> None:
    with (
        cs.Cache(tmp_path / "cache", "2MB", min_free=0) as cache,
        cs.start_worker(cache, endless, num_workers=2, shard_size="60KB"),
    ):
        cache.wait(20, timeout_s=60)
        other = cs.Cache(tmp_path / "cache")

        def look() -> bool:
            report = other.verify()
            assert (report.corrupt, report.missing) == ((), ()), "never a live row without a whole file"
            with cs.EpochLoader(other, 8, drop_last=False, with_keys=True, turnover=0.5) as loader:
                batches = list(loader)
            keys = [key for batch in batches for key in batch["__key__"]]
            assert len(keys) == len(set(keys))
            assert all((batch["x"] == batch["number"][:, None]).all() for batch in batches)
            return other.status().evicted_samples > 40

        until(look, "the cache turns over")
        other.close()


def test_an_orphan_is_no_sample_and_goes_with_a_repair_and_so_does_a_temporary_file(cache: cs.Cache) -> None:
    shards = sorted(Path(cache.path, "shards").rglob("*.safetensors"))
    orphan = shards[0].with_name(f"{int(shards[-1].stem) + 7:012d}.safetensors")
    shutil.copy(shards[0], orphan)
    torn = orphan.with_suffix(".safetensors.tmp")
    torn.write_bytes(shards[1].read_bytes()[:1000])
    cache.close()
    with cs.Cache(cache.path) as again:
        assert again.num_samples == NUM_SAMPLES
        report = again.verify()
        assert (len(report.corrupt), len(report.missing), report.ok) == (0, 0, False)
        again.verify(repair=True)
        assert again.verify().ok
        assert again.num_samples == NUM_SAMPLES
    assert not orphan.exists()
    assert not torn.exists()
    assert sorted(Path(cache.path, "shards").rglob("*.safetensors")) == shards
