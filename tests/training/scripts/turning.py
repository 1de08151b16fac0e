"""One rank of a job over caches that turn over: `turning.py OUT EPOCHS CACHE [CACHE]`; writes OUT/<rank>.json.

The ranks share one cache, or have one each. Each epoch lasts until filling has taken the room that it leaves. The file
holds the numbers that the rank has trained on in each epoch. OUT/options.json has options of the loader, if it is there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cachestream as cs

BATCH = 32


def main() -> None:
    out, epochs, paths = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, seen = dist.get_rank(), list[list[int]]()
    options: dict[str, Any] = {"turnover": 0.25, "min_samples": BATCH, "drop_last": False}
    if (file := out / "options.json").exists():
        options |= json.loads(file.read_text())
    with cs.Cache(paths[rank % len(paths)]) as cache:
        with cs.EpochLoader(cache, BATCH, **options) as loader:
            for _ in range(epochs):
                waits, until_s = cache.status().epoch_waits, time.monotonic() + 2.0
                seen.append([])
                for batch in loader:
                    seen[-1] += batch["n"].tolist()
                    while cache.status().epoch_waits == waits and time.monotonic() < until_s:
                        time.sleep(0.05)
                dist.barrier()
        (out / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
