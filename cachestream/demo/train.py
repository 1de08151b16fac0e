"""Program of each rank of the demo: `torchrun … -m cachestream.demo.train FOLDER SIZE BANDWIDTH`.

All ranks run the same code; cachestream starts one worker for them, and they agree on every epoch. The first
rank reports each epoch as a line of JSON on stdout, and a rank that fails its reason.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import cachestream as cs
from cachestream.demo.data import HELD_OUT, PLACES, SIDE, TRAIN, shrink
from cachestream.demo.run import CACHE, RANKS, EpochDone, Size
from cachestream.training.batches.transfer import accelerator

_MEASURED_STEPS: Final = 30
_WARM_UP_STEPS: Final = 6
_FEWEST_STEPS: Final = 10
_LEARNING_RATE: Final = 4e-3
_BATCH: Final = 64
_SHIFT: Final = 5  # pixels

Step = Callable[[Tensor, Tensor], None]


def main(folder: str, size: str, bandwidth_bytes_per_s: str) -> None:
    kind = accelerator() or "cpu"
    module = torch.get_device_module(kind)
    count = module.device_count()  # 1 for "cpu"
    dist.init_process_group(dist.Backend.default_device_backend_map.get(kind) if count >= RANKS else "gloo")
    torch.set_num_threads(max(1, min(4, len(os.sched_getaffinity(0)) // RANKS)))
    try:
        device = torch.device("cpu")
        if count >= RANKS or kind == "cuda":  # gloo exchanges tensors of CUDA, and of the CPU
            device = torch.device(kind, dist.get_node_local_rank() % count)
            module.set_device(device)
        _train(Path(folder), Size(**json.loads(size)), int(bandwidth_bytes_per_s), device)
    except Exception as error:
        _report({"failure": f"rank {dist.get_rank()}: {type(error).__name__}: {error}"})
        raise
    finally:
        dist.destroy_process_group()


def _report(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _train(folder: Path, size: Size, bandwidth_bytes_per_s: int, device: torch.device) -> None:
    images, labels = _held_out(str(folder / HELD_OUT), device)
    # Epochs of one length, on slow machines and fast ones.
    steps = max(_FEWEST_STEPS, round(_steps_per_s(device) * size.epoch_s))
    network, step = _trainer(device, size.epochs * steps)
    with cs.stream(
        str(folder / TRAIN),
        cache=folder / CACHE,
        batch_size=_BATCH,
        num_workers=2,
        transform=shrink,
        shard_size=size.limit_bytes // 24,
        bandwidth_limit=bandwidth_bytes_per_s,
        epoch_size=steps * _BATCH * RANKS,
        min_samples=size.min_samples,
        batch_transform=augment,
        device=device,
    ) as loader:
        for epoch in range(1, size.epochs + 1):
            waited_s, began_s = loader.stats.wait_s, time.perf_counter()
            for batch in loader:
                step(batch["image"], batch["label"])
            _finish_work(device)
            seconds = time.perf_counter() - began_s
            if dist.get_rank() == 0:
                status = loader.cache.status()
                done = EpochDone(
                    epoch=epoch,
                    samples=steps * _BATCH * RANKS,
                    cached=status.num_samples,
                    seen=1.0 if status.pass_number > 1 else status.pass_done or 0.0,
                    seconds=seconds,
                    wait=(loader.stats.wait_s - waited_s) / seconds,
                    accuracy=_accuracy(network, images, labels),
                    time_s=time.time(),
                )
                _report(asdict(done))


def make_network(width: int = 32) -> nn.Sequential:
    """A small convolutional network: float32 `[B, 3, SIDE, SIDE]` to `[B, PLACES]`."""
    channels, layers = (3, width, 2 * width, 4 * width, 4 * width), list[nn.Module]()
    for before, after in itertools.pairwise(channels):
        layers.append(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False))
        layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], PLACES))


def normalise(images: Tensor) -> Tensor:
    """uint8 `[B, 3, H, W]` to float32 of zero mean and unit variance in each image."""
    values = images.float()
    deviation, mean = torch.std_mean(values, (1, 2, 3), keepdim=True)
    return values.sub_(mean).div_(deviation + 8)


def augment(batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """The demo's batch_transform, run in the loader's thread: a random shift, then normalised."""
    images = functional.pad(normalise(batch["image"]), (_SHIFT,) * 4, mode="replicate")
    left, top = torch.randint(0, 2 * _SHIFT + 1, (2,), device=generator.device, generator=generator).tolist()
    return {"image": images[..., top : top + SIDE, left : left + SIDE], "label": batch["label"]}


def _trainer(device: torch.device, total_steps: int) -> tuple[nn.Module, Step]:
    """A new network, and a training step that keeps its copies on all ranks equal."""
    torch.manual_seed(0)
    network = make_network().to(device)
    model = DistributedDataParallel(network, device_ids=None if device.type == "cpu" else [device])
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, _LEARNING_RATE, total_steps=total_steps + 1, pct_start=0.1
    )

    def step(images: Tensor, labels: Tensor) -> None:
        loss = functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()

    return network, step


def _steps_per_s(device: torch.device) -> float:
    """Training steps a second without waiting for data, the mean of all ranks."""
    _, step = _trainer(device, _WARM_UP_STEPS + _MEASURED_STEPS)
    images = torch.randn(_BATCH, 3, SIDE, SIDE, device=device)
    labels = torch.zeros(_BATCH, dtype=torch.int64, device=device)
    began_s = 0.0
    for steps in (_WARM_UP_STEPS, _MEASURED_STEPS):
        began_s = time.perf_counter()
        for _ in range(steps):
            step(images, labels)
        _finish_work(device)
    speed = torch.tensor(_MEASURED_STEPS / (time.perf_counter() - began_s), device=device)
    dist.all_reduce(speed)
    return float(speed) / RANKS


def _held_out(url: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The held-out views: float32 `[N, 3, SIDE, SIDE]` and int64 `[N]`."""
    source, rng = cs.open_source(url), np.random.default_rng(0)
    views = [shrink(sample) for unit in range(source.num_units or 0) for _, sample in source.read(unit, rng)]
    images = torch.from_numpy(np.stack([view["image"] for view in views]))
    return normalise(images).to(device), torch.tensor([view["label"] for view in views]).to(device)


@torch.inference_mode()
def _accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    network.eval()
    right = (network(images).argmax(1) == labels).float().mean()
    network.train()
    return float(right)


def _finish_work(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
