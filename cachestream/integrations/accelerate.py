"""Hugging Face Accelerate: a loader for its gradient accumulation, `gather_for_metrics` and checkpoints.

`accelerator.prepare(loader)` returns an EpochLoader unchanged: the loader has divided the samples among the
ranks already. But Accelerate then does not know when an epoch ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from cachestream.errors import ConfigError
from cachestream.training.loader import EpochLoader

__all__ = ["PreparedLoader", "prepare_loader"]


def prepare_loader(accelerator: Accelerator, loader: EpochLoader) -> PreparedLoader:
    """Wrap `loader` for `accelerator`: its device, its checkpoints, and its notice of the end of every epoch.

    `accelerator.save_state` and `load_state` save and load the loader's position, so that training goes on at
    the exact next batch; `skip_first_batches` is refused. `accelerator.prepare` may be called on the result,
    which it leaves unchanged. Raises ConfigError for an `accelerator` that splits or dispatches batches,
    which would have no effect.
    """
    if accelerator.split_batches or accelerator.dispatch_batches:
        raise ConfigError(
            "split_batches and dispatch_batches would have no effect: every rank gets batches of its own "
            "from its EpochLoader, of that loader's batch_size; leave them out of the DataLoaderConfiguration"
        )
    accelerator.register_for_checkpointing(loader)
    return PreparedLoader(accelerator, loader)


class PreparedLoader:
    """An EpochLoader, with all its attributes, that tells Accelerate when its last batch is in use.

    Batches are not filled up with repeated samples, so `gather_for_metrics` has nothing to remove.
    """

    remainder = 0

    def __init__(self, accelerator: Accelerator, loader: EpochLoader) -> None:
        self.loader = loader
        self.end_of_dataloader = False
        self._device = accelerator.device
        self._gradients = GradientState()

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        total = len(self.loader)
        self.end_of_dataloader = False
        self._gradients._add_dataloader(self)
        try:
            for batch in batches:
                self.end_of_dataloader = self.loader.batches_done >= total
                yield send_to_device(batch, self._device)
        finally:
            self._gradients._remove_dataloader(self)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while this is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)
