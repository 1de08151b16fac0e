"""Train with the Hugging Face Trainer, from a cache that grows while it trains.

    python examples/hf_trainer.py s3://bucket/images /scratch/images        (or torchrun --nproc-per-node 2 …)

The remote has the folders `train` and `held-out`, in each of them a folder of images for each class (to try it:
examples/make_images.py). Started again, it goes on from its last checkpoint.
"""

import argparse
import os
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import cachestream as cs
from cachestream.integrations.transformers import CacheTrainer

parser = argparse.ArgumentParser()
parser.add_argument("remote", help="a folder, or any URL that fsspec opens")
parser.add_argument("cache", help="a folder on a local disk")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--epoch-size", type=int, default=10_000, help="samples: the schedule needs equal epochs")
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()


def resize(sample: dict[str, Any]) -> dict[str, Any]:
    """Runs in the background, once for each image, before it is cached."""
    image = Image.fromarray(sample["image"].transpose(1, 2, 0)).resize((32, 32))
    return {"image": np.asarray(image).transpose(2, 0, 1), "label": sample["label"]}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10)
        )

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layers(image.float() / 64 - 2)
        return {"loss": nn.functional.cross_entropy(scores, label), "logits": scores}


settings = TrainingArguments(f"{args.cache}/checkpoints", num_train_epochs=args.epochs, learning_rate=2e-3, report_to=[],
                             save_strategy="epoch", eval_strategy="epoch", logging_strategy="epoch",
                             label_names=["label"], use_cpu=args.cpu)  # fmt: skip
both: dict[str, Any] = {"batch_size": 32, "transform": resize, "num_workers": 2}
held_out = cs.stream(f"{args.remote}/held-out", f"{args.cache}/held-out", "1GB", **both)
held_out.worker.wait()  # until all of it is cached: then it is an ordinary dataset
loader = cs.stream(f"{args.remote}/train", f"{args.cache}/train", "1GB", epoch_size=args.epoch_size, **both)
trainer = CacheTrainer(
    Classifier(),
    settings,
    train_loader=loader,
    eval_dataset=held_out.cache.snapshot(),
    data_collator=cs.collate,
    compute_metrics=lambda found: {"right": float((found.predictions.argmax(1) == found.label_ids).mean())},
)
last = os.path.isdir(str(settings.output_dir)) and get_last_checkpoint(settings.output_dir)
trainer.train(resume_from_checkpoint=last or None)
if trainer.is_world_process_zero():
    for line in trainer.state.log_history:
        if "eval_right" in line:
            print(f"epoch {line['epoch']:g}: {line['step']} steps, {line['eval_right']:.1%} right")
loader.close()
held_out.close()
