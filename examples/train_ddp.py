"""Train with DDP on images that are remote and larger than the disk, while the local cache of them grows.

    torchrun --nproc-per-node 2 examples/train_ddp.py s3://bucket/images /scratch/images --size-limit 200GB

The remote has the folders `train` and `held-out`, in each of them a folder of images for each class (to try it:
examples/make_images.py). Started again, it goes on where it stopped.
"""

import argparse
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

import cachestream as cs

parser = argparse.ArgumentParser()
parser.add_argument("remote", help="a folder, or any URL that fsspec opens")
parser.add_argument("cache", help="a folder on a local disk")
parser.add_argument("--size-limit", default="1GB")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()


def resize(sample: dict[str, Any]) -> dict[str, Any]:
    """Runs in the background, once for each image, before it is cached."""
    image = Image.fromarray(sample["image"].transpose(1, 2, 0)).resize((48, 48))
    return {"image": np.asarray(image).transpose(2, 0, 1), "label": sample["label"]}


def normalise(batch: dict[str, Any]) -> dict[str, Any]:
    """Runs on whole batches, in the loader's thread: uint8 [B, 3, 48, 48] to float32."""
    return {"image": batch["image"].float() / 64 - 2, "label": batch["label"]}


gpu = torch.cuda.is_available()
device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"
dist.init_process_group("nccl" if gpu else "gloo")

both: dict[str, Any] = {"batch_size": 64, "transform": resize, "batch_transform": normalise, "device": device}
source = cs.FileSource(f"{args.remote}/train")
loader = cs.stream(source, f"{args.cache}/train", args.size_limit, **both)
held_out = cs.stream(f"{args.remote}/held-out", f"{args.cache}/held-out", drop_last=False, **both)

layers: list[nn.Module] = []
for channels, wider in ((3, 32), (32, 64), (64, 128), (128, 128)):
    layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.GroupNorm(8, wider), nn.ReLU()]
layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, len(source.label_names))]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).to(device))
optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
parts: dict[str, Any] = {"model": model, "optimiser": optimiser, "loader": loader}
checkpoint = f"{args.cache}/checkpoint.pt"
if os.path.exists(checkpoint):
    for name, state in torch.load(checkpoint, map_location=device).items():
        parts[name].load_state_dict(state)

held_out.worker.wait()  # until all of it is cached
for epoch in range(loader.epoch, args.epochs):
    for batch in loader:  # every iteration is a new epoch over what is cached by now
        loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    with torch.inference_mode():
        hits = torch.cat([model(batch["image"]).argmax(1) == batch["label"] for batch in held_out])
    right = torch.tensor([hits.sum(), len(hits)], device=device)
    dist.all_reduce(right)
    if dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts.items()}, checkpoint)
        accuracy, stats = float(right[0] / right[1]), loader.stats
        print(
            f"epoch {epoch}: {stats.epoch_samples:,} samples, {stats.wait_share:.1%} waiting, {accuracy:.1%} right"
        )
loader.close()
held_out.close()
dist.destroy_process_group()
