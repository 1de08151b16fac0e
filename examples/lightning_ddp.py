"""Train with PyTorch Lightning in several processes, from a cache that grows while they train.

    python examples/lightning_ddp.py s3://bucket/images /scratch/images --devices 2

The remote has the folders `train` and `held-out`, in each of them a folder of images for each class (to try it:
examples/make_images.py). Started again, it goes on from its last checkpoint, at the exact next batch.
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from PIL import Image
from torch import nn

import cachestream as cs
from cachestream.integrations.lightning import CacheDataModule, MetricsCallback

parser = argparse.ArgumentParser()
parser.add_argument("remote", help="a folder, or any URL that fsspec opens")
parser.add_argument("cache", help="a folder on a local disk")
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()


def resize(sample: dict[str, Any]) -> dict[str, Any]:
    """Runs in the background, once for each image, before it is cached."""
    image = Image.fromarray(sample["image"].transpose(1, 2, 0)).resize((32, 32))
    return {"image": np.asarray(image).transpose(2, 0, 1), "label": sample["label"]}


def stream(part: str, **options: Any) -> Any:
    """Called on every rank: one rank's worker fills, and all of them agree on the epochs."""
    folders = f"{args.remote}/{part}", f"{args.cache}/{part}"
    return cs.stream(*folders, "1GB", batch_size=32, transform=resize, num_workers=2, **options)


def held_out() -> Any:
    loader = stream("held-out", shuffle=False, drop_last=False)
    loader.worker.wait()  # until all of it is cached
    return loader


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
        )  # fmt: skip
        self.layers(torch.zeros(1, 3, 32, 32))

    def forward(self, images: torch.Tensor) -> Any:
        return self.layers(images.float() / 64 - 2)

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch["image"]), batch["label"])

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        hits = (self(batch["image"]).argmax(1) == batch["label"]).float()
        self.log("accuracy", hits.mean(), prog_bar=True, sync_dist=True, batch_size=len(hits))

    def on_train_epoch_end(self) -> None:
        batches, accuracy = (
            self.trainer.num_training_batches,
            float(self.trainer.callback_metrics["accuracy"]),
        )
        self.print(f"epoch {self.current_epoch}: {batches} batches, {accuracy:.1%} right")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


saving = pl.callbacks.ModelCheckpoint(f"{args.cache}/checkpoints", save_last=True)
strategy = "ddp" if args.devices > 1 else "auto"
trainer = pl.Trainer(max_epochs=args.epochs, devices=args.devices, strategy=strategy, default_root_dir=args.cache,
                     callbacks=[saving, MetricsCallback()], num_sanity_val_steps=0)  # fmt: skip
trainer.fit(Classifier(), datamodule=CacheDataModule(lambda: stream("train"), held_out), ckpt_path="last")
