"""PyTorch Lightning, as `import lightning.pytorch`: a data module, and callbacks.

`trainer.fit(model, loader)` needs none of it: an entry point of this package adds `CacheCallback` to every
Trainer. It does nothing in a Trainer that trains from something else.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningDataModule

from cachestream.integrations.lightning_hooks import make_classes

__all__ = ["CacheCallback", "CacheDataModule", "MetricsCallback", "callbacks"]

CacheCallback, MetricsCallback, CacheDataModule = make_classes(Callback, LightningDataModule, __name__)


def callbacks() -> list[Callback]:
    """Callbacks that the entry point adds to every Trainer."""
    return [CacheCallback()]
