"""Memory of batches by address: on loan from a pool, and what is copied into it.

Page faults on fresh memory of a batch's size take longer than the gather itself. So tensors are made on
memory on loan, which ends when the last of them is freed, in whatever thread: no later batch uses the memory
before that.

The part in C copies, without the GIL. Where it was not built, numpy copies runs of bytes one by one. Only the
bytes at the given addresses are read.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from cachestream.schema import IntArray

in_c: ModuleType | None
try:
    from cachestream.training.batches import _gather as in_c
except ImportError:  # no compiler at the installation
    in_c = None

Bytes = npt.NDArray[np.uint8]
_NO_CHANGE: Final = nullcontext()
_SIZES: Final = 64  # number of sizes of which free buffers are kept: each field of a sample has its own
_SMALL_BYTES: Final = 64 * 1024  # below this size malloc reuses memory as well as a pool, and is faster


def outside_inference() -> AbstractContextManager[Any]:
    """Return a context that makes ordinary tensors also in `torch.inference_mode`, for use outside of it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NO_CHANGE


def as_tensor(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    """Return `array`, in the numpy dtype that stores torch dtype `dtype`, as a tensor without a copy."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


# --- memory on loan


@functools.lru_cache(maxsize=64)
def _memory_type(num_bytes: int) -> Any:
    """Return the ctypes type of memory for a loan; instances have an attribute `end`. Making one and getting
    its address takes a tenth of the time of a numpy array.
    """
    return type("Memory", (ctypes.c_uint8 * num_bytes,), {"end": None})


class _End(weakref.ref[Any]):
    """A weak reference that ends the loan of `buffer`. Its callback is a method in C that appends it to a
    free list: a KeyboardInterrupt in a callback in Python would be swallowed.

    The memory on loan refers to it. If that is garbage in a cycle, no callback runs: the buffer is freed.
    """

    __slots__ = ("buffer",)
    buffer: _Buffer


class PinnedMemory:
    """The pinned memory of a pool: at most `limit_bytes` (None: no limit). Thread-safe.

    torch rounds its size up to a power of two, and keeps what is freed for the next buffer of that size: so
    what counts is the largest number of buffers of each size that were there at once.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._buffers: dict[int, weakref.WeakSet[_Buffer]] = {}
        self._most: dict[int, int] = {}
        self._lock = threading.Lock()

    def admits(self, buffer: _Buffer, num_bytes: int) -> bool:
        """Return whether `buffer` may have `num_bytes` of it, and if so, count them."""
        size = 1 << (num_bytes - 1).bit_length()
        with self._lock:
            buffers, most = self._buffers.setdefault(size, weakref.WeakSet()), self._most.get(size, 0)
            if len(buffers) == most and self._limit_bytes is not None:
                used_bytes = sum(each * count for each, count in self._most.items())
                if used_bytes + size > self._limit_bytes:
                    return False
            buffers.add(buffer)
            self._most[size] = max(most, len(buffers))
            return True


class _Buffer:
    """Memory of a pool, pinned as far as `pins` admits it.

    It begins 16 bytes past a multiple of 64, as numpy's large arrays do. Rows in shards begin at multiples of
    64 as a rule, and between addresses of equal alignment memcpy uses `rep movsb`, which was a fifth slower
    when several buffers of 8 MiB took turns.
    """

    __slots__ = ("__weakref__", "address", "memory", "type")

    def __init__(self, num_bytes: int, pins: PinnedMemory | None) -> None:
        pinned = pins is not None and pins.admits(self, num_bytes + 64)
        with outside_inference():
            memory = torch.empty(num_bytes + 64, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            start = (16 - memory.data_ptr()) % 64
            self.memory = memory[start : start + num_bytes]
        self.address = self.memory.data_ptr()
        self.type = _memory_type(num_bytes)


class Loan:
    """Memory for one batch of one field, from `address` on; arrays and tensors on it keep it on loan."""

    __slots__ = ("_memory", "address")

    def __init__(self, memory: Any) -> None:
        self._memory = memory  # a ctypes array, which all arrays and tensors on it refer to
        self.address: int = ctypes.addressof(memory)

    @property
    def array(self) -> Bytes:
        """The memory as uint8 `[num_bytes]`."""
        return np.frombuffer(self._memory, np.uint8)

    def shaped(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the beginning of the memory as an array of `shape`."""
        return np.ndarray(shape, dtype, self._memory)


class BufferPool:
    """Lends memory; keeps at most `keep` free buffers of a size. Thread-safe.

    A loan may end in any thread at any time, also within a call of `lend`, and a signal may end `lend` after
    any step. So the free lists are deques, whose operations are atomic, and no lock is taken.
    """

    def __init__(self, keep: int, pins: PinnedMemory | None = None) -> None:
        self._keep = keep
        self._pins = pins
        self._free: dict[int, deque[_End]] = {}

    def lend(self, num_bytes: int) -> Loan:
        """Return uninitialised memory of at least `num_bytes`."""
        if num_bytes < _SMALL_BYTES and self._pins is None:
            return Loan(_memory_type(num_bytes)())
        num_bytes = max(num_bytes, 1)
        free = self._free.get(num_bytes)
        if free is None:
            free = self._new_size(num_bytes)
        try:
            buffer = free.pop().buffer
        except (IndexError, AttributeError):  # none, or one whose loan a signal interrupted
            buffer = _Buffer(num_bytes, self._pins)
        memory = buffer.type.from_address(buffer.address)
        end = _End(memory, free.append)
        end.buffer = buffer
        memory.end = end
        # All views and tensors on its arrays keep `memory`, which ends the loan when it dies.
        return Loan(memory)

    def _new_size(self, num_bytes: int) -> deque[_End]:
        """Return a free list for a new size; the oldest size is forgotten, which bounds the memory kept."""
        while len(self._free) >= _SIZES:
            self._free.pop(next(iter(self._free), 0), None)
        return self._free.setdefault(num_bytes, deque(maxlen=self._keep))

    def lend_rounded(self, num_bytes: int) -> Loan:
        """Lend memory of a power of two: buffers of sizes that vary can then be reused."""
        return self.lend(1 << max(num_bytes - 1, 0).bit_length())

    def __repr__(self) -> str:
        free = sum(size * len(ends) for size, ends in self._free.copy().items())
        return f"<BufferPool {free} bytes free>"


# --- copies

_FIRST_ADDRESS: Final = 4096  # no page is ever mapped below
_END_ADDRESS: Final = 1 << 48  # of what processors give to programs


def copy_runs(sources: IntArray, lengths: IntArray, targets: IntArray) -> None:
    """Copy `lengths` bytes from the addresses `sources` to `targets`, all int64 `[n]`."""
    if in_c is not None:
        sources, lengths, targets = map(np.ascontiguousarray, (sources, lengths, targets))
        in_c.copy_runs(sources.ctypes.data, lengths.ctypes.data, targets.ctypes.data, len(lengths))
        return
    memory = _memory()
    starts, ends = (sources - _FIRST_ADDRESS).tolist(), (targets - _FIRST_ADDRESS).tolist()
    for source, length, target in zip(starts, lengths.tolist(), ends, strict=True):
        memory[target : target + length] = memory[source : source + length]


def read_numbers(addresses: IntArray, width: int) -> IntArray:
    """Return `width` int64 numbers from each of `addresses`, int64 `[n, width]`."""
    memory, num_bytes = _memory(), 8 * width
    items = np.ndarray((len(memory) - num_bytes + 1,), f"V{num_bytes}", memory, strides=(1,))
    return items[addresses - _FIRST_ADDRESS].view(np.int64).reshape(-1, width)


@functools.cache
def _memory() -> Bytes:
    """All memory of the process as bytes, from `_FIRST_ADDRESS` on. Most of it is not mapped."""
    size = _END_ADDRESS - _FIRST_ADDRESS
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(_FIRST_ADDRESS)), np.uint8)
