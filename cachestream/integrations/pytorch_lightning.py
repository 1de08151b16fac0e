"""PyTorch Lightning, as `import pytorch_lightning`: the same as `integrations.lightning`, of its classes."""

from __future__ import annotations

from pytorch_lightning import Callback, LightningDataModule

from cachestream.integrations.lightning_hooks import make_classes

__all__ = ["CacheCallback", "CacheDataModule", "MetricsCallback", "callbacks"]

CacheCallback, MetricsCallback, CacheDataModule = make_classes(Callback, LightningDataModule, __name__)


def callbacks() -> list[Callback]:
    """Callbacks that the entry point adds to every Trainer."""
    return [CacheCallback()]
