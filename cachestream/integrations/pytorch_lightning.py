"""PyTorch Lightning, as `import pytorch_lightning`: the same as `integrations.lightning`, of its classes."""

from __future__ import annotations

from pytorch_lightning import Callback, LightningDataModule

from cachestream.integrations.lightning_hooks import DataHooks, EpochHooks, MetricsHooks

__all__ = ["CacheCallback", "CacheDataModule", "MetricsCallback", "callbacks"]


class CacheCallback(EpochHooks, Callback):
    """Gives every epoch of an EpochLoader its own length: progress bar, logging, `val_check_interval`."""


class MetricsCallback(MetricsHooks, Callback):
    """Logs `cs.metrics` of the training loader every `every_n_steps` batches and at the end of epochs."""


class CacheDataModule(DataHooks, LightningDataModule):
    __doc__ = DataHooks.__doc__
    callback = CacheCallback


def callbacks() -> list[Callback]:
    """Callbacks that the entry point adds to every Trainer."""
    return [CacheCallback()]
