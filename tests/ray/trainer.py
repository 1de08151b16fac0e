"""A training on one host, whose cache shares a filling; each line of its output is an epoch.

`python -m tests.ray.trainer CACHE JOURNAL UNITS PAUSE_S`
"""

from __future__ import annotations

import sys
import time
from typing import Final

from cachestream import Cache, EpochLoader, start_worker
from tests.worker.sources import Numbers

LIMIT_BYTES: Final = 8_000_000


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(path: str, journal: str, units: str, pause_s: str) -> None:
    source = Numbers(units=int(units), nbytes=2000, pause_s=float(pause_s), journal=journal)
    with (
        Cache(path, size_limit=LIMIT_BYTES, min_free=0) as cache,
        start_worker(cache, source, num_workers=1, concurrency=1, share="group", shard_size="20KB"),
    ):
        say("begun")
        cache.wait(4, timeout_s=120.0)
        while True:
            with EpochLoader(cache, batch_size=4) as loader:
                count = sum(len(batch["x"]) for batch in loader)
            say(f"{time.monotonic()} {count}")
            time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
