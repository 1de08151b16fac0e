"""What a trainer tells torch for its own tensors does not hold for those that are made ahead, or used again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

__all__ = ["outside_inference"]

_AS_IT_IS: Final = nullcontext()


def outside_inference() -> AbstractContextManager[Any]:
    """In here tensors are made that can be trained on, also where the thread is in `torch.inference_mode`: it may have left
    that when it takes them.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS
