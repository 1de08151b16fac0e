"""PyTorch Lightning, as `import lightning.pytorch`: a data module, and callbacks.

`trainer.fit(model, loader)` needs none of it: an entry point of this package adds `CacheCallback` to every
Trainer. It does nothing in a Trainer that trains from something else.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningDataModule

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
