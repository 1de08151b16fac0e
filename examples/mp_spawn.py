"""Train with DDP in processes that torch.multiprocessing starts: no torchrun, nothing else to set up.

    python examples/mp_spawn.py s3://bucket/images/train /scratch/images --ranks 2

The remote has a folder of images for each class (to try it: examples/make_images.py).
"""

import argparse
import os
import socket
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from torch import nn

import cachestream as cs


def resize(sample: dict[str, Any]) -> dict[str, Any]:
    """Runs in the background, once for each image, before it is cached."""
    image = Image.fromarray(sample["image"].transpose(1, 2, 0)).resize((32, 32))
    return {"image": np.asarray(image).transpose(2, 0, 1), "label": sample["label"]}


def train(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    torch.set_num_threads(1)
    network = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10))
    model = nn.parallel.DistributedDataParallel(network)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # The same call on every rank: one rank's worker fills, and all of them agree on the epochs.
    with cs.stream(
        args.remote, args.cache, "1GB", batch_size=32, transform=resize, num_workers=2, epoch_size=args.epoch_size
    ) as loader:  # fmt: skip
        for epoch in range(args.epochs):
            losses = []
            for batch in loader:  # every iteration is a new epoch over what is cached by now
                loss = nn.functional.cross_entropy(model(batch["image"].float() / 64 - 2), batch["label"])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                losses.append(loss.item())
            if rank == 0:
                print(
                    f"epoch {epoch}: {len(losses)} batches on each of {args.ranks}, loss {np.mean(losses):.3f}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("remote", help="a folder, or any URL that fsspec opens")
    parser.add_argument("cache", help="a folder on a local disk")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--epoch-size", type=int, help="samples in an epoch; all that are cached by default")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    settings = parser.parse_args()
    mp.spawn(train, (free_port, settings), nprocs=settings.ranks)  # type: ignore[attr-defined, no-untyped-call]
