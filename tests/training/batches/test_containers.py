"""Tensors of a batch on a device are found in whatever a `batch_transform` returns, or the container is refused."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import cachestream as cs
from cachestream.training.batches.transfer import tensors_in

X, Y = torch.ones(2), torch.zeros(3)


@dataclasses.dataclass
class Frozen:
    x: torch.Tensor
    more: list[torch.Tensor]


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    more: list[torch.Tensor]


class Named(NamedTuple):
    x: torch.Tensor
    more: torch.Tensor


class Own(tuple[torch.Tensor, ...]):
    __slots__ = ()


FOUND: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"x": X, "more": {"y": Y}},
    "UserDict": lambda: collections.UserDict(x=X, y=Y),
    "OrderedDict": lambda: collections.OrderedDict(x=X, y=[Y]),
    "dataclass": lambda: Frozen(X, [Y]),
    "dataclass with slots": lambda: Slotted(X, [Y]),
    "namedtuple": lambda: Named(X, Y),
    "subclass of tuple": lambda: Own((X, Y)),
    "deque": lambda: collections.deque([X, Y]),
    "SimpleNamespace": lambda: types.SimpleNamespace(x=X, y=Y, name="no tensor"),
    "Padded": lambda: cs.Padded(X, Y),
    "twice the same": lambda: [X, Y, "text", 3, None],
}


@pytest.mark.parametrize("make", FOUND.values(), ids=FOUND.keys())
def test_all_tensors_of_a_container_are_found(make: Callable[[], Any]) -> None:
    assert {id(tensor) for tensor in tensors_in(make())} == {id(X), id(Y)}


def test_what_refers_to_itself_is_looked_at_once() -> None:
    batch: dict[str, Any] = {"x": X}
    batch["batch"] = batch
    assert [id(tensor) for tensor in tensors_in(batch)] == [id(X)]


def test_what_cannot_be_looked_into_is_refused() -> None:
    with pytest.raises(
        cs.ConfigError, match=r"returned a list_iterator, whose tensors cannot be found: return .* a dict"
    ):
        list(tensors_in([X, iter([Y])]))
