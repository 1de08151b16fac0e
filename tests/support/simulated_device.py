"""A simulated accelerator, "sim", over torch's backend for devices written in Python (PrivateUse1).

Tensors, devices, dispatch and `torch.accelerator` are torch's own. The memory is host memory, and torch's part in Python has
one stream, on which all is done at once, as on MPS. `use_streams` gives it several, which are as late as a device may be:
work is queued, and done only when somebody waits for it. So a consumer that does not wait for a copy sees `NOTHING`, and
a host buffer that is used again too early changes what arrives. For processes of their own: torch keeps the device.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from cachestream.training.batches import transfer

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NOTHING", "SimulatedStream", "recorded", "register", "use_streams"]

NOTHING: Final = -77  # of memory into which nothing was copied
_PRIVATE_USE_1: Final = 20
_memory: dict[int, torch.Tensor] = {}  # of each storage, by its address
_lock: Final = threading.RLock()
_thread: Final = threading.local()
recorded: list[Any] = []  # streams given to `record_stream`


class SimulatedEvent:
    """The work that `stream` had when the event was made."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream, self.position = stream, stream.done + len(stream.queue)

    def query(self) -> bool:
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        with _lock:
            while not self.query():
                work = self.stream.queue.popleft()
                self.stream.done += 1
                work()


class SimulatedStream(torch.Stream):
    """A stream that does its work when somebody waits for it."""

    _number = 100

    def __new__(cls, device: torch.device | None = None) -> Self:  # noqa: ARG004  as torch.Stream's
        SimulatedStream._number += 1
        return super().__new__(
            cls, stream_id=SimulatedStream._number, device_index=0, device_type=_PRIVATE_USE_1
        )

    def __init__(self, device: torch.device | None = None) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.done = 0

    def record_event(self, event: Any = None) -> Any:
        with _lock:
            return SimulatedEvent(self)

    def wait_event(self, event: Any) -> None:
        self.queue.append(event.synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()


def use_streams() -> SimulatedStream:
    """Give the device several streams; returns the one of this thread."""
    torch.accelerator.current_stream = _current_stream
    torch.accelerator.set_stream = lambda stream: setattr(_thread, "stream", stream)
    transfer._new_stream = SimulatedStream
    stream = _current_stream()
    assert isinstance(stream, SimulatedStream)
    return stream


def _current_stream(device: object = None) -> torch.Stream:
    if not hasattr(_thread, "stream"):
        _thread.stream = SimulatedStream()
    stream: torch.Stream = _thread.stream
    return stream


def _do(work: Callable[[], object]) -> None:
    """Do `work` on the current stream."""
    stream = torch.accelerator.current_stream()
    if isinstance(stream, SimulatedStream):
        with _lock:
            stream.queue.append(work)
    else:
        work()


def _tensor(content: torch.Tensor) -> torch.Tensor:
    tensor = torch._C._acc.create_empty_tensor(tuple(content.shape), content.dtype)
    _memory[tensor.untyped_storage()._cdata] = content
    return tensor


def _content(tensor: torch.Tensor) -> torch.Tensor:
    return _memory[tensor.untyped_storage()._cdata] if tensor.device.type == "sim" else tensor


def register() -> None:
    """Make "sim" this process's accelerator, with the few operations that delivery needs."""
    _setup_privateuseone_for_python_backend("sim")

    @torch.library.impl("aten::empty_strided", "privateuseone")
    def empty_strided(size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
        return _tensor(torch.full(tuple(size), NOTHING, dtype=options["dtype"]))

    @torch.library.impl("aten::_copy_from", "privateuseone")
    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        read, written = _content(source), _content(target)
        if source.device.type == "cpu":  # by address, as a device reads: nothing keeps the memory for it
            address, num_bytes = read.contiguous().data_ptr(), read.nbytes
            _do(lambda: ctypes.memmove(written.data_ptr(), address, num_bytes))
        else:
            _do(lambda: written.copy_(read))
        if not non_blocking and isinstance(stream := torch.accelerator.current_stream(), SimulatedStream):
            stream.synchronize()
        return target

    @torch.library.impl("aten::slice.Tensor", "privateuseone")
    def cut(tensor: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
        return _tensor(torch.ops.aten.slice.Tensor(_content(tensor), dim, start, end, step))

    @torch.library.impl("aten::split_with_sizes", "privateuseone")
    def split(tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
        return [_tensor(part) for part in torch.ops.aten.split_with_sizes(_content(tensor), sizes, dim)]

    @torch.library.impl("aten::add.Tensor", "privateuseone")
    def add(tensor: torch.Tensor, other: Any, *, alpha: int = 1) -> torch.Tensor:
        total, content = torch.full_like(_content(tensor), NOTHING), _content(tensor)
        _do(lambda: torch.add(content, other, alpha=alpha, out=total))
        return _tensor(total)

    @torch.library.impl("aten::record_stream", "privateuseone")
    def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
        recorded.append(stream)
