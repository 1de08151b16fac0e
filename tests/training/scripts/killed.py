"""A training job that is killed again and again: `killed.py CACHE OUT KILLS SEED MODE`; writes OUT/<epoch>.json.

Each life is one or more forked ranks that resume from the last checkpoint, which holds the loader's state as any
trainer's does, and log the keys of every batch. What a life did after its last checkpoint is forgotten with it. MODE
"alone" keeps one rank and one batch size over a cache that stays as it is; "changing" has 1 to 3 ranks, another batch
size in each life, and a cache that grows between them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import cachestream as cs
from cachestream.training.loader import EpochLoader
from tests.support.caches import add_shard, numbered
from tests.training.scripts.ports import free_port

STEP_S: Final = 0.002
PATIENCE_S: Final = 180.0
EPOCHS_AFTER: Final = 2  # whole epochs at the end, when nobody is killed any more


def train(cache: cs.Cache, out: Path, rank: int, world: int, batch_size: int, last_epoch: int | None) -> None:
    """One life of one rank, up to and with `last_epoch`."""
    checkpoint = out / "checkpoint.pt"
    with EpochLoader(cache, batch_size, drop_last=False, with_keys=True, record=out / "run") as loader:
        if checkpoint.exists():
            loader.load_state_dict(torch.load(checkpoint, weights_only=True)["loader"])
        log = (out / f"log-{rank}").open("w", encoding="utf-8")
        step = 0
        while last_epoch is None or loader.epoch <= last_epoch:
            epoch = loader.epoch
            for batch in loader:
                time.sleep(STEP_S)
                log.write(json.dumps([epoch, batch["__key__"]]) + "\n")
                log.flush()
                step += 1
                if world > 1:
                    dist.barrier()
                if rank == 0:
                    torch.save({"loader": loader.state_dict(), "steps": step}, out / "new.pt")
                    os.replace(out / "new.pt", checkpoint)


def start(cache: cs.Cache, out: Path, world: int, batch_size: int, last_epoch: int | None) -> list[int]:
    """Fork the ranks of one life; returns their process ids."""
    port, pids = free_port(), []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        try:
            if world > 1:
                dist.init_process_group(
                    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
                )
            train(cache, out, rank, world, batch_size, last_epoch)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - whatever it is, the test shall see it
            (out / f"error-{time.monotonic_ns()}").write_text(traceback.format_exc())
            os._exit(1)
    return pids


def kept(out: Path, world: int) -> list[tuple[int, list[list[str]]]]:
    """The part of a life that its last checkpoint holds: for each step the epoch, and the keys on each rank."""
    steps = 0
    if (out / "checkpoint.pt").exists():
        saved = torch.load(out / "checkpoint.pt", weights_only=True)
        steps = saved["steps"]
        torch.save(saved | {"steps": 0}, out / "checkpoint.pt")
    logs = [(out / f"log-{rank}").read_text().splitlines()[:steps] if steps else [] for rank in range(world)]
    found = []
    for lines in zip(*logs, strict=True):
        said = [json.loads(line) for line in lines]
        found.append((said[0][0], [keys for _, keys in said]))
    return found


def wait_for_steps(out: Path, rng: random.Random, pids: list[int]) -> None:
    """Until a random moment: most often in the midst of training, at times before the first step."""
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0, 0.2))
        return
    before = stamp(out)
    give_up = time.monotonic() + PATIENCE_S
    while stamp(out) == before and time.monotonic() < give_up and alive(pids):
        time.sleep(0.002)
    time.sleep(rng.expovariate(1 / 0.06))


def stamp(out: Path) -> int:
    try:
        return (out / "checkpoint.pt").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def alive(pids: list[int]) -> bool:
    return not any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids)


def main() -> None:
    root, folder, kills, seed, mode = sys.argv[1:]
    torch.set_num_threads(1)
    cache, out, rng = cs.Cache(root), Path(folder), random.Random(int(seed))
    changing = mode == "changing"
    epochs: dict[int, list[Any]] = defaultdict(list)
    next_number = cache.num_samples
    for life in range(int(kills) + 1):
        last = life == int(kills)
        world, batch_size = (rng.randint(1, 3), rng.randint(2, 6)) if changing else (1, 4)
        if changing and rng.random() < 0.4:
            add_shard(cache, numbered(next_number, 8))
            next_number += 8
        last_epoch = max(epochs, default=0) + EPOCHS_AFTER if last else None
        pids = start(cache, out, world, batch_size, last_epoch)
        if not last:
            wait_for_steps(out, rng, pids)
            rng.shuffle(pids)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        for epoch, step in kept(out, world):
            epochs[epoch].append(step)
    cache.close()
    (out / "result.json").write_text(json.dumps(epochs))


if __name__ == "__main__":
    main()
