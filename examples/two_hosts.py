r"""Train on two hosts, the second of which fills its cache from that of the first: the remote is read once, without Ray.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host-0:29500 \
        examples/two_hosts.py s3://bucket/train /scratch/train --first sftp://host-0/scratch/train

The first host is that of rank 0. /scratch is a local disk of each host; `--first` is the cache of the first host as the second
one sees it.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

import cachestream as cs


def open_first(url: str, timeout_s: float = 120.0) -> cs.CacheSource:
    """The cache of the first host, as soon as it holds a shard."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return cs.CacheSource(url)
        except cs.SourceError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("remote")
    parser.add_argument("cache", help="a folder on a local disk")
    parser.add_argument("--first", required=True, help="the path or URL of the first host's cache")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    cache = cs.Cache(args.cache, "1GB")
    source = cs.open_source(args.remote) if is_first else open_first(args.first)
    worker = cs.start_worker(cache, source, num_workers=1)
    if is_first:
        worker.wait(timeout_s=600)  # the second host lists what is there when it opens the cache
    dist.barrier()
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    with worker, cs.EpochLoader(cache, batch_size=32, min_samples=64) as loader:
        for _ in range(args.epochs):
            for batch in loader:  # {"array": float32 [32, 256]}
                loss = nn.functional.mse_loss(model(batch["array"]), batch["array"])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        print(f"rank {dist.get_rank()}: {cache.num_samples} samples, loss {loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
