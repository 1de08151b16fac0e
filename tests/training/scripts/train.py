"""A training job of one rank, as torchrun starts it: `train.py CACHE OUT MODE`; writes OUT/<rank>.json.

MODE "survive" waits for a rank to be killed, and reports what the others are told; "early" asks loaders before the
ranks know one another; "anew" goes on with fewer and fewer ranks.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

import cachestream as cs
from cachestream.storage import catalogue
from tests.support.caches import numbers


def survive(cache: cs.Cache, rank: int, out: Path) -> dict[str, Any]:
    """Train until the loader says that a rank is gone; no collectives, which would fail first."""
    with cs.EpochLoader(cache, 4, epoch_size=24, timeout_s=8) as loader:
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


def early(cache: cs.Cache, rank: int, out: Path) -> dict[str, Any]:
    """The epochs of loaders that were asked before `init_process_group`; rank 0 is Lightning's first process."""
    world_size = os.environ["WORLD_SIZE"]
    if rank == 0:
        del os.environ["WORLD_SIZE"]
    options: dict[str, dict[str, Any]] = {
        "recorded": {"record": out / "recorded"},
        "replayed": {"replay": out / "alone"},
    }
    names = ("len", "iter", "dataset", "taken", "resumed", "recorded", "replayed")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaders = {name: cs.EpochLoader(cache, 4, **options.get(name, {})) for name in names}
        loaders["resumed"].load_state_dict(json.loads((out / "state.json").read_text()))
        lengths = {name: [len(loaders[name])] for name in ("len", "resumed", "recorded", "replayed")}
        begun, taken = iter(loaders["iter"]), iter(loaders["taken"])
        assert len(loaders["dataset"].dataset) == cache.num_samples
        next(taken)
        os.environ["WORLD_SIZE"] = world_size
        dist.init_process_group("gloo")
        error = ""
        try:
            next(taken)
        except cs.EpochError as refused:
            error = str(refused)
        for name, found in lengths.items():
            found.append(len(loaders[name]))
        given = {name: numbers(begun if name == "iter" else loader) for name, loader in loaders.items()}
    for loader in loaders.values():
        loader.close()
    return {
        "given": given,
        "lengths": lengths,
        "error": error,
        "epoch": loaders["taken"].epoch,
        "told": [str(one.message) for one in told],
    }


def anew(cache: cs.Cache, rank: int, out: Path) -> dict[str, Any]:
    """The epochs of one loader in jobs of 3 ranks, 2, and 1, each made anew at the same address when the one before ended."""
    port, found = os.environ["MASTER_PORT"], []
    with cs.EpochLoader(cache, 4) as loader:
        for size in (3, 2, 1):
            if rank < size:
                dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
                found.append(numbers(loader))
                (out / f"{rank}.{size}").touch()
                while not all((out / f"{other}.{size}").exists() for other in range(size)):
                    time.sleep(0.02)
                dist.destroy_process_group()
                # Who comes earlier than that would meet the store of the job that ends.
                over = out / f"over.{size}"
                if rank == 0:
                    over.touch()
                while not over.exists():
                    time.sleep(0.02)
    return {"epochs": found}


def main() -> None:
    out, mode = Path(sys.argv[2]), sys.argv[3]
    if mode == "survive":
        # The rank that is stopped may hold a lock: waiting for that and for the rank takes less than the 8 s.
        setattr(catalogue, "LOCK_TIMEOUT_S", 2.0)  # noqa: B010  in this process
    cache = cs.Cache(sys.argv[1])
    if mode == "survive":
        dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    modes = {"survive": survive, "early": early, "anew": anew}
    found = modes[mode](cache, rank, out)
    (out / f"{rank}.json").write_text(json.dumps(found))
    if mode == "early":
        dist.destroy_process_group()
    cache.close()


if __name__ == "__main__":
    main()
