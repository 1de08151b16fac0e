"""Network of the demo, and the preparation of its batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from cachestream.demo.data import PLACES, SIDE

_SHIFT: Final = 5  # pixels


def make_network(width: int = 32) -> nn.Sequential:
    """A small convolutional network: float32 `[B, 3, SIDE, SIDE]` to `[B, PLACES]`."""
    layers: list[nn.Module] = []
    channels = 3
    for factor in (1, 2, 4, 4):
        layers += [
            nn.Conv2d(channels, factor * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(factor * width),
            nn.ReLU(inplace=True),
        ]
        channels = factor * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, PLACES))


def normalise(images: Tensor) -> Tensor:
    """uint8 `[B, 3, H, W]` to float32 of zero mean and unit variance in each image."""
    values = images.float()
    over = (1, 2, 3)
    mean, deviation = values.mean(over, keepdim=True), values.std(over, keepdim=True)
    return values.sub_(mean).div_(deviation + 8)


def augment(batch: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """The demo's batch_transform, run in the loader's thread: a random shift of the batch, then
    normalised.
    """
    pad = (_SHIFT,) * 4
    images = functional.pad(normalise(batch["image"]), pad, mode="replicate")
    left, top = torch.randint(0, 2 * _SHIFT + 1, (2,), device=generator.device, generator=generator).tolist()
    return {"image": images[..., top : top + SIDE, left : left + SIDE], "label": batch["label"]}
