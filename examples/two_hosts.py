"""Train on two hosts, the second of which fills its cache from that of the first: the remote is read once, without Ray.

    run="torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host-0:29500"
    $run examples/two_hosts.py s3://bucket/train /scratch/train                               (on the first host)
    $run examples/two_hosts.py sftp://host-0/scratch/train /scratch/train --from-cache        (on the second)

/scratch is a local disk of each host.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import cachestream as cs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "remote", help="a URL that fsspec opens; with --from-cache that of the other host's cache"
    )
    parser.add_argument("cache", help="a folder on a local disk")
    parser.add_argument("--from-cache", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    cache = cs.Cache(args.cache, "1GB")
    if args.from_cache:
        dist.barrier()  # the first host has filled its cache
    worker = cs.start_worker(cache, cs.CacheSource(args.remote) if args.from_cache else args.remote)
    worker.wait(timeout_s=600)
    if not args.from_cache:
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
        print(f"{args.cache}: {cache.num_samples} samples, loss {loss:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
