"""Invariant 2: bytes are reserved before they are a file; over the limit nothing is written.

`test_p04_limit.py` watches the limit under every policy; this has more writers than there is room for.
"""

from __future__ import annotations

from pathlib import Path

import cachestream as cs
from tests.contract.conftest import bytes_on_disk
from tests.contract.readers import endless, until
from tests.contract.test_p04_limit import Watch


def test_writers_that_want_more_than_there_is_stay_below_the_limit_together_with_what_others_put_there(
    tmp_path: Path,
) -> None:
    path, limit = tmp_path / "cache", 2_000_000
    with cs.Cache(path, limit, min_free=0) as cache, Watch(path) as watch:
        (path / "theirs").write_bytes(bytes(400_000))
        with (
            cs.start_worker(cache, endless, num_workers=4, shard_size="400KB") as worker,
            cs.EpochLoader(cache, 4, drop_last=False, turnover=0.5) as loader,
        ):
            until(lambda: list(loader) and cache.status().evicted_shards > 8, "the cache turns over")
            assert cache.size_bytes >= 400_000
            worker.stop(60)
        assert cache.status().reserved_bytes == 0, "who is gone has nothing reserved"
        assert bytes_on_disk(path) <= cache.size_bytes + 4096 * 8
    assert 1_000_000 < watch.most <= limit
