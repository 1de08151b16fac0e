"""Invariant 9: small first, then large. An open shard is published when it is full or 2 s old, and the first are small."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

import cachestream as cs
from tests.contract.readers import DEADLINE_S, Told, numbers_in, until


def test_what_is_there_is_published_before_its_shard_is_full_and_shards_grow_to_their_size(
    tmp_path: Path,
) -> None:
    source = Told(str(tmp_path), units=250, floats=4096)
    source.allow(3)
    with (
        cs.Cache(tmp_path / "cache", "12MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1, concurrency=2, shard_size="1MB") as worker,
    ):
        until(lambda: cache.num_samples == 3, "three samples of a shard that would hold 62")
        source.allow(None)
        assert worker.wait(DEADLINE_S)
        assert numbers_in(cache) == source.numbers
        paths = sorted(Path(cache.path, "shards").rglob("*.safetensors"))
        sizes = [path.stat().st_size for path in paths]
        with safe_open(paths[0], "numpy") as shard:
            assert len(shard.get_tensor("number")) <= 3, "the first one is small"
    full = [size for size in sizes if size > 1_000_000]
    assert len(full) >= 2
    assert max(full) < 1_000_000 + 16_400 + 8192, "no sample more than it takes to be full, and a header"
    assert len(sizes) <= 12
