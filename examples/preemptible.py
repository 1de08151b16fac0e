"""Train on a machine that may be taken away: after SIGTERM a checkpoint is written, and the next start goes on from it.

    python examples/preemptible.py s3://bucket/images/train /scratch/images /shared/run.pt --size-limit 200GB

The cache lies on a local disk, the checkpoint where the next machine finds it. Exit status 85 says: start me again.
With RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set it is one rank of a job.
"""

import argparse
import os
import signal
import sys
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

import cachestream as cs

AGAIN = 85
parser = argparse.ArgumentParser()
parser.add_argument("remote", help="a folder, or any URL that fsspec opens")
parser.add_argument("cache", help="a folder on a local disk")
parser.add_argument("checkpoint", help="a file that outlives the machine")
parser.add_argument("--size-limit", default="1GB")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
args = parser.parse_args()

told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())  # nothing else: the loop looks at it between two steps
gpu, is_job = torch.cuda.is_available(), "WORLD_SIZE" in os.environ
device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
if is_job:
    dist.init_process_group("nccl" if gpu else "gloo")


def resize(sample: dict[str, Any]) -> dict[str, Any]:
    """Runs in the background, once for each image, before it is cached."""
    image = Image.fromarray(sample["image"].transpose(1, 2, 0)).resize((32, 32))
    return {"image": np.asarray(image).transpose(2, 0, 1), "label": sample["label"]}


def interrupted() -> bool:
    """Return whether any rank has been told to end: all of them stop after the same step."""
    flag = torch.tensor(float(told.is_set()), device=device)
    if is_job:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def save() -> None:
    """Replace the checkpoint by a whole one, never by a part of one."""
    if not is_job or dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, f"{args.checkpoint}.new")
        os.replace(f"{args.checkpoint}.new", args.checkpoint)


loader = cs.stream(args.remote, args.cache, args.size_limit, batch_size=16, transform=resize, device=device)
network = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10)).to(
    device
)
model = nn.parallel.DistributedDataParallel(network) if is_job else network
optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3)
parts: dict[str, Any] = {"model": network, "optimiser": optimiser, "loader": loader}
if os.path.exists(args.checkpoint):
    for name, state in torch.load(args.checkpoint, map_location=device).items():
        parts[name].load_state_dict(state)
step = 0
for epoch in range(loader.epoch, args.epochs):
    for batch in loader:  # from the checkpoint's next batch on
        loss = nn.functional.cross_entropy(model(batch["image"].float() / 64 - 2), batch["label"])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        step += 1
        if (ending := interrupted()) or step % args.every == 0:
            save()
        if ending:
            print(f"epoch {epoch}: interrupted after {step} steps of this start", flush=True)
            loader.close()
            sys.exit(AGAIN)
    save()
    print(f"epoch {epoch}: {loader.stats.epoch_samples} samples, step {step} of this start", flush=True)
loader.close()
