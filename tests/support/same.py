"""Whether two samples, or two batches, are one and the same to whoever trains on them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["same"]


def same(one: Any, other: Any) -> bool:
    """Whether two samples or batches are the same: their types, their fields and the order of these, every value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
