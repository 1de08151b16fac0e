"""Augmentations as torch operations on whole batches: random crop, flip and normalisation, each sample its own draw.

    python examples/augment.py               (needs nothing else; 10 s)

Torchvision's transforms take one image at a time, thousands of small calls a batch. Here a batch takes a dozen, whatever
its size. `batch_transform` runs them in threads beside the training, on the GPU with `device="cuda"`. The last lines say
what they cost on this machine, beside what the loader gives without them.
"""

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import torch

import cachestream as cs

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=1024)
parser.add_argument("--size", type=int, default=256, help="height and width of the cached images")
parser.add_argument("--crop", type=int, default=224)
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()

MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None] * 255  # of ImageNet, for bytes
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None] * 255


def random_crop(images: torch.Tensor, size: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """`[B, C, H, W]` to `[B, C, size, size]`, from another place in each image: one copy of all rows that are left."""
    count, channels, height, width = images.shape
    tops = torch.randint(height - size + 1, (count, 1, 1), device=images.device, generator=generator)
    lefts = torch.randint(width - size + 1, (count, 1, 1), device=images.device, generator=generator)
    planes = torch.arange(count * channels, device=images.device).view(count, channels, 1) * height
    starts = (planes + tops + torch.arange(size, device=images.device)) * width + lefts
    # A row of `size` pixels begins at every pixel; they overlap, and none is copied but those asked for.
    rows = images.contiguous().as_strided((images.numel() - size + 1, size), (1, 1))
    return rows.index_select(0, starts.flatten()).view(count, channels, size, size)


def random_flip(images: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Every second image, by chance, from right to left; in place."""
    draws = torch.rand(len(images), device=images.device, generator=generator)
    chosen = (draws < 0.5).nonzero().squeeze(1)
    return images.index_copy_(0, chosen, images[chosen].flip(-1))


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 to float32 of mean 0 and deviation 1."""
    return images.float().sub_(MEAN.to(images.device)).div_(STD.to(images.device))


def augment(batch: dict[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """The function for `batch_transform=`: by this generator it draws the same in every run, and after a resume. Crop and
    flip first: bytes are a quarter of the floats.
    """
    images = random_crop(batch["image"], args.crop, generator)
    return batch | {"image": normalise(random_flip(images, generator))}


def images_per_s(cache: cs.Cache, **options: Any) -> float:
    with cs.EpochLoader(cache, args.batch_size, **options) as loader:
        sum(1 for _ in loader)  # opens and verifies the shards
        begun_s = time.perf_counter()
        count: int = args.batch_size * sum(1 for _ in range(5) for _ in loader)
        return count / (time.perf_counter() - begun_s)


def main() -> None:
    shape = (3, args.size, args.size)
    samples = [{"image": np.full(shape, i % 251, np.uint8), "label": i % 10} for i in range(args.samples)]
    with tempfile.TemporaryDirectory() as folder, cs.Cache(f"{folder}/cache", size_limit="2GB") as cache:
        with cs.start_worker(cache, samples, num_workers=1) as worker:
            worker.wait(120)
        plain, augmented = images_per_s(cache), images_per_s(cache, batch_transform=augment)
    print(f"{args.size} x {args.size} images in batches of {args.batch_size}:")
    print(f"  loader alone              {plain:10,.0f} images/s")
    print(f"  crop, flip and normalise  {augmented:10,.0f} images/s")


if __name__ == "__main__":
    main()
