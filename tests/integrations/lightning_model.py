"""A model of Lightning's for the tests of what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch

__all__ = ["Model"]


class Model(pl.LightningModule):
    """Notes the numbers of the samples it is given, an epoch at a time."""

    def __init__(self, at_epoch_end: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(5))
        self.epochs: list[list[list[int]]] = []
        self.validated_after: list[int] = []
        self.bars: list[float] = []
        self.at_epoch_end = at_epoch_end

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])
        self.bars.append(self.trainer.num_training_batches)

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        if not self.epochs:  # resumed in the midst of an epoch
            self.epochs.append([])
        self.epochs[-1].append(batch["number"].tolist())
        loss: torch.Tensor = ((batch["x"] @ self.weight) - 1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["x"]))
        return loss

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        if index == 0:
            self.validated_after.append(sum(len(epoch) for epoch in self.epochs))

    def on_train_epoch_end(self) -> None:
        if self.at_epoch_end:
            self.at_epoch_end(self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)
