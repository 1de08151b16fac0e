"""Transfer of a batch to its device: it stays in host memory, or is copied ahead to an accelerator."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from torch.nested import nested_tensor_from_jagged
from torch.utils._pytree import tree_map

from cachestream import tracing
from cachestream.errors import ConfigError
from cachestream.training.batches.memory import BufferPool, PinnedMemory

BatchTransform = Callable[..., Any]  # of a batch, and perhaps a torch.Generator
_IN_FLIGHT: Final = 4  # host buffers that copies may still read from
_WITHOUT_TENSORS: Final = (
    *(str, bytes, bytearray, int, float, complex, type(None), range, type, Enum, FunctionType, ModuleType),
    *(np.ndarray, np.generic, torch.dtype, torch.device, torch.Size, torch.Generator),
)
# torch.accelerator has all that is used here from torch 2.8 on. Before, torch.cuda has the same functions.
_IS_GENERAL: Final = hasattr(getattr(torch, "accelerator", None), "device_index")
_runtime: Any = torch.accelerator if _IS_GENERAL else torch.cuda
_on_device: Any = torch.accelerator.device_index if _IS_GENERAL else torch.cuda.device
_new_stream: Any = torch.Stream if _IS_GENERAL else torch.cuda.Stream


class Staged(NamedTuple):
    """A sent batch: `ready` is the event after the last work on it, None if it needs no wait."""

    batch: Any
    ready: torch.Event | None = None


class Transfer:
    """The transfer of batches to `device`. This class leaves them in host memory, as they were gathered.

    `send` runs in gathering threads and in the trainer's, `receive` in the trainer's. `moves` is true in
    subclasses that copy batches from the memory of `pool`, where they were gathered, to the device.
    """

    moves: ClassVar[bool] = False

    def __init__(self, keep: int) -> None:
        self.pool = BufferPool(keep)
        self.device = torch.device("cpu")

    def send(self, batch: Any, transform: Callable[[Any], Any] | None) -> Staged:
        """Start to move `batch`, and apply `transform` to it on its device."""
        return Staged(batch if transform is None else transform(batch))

    def receive(self, batch: Any, ready: torch.Event) -> Any:
        """Return `batch`, whose last work on the device is `ready`, safe to use on the current stream."""
        return batch

    def close(self) -> None:
        """Wait for the copies under way: their memory may be given to others then."""


class AcceleratorTransfer(Transfer):
    """Batches are gathered into pinned memory and copied on a stream of their own, while the device computes.

    The consumer's stream waits for the copy by an event (the CPU does not), and `record_stream` keeps the
    allocator from giving the memory to the next copy before the consumer's work on it is done. A device with
    one stream (MPS) does all in order, so that neither is needed. Memory that it shares is not pinned.
    """

    moves: ClassVar[bool] = True

    def __init__(self, device: torch.device, keep: int, pinned_limit: int | None) -> None:
        super().__init__(keep)
        self.device = device
        with _on_device(device.index):  # before memory is pinned: that makes a context on the current device
            is_single = device.type == "mps"
            self._stream = _runtime.current_stream(device) if is_single else _new_stream(device)
            pins = PinnedMemory(pinned_limit) if _can_pin(device) else None
            self.pool = BufferPool(keep + _IN_FLIGHT, pins)
        self._in_flight: deque[tuple[torch.Event, Any]] = deque()
        self._sending = threading.Lock()  # several threads send batches

    def send(self, batch: Any, transform: Callable[[Any], Any] | None) -> Staged:
        with tracing.span("transfer"), _on_device(self.device.index), _on_stream(self._stream):
            moved = map_tensors(batch, lambda tensor: tensor.to(self.device, non_blocking=True))
            # The source goes back to its pool only when the copies from it are done.
            with self._sending:
                self._in_flight.append((self._stream.record_event(), batch))
                self._reap()
            if transform is not None:
                moved = transform(moved)
            return Staged(moved, self._stream.record_event())

    def _reap(self) -> None:
        while self._in_flight:
            copied = self._in_flight[0][0]
            if not copied.query():
                if len(self._in_flight) <= _IN_FLIGHT:
                    return
                copied.synchronize()
            self._in_flight.popleft()

    def receive(self, batch: Any, ready: torch.Event) -> Any:
        current = _runtime.current_stream(self.device)
        if current != self._stream:
            current.wait_event(ready)
            for tensor in tensors_in(batch):
                if tensor.device.type == current.device.type:
                    tensor.record_stream(current)
        return batch

    def close(self) -> None:
        with self._sending:
            while self._in_flight:
                self._in_flight[0][0].synchronize()
                self._in_flight.popleft()  # not before: the copy reads its memory


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    before = _runtime.current_stream(stream.device)
    _runtime.set_stream(stream)
    try:
        yield
    finally:
        _runtime.set_stream(before)


def _can_pin(device: torch.device) -> bool:
    try:
        return device.type != "mps" and torch.empty(1, device="cpu", pin_memory=True).is_pinned()
    except NotImplementedError:  # by the device's backend
        return False


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `change` applied to all tensors in its dicts, lists and tuples."""
    if type(value) is dict:  # what is gathered: torch's walk takes several times as long
        return {name: map_tensors(part, change) for name, part in value.items()}
    if type(value) is list:
        return [map_tensors(part, change) for part in value]

    def changed(part: Any) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        if part.is_nested:  # part by part: not all operations support nested tensors
            return nested_tensor_from_jagged(change(part.values()), change(part.offsets()))  # type: ignore[attr-defined]
        return change(part)

    return changed(value) if isinstance(value, torch.Tensor) else tree_map(changed, value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors that `value` refers to, whatever containers and objects they are in.

    Raises ConfigError for an iterator, which cannot be looked into: its tensors might be overwritten by the
    next copy while they are used.
    """
    pending, seen = [value], set[int]()
    while pending:
        part = pending.pop()
        if isinstance(part, torch.Tensor):
            if part.is_nested:
                pending += [part.values(), part.offsets()]  # type: ignore[attr-defined]
            else:
                yield part
        elif isinstance(part, _WITHOUT_TENSORS) or id(part) in seen:
            continue
        elif isinstance(part, Iterator):
            raise ConfigError(
                f"batch_transform returned a {type(part).__qualname__}, whose tensors cannot be found: "
                "return tensors in a dict, a list, a tuple or a dataclass"
            )
        else:
            seen.add(id(part))
            pending += gc.get_referents(part)


def accelerator() -> str | None:
    """Return the type of this machine's accelerators, such as "cuda", or None if torch finds none."""
    if not _runtime.is_available():
        return None
    return str(torch.accelerator.current_accelerator().type) if _IS_GENERAL else "cuda"  # type: ignore[union-attr]


def make_transfer(
    device: torch.device | str | int | None, keep: int, pinned_limit: int | None = None
) -> Transfer:
    """Return the transfer to `device` ("cpu" or None: host memory), for which `keep` batches may wait, in up
    to `pinned_limit` bytes of pinned memory (None: as much as they take).

    Raises ConfigError for a device that does not exist or is of another kind.
    """
    try:
        wanted = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r}: {error}") from error
    if wanted.type == "cpu":
        return Transfer(keep)
    kind = accelerator()
    if wanted.type != kind:
        found = "no accelerator" if kind is None else f"the accelerator {kind!r}"
        raise ConfigError(
            f"device={device!r}: torch {torch.__version__} finds {found} here; use device={kind!r}"
        )
    given: int | None = wanted.index  # torch's stubs do not say that it may be None
    index = _runtime.current_stream().device_index if given is None else given
    if index >= (count := _runtime.device_count()):
        raise ConfigError(f"device={device!r}: there is no such device, {count} of kind {kind!r} is here")
    return AcceleratorTransfer(torch.device(kind, index), keep, pinned_limit)
