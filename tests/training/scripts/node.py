"""A rank on one of several hosts, as torchrun starts it: `node.py SETTINGS`; logs to OUT/<rank>-<pid>.jsonl.

It trains with `cs.stream`, as users do, and checkpoints after every step. No collectives while training: they would
wait for a host that is cut off before the loader can say which it is.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import cachestream as cs
from cachestream.streaming import StreamLoader

STEP_S: Final = 0.01
LINGER_S: Final = 600.0  # however slow the machine is: ranks that are started again find the worker


@dataclass(frozen=True)
class Settings:
    """`cache` is a folder: each host has a cache of its own in it, unless it is `shared`.

    It trains until the file OUT/stop is there. `first`: it waits until all is cached.
    """

    remote: str
    cache: str
    out: str
    first: bool = False
    shared: bool = False
    timeout_s: float = 30.0
    batch_size: int = 4
    epoch_size: int | None = None
    storage_options: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Log:
    """A line for each event, there at once."""

    def __init__(self, out: Path, rank: int) -> None:
        self._file = (out / f"{rank}-{socket.gethostname()}-{os.getpid()}.jsonl").open("x", encoding="utf-8")

    def __call__(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "s": time.monotonic(), **values}) + "\n")
        self._file.flush()


def begin(settings: Settings, log: Log) -> StreamLoader:
    """The loader, from the checkpoint if there is one; logs what it found."""
    cache = settings.cache if settings.shared else f"{settings.cache}/{socket.gethostname()}"
    before = cs.Cache(cache, "20MB", min_free=0)
    samples, worker = before.num_samples, before.status().worker
    options: dict[str, Any] = {}
    if settings.storage_options is not None:
        options["storage_options"] = settings.storage_options
    loader = cs.stream(
        settings.remote,
        before,
        batch_size=settings.batch_size,
        num_workers=1,
        epoch_size=settings.epoch_size,
        timeout_s=settings.timeout_s,
        drop_last=False,
        linger_s=LINGER_S,
        **options,
    )
    checkpoint = Path(settings.out, "checkpoint.pt")
    if checkpoint.exists():
        loader.load_state_dict(torch.load(checkpoint, weights_only=True))
    log(
        "begin",
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        host=socket.gethostname(),
        pid=os.getpid(),
        cached=samples,
        worker=None if worker is None else worker.pid,
        attached=loader.worker.attached,
        epoch=loader.epoch,
        done=checkpoint.exists() and loader.state_dict()["batch"],
    )
    return loader


def train(settings: Settings, loader: StreamLoader, log: Log) -> None:
    out, rank = Path(settings.out), dist.get_rank()
    while not (out / "stop").exists():
        epoch, began_s = loader.epoch, time.monotonic()
        try:
            for batch in loader:
                log("step", epoch=epoch, numbers=batch["number"].tolist())
                time.sleep(STEP_S)
                began_s = time.monotonic()
                if rank == 0:
                    torch.save(loader.state_dict(), out / "new.pt")
                    os.replace(out / "new.pt", out / "checkpoint.pt")
        except cs.CacheStreamError as error:
            if (out / "stop").exists():
                return  # the others have ended an epoch earlier
            log("error", kind=type(error).__name__, message=str(error), waited_s=time.monotonic() - began_s)
            raise
        log("epoch", epoch=epoch, length=loader.stats.epoch_samples)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    log = Log(Path(settings.out), dist.get_rank())
    with begin(settings, log) as loader:
        if settings.first:
            loader.worker.wait(settings.timeout_s)
            dist.barrier()
        train(settings, loader, log)
    log("end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
