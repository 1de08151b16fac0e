"""A training job of one rank, as torchrun starts it: `train.py CACHE OUT MODE`; writes OUT/<rank>.json.

MODE "epochs" trains six epochs while the cache grows; "survive" waits for a rank to be killed, and reports what
the others are told.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cachestream as cs
from tests.support.caches import add_shard, numbered


def epochs(cache: cs.Cache, rank: int) -> dict[str, Any]:
    """Six epochs of DDP training; rank 0 adds a shard after the second."""
    model = DistributedDataParallel(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen = []
    with cs.EpochLoader(cache, 4, drop_last=False) as loader:
        for epoch in range(6):
            steps = []
            for batch in loader:
                optimizer.zero_grad()
                (model(batch["x"]) - batch["number"][:, None]).square().mean().backward()
                optimizer.step()
                steps.append(batch["number"].tolist())
            seen.append(steps)
            if epoch == 1:
                if rank == 0:
                    add_shard(cache, numbered(60, 20))
                dist.barrier()
    return {"epochs": seen, "weight": model.module.weight.sum().item()}


def survive(cache: cs.Cache, rank: int, out: Path) -> dict[str, Any]:
    """Train until the loader says that a rank is gone; no collectives, which would fail first."""
    with cs.EpochLoader(cache, 4, epoch_size=24, timeout_s=12) as loader:
        for epoch in range(100_000):
            if epoch == 3:
                (out / f"{rank}.pid").write_text(str(os.getpid()))
            began = time.monotonic()
            try:
                for _ in loader:
                    time.sleep(0.002)
            except cs.EpochError as error:
                return {
                    "error": type(error).__name__,
                    "message": str(error),
                    "waited_s": time.monotonic() - began,
                }
    return {"error": None}


def main() -> None:
    cache, out, mode = cs.Cache(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = epochs(cache, rank) if mode == "epochs" else survive(cache, rank, out)
    (out / f"{rank}.json").write_text(json.dumps(found))
    if mode == "epochs":
        dist.destroy_process_group()
    cache.close()


if __name__ == "__main__":
    main()
