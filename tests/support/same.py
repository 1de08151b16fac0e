"""The comparison of two samples, or of two batches, as a trainer sees them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["same"]


def same(one: Any, other: Any) -> bool:
    """True if two samples or batches are the same: types, fields in their order, every value."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
