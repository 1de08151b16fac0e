"""Train with Ray Train: every worker calls cachestream as it would without Ray.

    python examples/ray_train.py s3://bucket/images/train /scratch/images --workers 2 --share images

/scratch is a local disk of each node. With --share each image is read once for all, and cached on every node.
When a worker dies, all go on from the last checkpoint.
"""

import argparse
import os
import tempfile
from typing import Any

import numpy as np
import ray.train
import torch
from PIL import Image
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import cachestream as cs


def resize(sample: dict[str, Any]) -> dict[str, Any]:
    """Runs in the background, once for each image, before it is cached."""
    image = Image.fromarray(sample["image"].transpose(1, 2, 0)).resize((32, 32))
    return {"image": np.asarray(image).transpose(2, 0, 1), "label": sample["label"]}


def train(args: dict[str, Any]) -> None:
    """What each worker runs; Ray has initialised torch.distributed, by which the loaders find each other."""
    network = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 15 * 15, 10))
    model = prepare_model(network)
    device = ray.train.torch.get_device()
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # Not ray.train.torch.prepare_data_loader: the loader has shared the samples out among the ranks already.
    options: dict[str, Any] = {"batch_size": 32, "transform": resize, "num_workers": 2, "device": device}
    options["share"] = args["share"]
    loader = cs.stream(args["remote"], args["cache"], "1GB", **options)
    parts: dict[str, Any] = {"model": model, "optimiser": optimiser, "loader": loader}
    if saved := ray.train.get_checkpoint():
        with saved.as_directory() as folder:
            for name, state in torch.load(f"{folder}/state.pt", map_location=device).items():
                parts[name].load_state_dict(state)
    for epoch in range(loader.epoch, args["epochs"]):
        for batch in loader:  # every iteration is a new epoch over what is cached by now
            loss = nn.functional.cross_entropy(model(batch["image"].float() / 64 - 2), batch["label"])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save({name: part.state_dict() for name, part in parts.items()}, f"{folder}/state.pt")
                kept = Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, **cs.metrics(loader)}, checkpoint=kept)
    loader.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("remote", help="a folder, or any URL that fsspec opens")
    parser.add_argument("cache", help="a folder on a local disk")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--share", help="a name for the caches of the nodes")
    parser.add_argument("--gpu", action="store_true", help="one for each worker")
    settings = parser.parse_args()
    settings.cache = os.path.abspath(settings.cache)  # workers run in a folder of their own
    settings.remote = settings.remote if "://" in settings.remote else os.path.abspath(settings.remote)
    retried = FailureConfig(max_failures=3)
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(settings),
        scaling_config=ScalingConfig(num_workers=settings.workers, use_gpu=settings.gpu),
        run_config=RunConfig(storage_path=f"{settings.cache}-runs", failure_config=retried),
    )
    last: dict[str, Any] = trainer.fit().metrics or {}
    print(f"epoch {last['epoch']}: {last['cachestream/batches']} batches on each worker so far")
