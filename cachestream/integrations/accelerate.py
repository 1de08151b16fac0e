"""Hugging Face Accelerate: a loader that its gradient accumulation, `gather_for_metrics` and checkpoints know.

`accelerator.prepare(loader)` gives an EpochLoader back as it is, which is right as far as it goes: the loader has
shared the samples out among the ranks already. Accelerate then does not know when an epoch ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from cachestream.errors import ConfigError
from cachestream.training.loader import EpochLoader

__all__ = [
    "PreparedLoader",
    "prepare_loader",
]


def prepare_loader(accelerator: Accelerator, loader: EpochLoader) -> PreparedLoader:
    """`loader` for use with `accelerator`: on its device, in its checkpoints, with the end of every epoch told.

    `accelerator.save_state` and `load_state` save and load where the loader is, so that training goes on at the exact
    next batch; `skip_first_batches` is refused. `accelerator.prepare` may be called on the result, and leaves it alone.
    Raises ConfigError for an `accelerator` that is to split or dispatch batches: it would not be heard.
    """
    if accelerator.split_batches or accelerator.dispatch_batches:
        raise ConfigError(
            "split_batches and dispatch_batches would not be heard: every rank gets batches of its own from its "
            "EpochLoader, of that loader's batch_size; leave them out of the DataLoaderConfiguration"
        )
    accelerator.register_for_checkpointing(loader)
    return PreparedLoader(accelerator, loader)


class PreparedLoader:
    """An EpochLoader that tells Accelerate when its last batch is in use; it has all of the loader's attributes.

    No sample comes twice to fill a batch up, so `gather_for_metrics` has nothing to leave out.
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
