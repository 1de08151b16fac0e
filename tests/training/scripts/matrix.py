"""Jobs of so many ranks, one after the other: `matrix.py METHOD EPOCHS OUT RANKS...`; writes OUT/<ranks>-<case>.json.

Each job's processes are started once, by METHOD of multiprocessing, and go through all cases together: one cache or
two, equal ones or not, with the last batch or without. In the midst of each case a cache grows.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import cachestream as cs
from tests.support.caches import add_shard, fill, numbered
from tests.training.scripts.ports import free_port

SIZES: Final = (1, 2, 4)
BATCH_SIZE: Final = 3
PATIENCE_S: Final = 600.0


@dataclass(frozen=True)
class Case:
    """`caches` 1 or 2 for the ranks in equal parts; `unequal`: the second one holds other shards."""

    caches: int
    unequal: bool
    drop_last: bool

    @property
    def name(self) -> str:
        return "-".join(str(int(value)) for value in asdict(self).values())


CASES: Final = tuple(
    Case(caches, unequal, drop_last)
    for (caches, unequal), drop_last in itertools.product([(1, False), (2, False), (2, True)], [True, False])
)


def run_case(case: Case, rank: int, size: int, folder: Path, epochs: int) -> list[list[list[int]]]:
    """`[epoch][step]` is a list of numbers; after a third of the epochs the first cache grows."""
    mine = rank * case.caches // size
    if rank in {0, size // 2 if case.caches == 2 else 0}:
        shards, each = (2, 9) if case.unequal and mine else (3, 11)
        fill(folder / str(mine), shards, each, 1000 * mine).close()
    dist.barrier()
    found = []
    options: dict[str, Any] = {"drop_last": case.drop_last, "timeout_s": PATIENCE_S}
    with cs.Cache(folder / str(mine)) as cache, cs.EpochLoader(cache, BATCH_SIZE, **options) as loader:
        for epoch in range(epochs):
            expected = len(loader)
            found.append([batch["number"].tolist() for batch in loader])
            assert len(found[-1]) == expected, f"epoch {epoch}: {len(found[-1])} steps, not {expected}"
            if rank == 0 and epoch == epochs // 3:
                add_shard(cache, numbered(500, 11))
    return found


def run_rank(rank: int, size: int, port: int, epochs: int, out: str) -> None:
    """All cases, as one rank of `size`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    for case in CASES:
        mine = run_case(case, rank, size, Path(out, f"caches-{size}-{case.name}"), epochs)
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(mine, gathered)
        if rank == 0:
            Path(out, f"{size}-{case.name}.json").write_text(json.dumps(gathered))
    dist.destroy_process_group()


def main() -> None:
    method, epochs, out, *sizes = sys.argv[1:]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["tests.training.scripts.matrix"])
    for size in map(int, sizes):
        port = free_port()
        ranks = [
            context.Process(target=run_rank, args=(rank, size, port, int(epochs), out))  # type: ignore[attr-defined]
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        codes = [process.exitcode for process in ranks]
        if any(codes):
            sys.exit(f"{size} ranks ended with {codes}")


if __name__ == "__main__":
    main()
