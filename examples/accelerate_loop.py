"""Train with Hugging Face Accelerate, from a cache that grows while it trains.

    accelerate launch --num_processes 2 examples/accelerate_loop.py s3://bucket/images/train /scratch/images

The remote has a folder of images for each class (to try it: examples/make_images.py). Started again, it goes on from
its last checkpoint.
"""

import argparse
import os
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn

import cachestream as cs
from cachestream.integrations.accelerate import prepare_loader

parser = argparse.ArgumentParser()
parser.add_argument("remote", help="a folder, or any URL that fsspec opens")
parser.add_argument("cache", help="a folder on a local disk")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()


def resize(sample: dict[str, Any]) -> dict[str, Any]:
    """Runs in the background, once for each image, before it is cached."""
    image = Image.fromarray(sample["image"].transpose(1, 2, 0)).resize((32, 32))
    return {"image": np.asarray(image).transpose(2, 0, 1), "label": sample["label"]}


accelerator = Accelerator(gradient_accumulation_steps=2)
loader = cs.stream(args.remote, args.cache, "1GB", batch_size=32, transform=resize, num_workers=2)
network = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10))
optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3)
model, optimiser = accelerator.prepare(network, optimiser)
batches = prepare_loader(accelerator, loader)

checkpoint = f"{args.cache}/checkpoint"
if os.path.isdir(checkpoint):
    accelerator.load_state(checkpoint)
for epoch in range(loader.epoch, args.epochs):
    hits = []
    for batch in batches:  # every iteration is a new epoch over what is cached by now
        with accelerator.accumulate(model):
            scores = model(batch["image"].float() / 64 - 2)
            accelerator.backward(nn.functional.cross_entropy(scores, batch["label"]))
            optimiser.step()
            optimiser.zero_grad()
        hits.append(accelerator.gather_for_metrics(scores.argmax(1) == batch["label"]))
    accelerator.save_state(checkpoint)
    right = torch.cat(hits).float().mean().item()
    accelerator.print(
        f"epoch {epoch}: {len(hits)} batches on each of {accelerator.num_processes}, {right:.1%} right"
    )
loader.close()
accelerator.end_training()
