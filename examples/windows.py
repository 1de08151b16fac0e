"""Train on random windows of an image and its mask that are too large to load, in Zarr, HDF5 or .npy.

    python examples/windows.py s3://bucket/scan.zarr/image s3://bucket/scan.zarr/mask /scratch/windows
    python examples/windows.py                      (makes a small pair in ./windows-demo, and reads that)

The arrays are [H, W, channels] and [H, W]. Only the chunks that a window touches are fetched.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import cachestream as cs


def make_pair(folder: Path) -> tuple[str, str]:
    """A noisy picture of discs, and where they are."""
    y, x = np.mgrid[:2048, :2048]
    mask = ((y % 256 - 128) ** 2 + (x % 256 - 128) ** 2 < 60**2).astype(np.uint8)
    noise = np.random.default_rng(0).normal(0, 40, (2048, 2048, 3))
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "image.npy", np.clip(mask[..., None] * 80 + 80 + noise, 0, 255).astype(np.uint8))
    np.save(folder / "mask.npy", mask)
    return str(folder / "image.npy"), str(folder / "mask.npy")


demo = Path("windows-demo")
image, mask = sys.argv[1:3] if len(sys.argv) > 3 else make_pair(demo)
cache = cs.Cache(sys.argv[3] if len(sys.argv) > 3 else demo / "cache", "200MB")

# Without num_units windows are drawn for ever, and old ones make room; so the filling rests after a pass.
source = cs.open_source({"image": image, "mask": mask}, window=(64, 64), num_units=8000)
loader = cs.stream(source, cache, batch_size=32, epoch_size=640, num_workers=2)

network = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 1, 5, padding=2)
)
optimizer = torch.optim.Adam(network.parameters(), 1e-2)
for epoch in range(3):
    losses = []
    for batch in loader:  # image: uint8 [32, 64, 64, 3], mask: uint8 [32, 64, 64], start: int64 [32, 2]
        images = batch["image"].permute(0, 3, 1, 2) / 255
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            network(images)[:, 0], batch["mask"].float()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: {cache.num_samples:,} windows cached, loss {np.mean(losses):.3f}")
loader.close()
