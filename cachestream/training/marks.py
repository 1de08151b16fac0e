"""Samples by which torch's default collate finds out that their batch is whole already.

It looks at the type of the first sample, in a registry that is meant to be extended (the documentation of
`torch.utils.data.default_collate`). So the first sample of our batches is of a type of its own; it is a dict, tuple,
tensor, str or bytes as any other to everybody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

__all__ = ["Whole", "marked"]


class Whole:
    """A sequence of samples that are in one piece already."""

    def whole(self) -> Any:
        """The samples as one batch; None once somebody may have changed them one by one."""
        raise NotImplementedError


class _Dict(dict[str, Any]):
    pass


class _Tuple(tuple[Any, ...]):
    __slots__ = ()


class _Str(str):
    __slots__ = ()


class _Bytes(bytes):
    __slots__ = ()


class _Tensor(torch.Tensor):
    # What is made of it is an ordinary tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_KINDS: Final[dict[type, Any]] = {dict: _Dict, tuple: _Tuple, str: _Str, bytes: _Bytes}
_PLAIN: Final[dict[type, Any]] = {mark: kind for kind, mark in _KINDS.items()}


def marked(sample: Any) -> Any:
    """`sample`, the first of a `Whole`, with the mark."""
    if isinstance(sample, torch.Tensor):
        return sample.as_subclass(_Tensor)
    return _KINDS[type(sample)](sample)


def _collate(samples: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """What the default collate does with `samples`, the first of which is marked."""
    if isinstance(samples, Whole) and (whole := samples.whole()) is not None:
        return list(whole) if isinstance(whole, tuple) else whole  # tuples come as lists from it
    first = samples[0]
    plain = first.as_subclass(torch.Tensor) if isinstance(first, _Tensor) else _PLAIN[type(first)](first)
    return collate([plain, *samples[1:]], collate_fn_map=collate_fn_map)


default_collate_fn_map.update(dict.fromkeys((_Tensor, *_PLAIN), _collate))
