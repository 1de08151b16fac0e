"""Batch memory that is used again: a buffer returns to its pool when the last tensor on it dies.

Fresh memory of a batch's size costs page faults that are slower than the gather itself. So tensors are made
on borrowed memory, and the borrowing ends with them, wherever and whenever that is: no batch is aliased by a
later one while any tensor of it lives.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

_AS_IT_IS: Final = nullcontext()


def outside_inference() -> AbstractContextManager[Any]:
    """In here tensors are made that can be trained on, also where the thread is in `torch.inference_mode`: it may have left
    that when it takes them.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


Bytes = npt.NDArray[np.uint8]
_SIZES: Final = 8  # sizes of which free buffers are kept
_SMALL_BYTES: Final = 64 * 1024  # below this malloc reuses its memory as well as a pool does, and is quicker


@functools.lru_cache(maxsize=64)
def _lent_type(num_bytes: int) -> Any:
    """A type for memory on loan, which knows its `end`."""
    return type("Lent", (ctypes.c_uint8 * num_bytes,), {"end": None})


class _End(weakref.ref[Any]):
    """The end of the loan of `buffer`: put into a list by a callback in C, since Ctrl-C in one in Python is swallowed.

    The memory on loan keeps it. Where that is garbage in a cycle there is no callback, and the buffer goes.
    """

    __slots__ = ("buffer",)
    buffer: _Buffer


class _Buffer:
    """Memory of a pool, pinned on demand.

    It begins 16 bytes past a multiple of 64, as numpy's large arrays do. The rows gathered from begin at multiples
    of 64 as a rule, and between places of one alignment memcpy takes another path (`rep movsb`), which is a fifth
    slower here as soon as several buffers of 8 MiB are in turn.
    """

    __slots__ = ("address", "memory", "type")

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        with outside_inference():
            memory = torch.empty(num_bytes + 64, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            start = (16 - memory.data_ptr()) % 64
            self.memory = memory[start : start + num_bytes]
        self.address = self.memory.data_ptr()
        self.type = _lent_type(num_bytes)


@functools.lru_cache(maxsize=64)
def _own_type(num_bytes: int) -> Any:
    """A type for memory that is nobody else's: a small array of ctypes is made, and its address told, in a tenth of the
    time that numpy takes.
    """
    return ctypes.c_uint8 * num_bytes


class Loan:
    """Memory for one batch of one field, from `address` on; arrays and tensors on it keep it on loan."""

    __slots__ = ("_memory", "address")

    def __init__(self, memory: Any) -> None:
        self._memory = memory  # an array of ctypes: all that is on it refers to it
        self.address: int = ctypes.addressof(memory)

    @property
    def array(self) -> Bytes:
        """All of it: uint8 `[num_bytes]`."""
        return np.frombuffer(self._memory, np.uint8)

    def shaped(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """The beginning of it as an array of `shape`."""
        return np.ndarray(shape, dtype, self._memory)


class BufferPool:
    """Lends memory; keeps at most `keep` free buffers of a size. Thread-safe.

    Loans end in any thread at any time, also in the midst of a call of `lend`, which a signal may end after any step: so
    the free lists are deques, whose operations are atomic, and nothing takes a lock.
    """

    def __init__(self, keep: int, *, pinned: bool = False) -> None:
        self._keep = keep
        self._pinned = pinned
        self._free: dict[int, deque[_End]] = {}

    def lend(self, num_bytes: int) -> Loan:
        """Memory of `num_bytes` or more: uninitialised."""
        if num_bytes < _SMALL_BYTES and not self._pinned:
            return Loan(_own_type(num_bytes)())
        num_bytes = max(num_bytes, 1)
        free = self._free.get(num_bytes)
        if free is None:
            free = self._new_size(num_bytes)
        try:
            buffer = free.pop().buffer
        except (IndexError, AttributeError):  # none, or one whose loan a signal ended before it began
            buffer = _Buffer(num_bytes, self._pinned)
        memory = buffer.type.from_address(buffer.address)
        end = _End(memory, free.append)
        end.buffer = buffer
        memory.end = end
        # All views and tensors on its arrays keep `memory`, which ends the loan when it dies.
        return Loan(memory)

    def _new_size(self, num_bytes: int) -> deque[_End]:
        """A free list for another size; the oldest size is forgotten, so that what is kept stays bounded."""
        while len(self._free) >= _SIZES:
            self._free.pop(next(iter(self._free), 0), None)
        return self._free.setdefault(num_bytes, deque(maxlen=self._keep))

    def lend_rounded(self, num_bytes: int) -> Loan:
        """As `lend`, for sizes that vary: a power of two, so that buffers fit again."""
        return self.lend(1 << max(num_bytes - 1, 0).bit_length())

    def __repr__(self) -> str:
        free = sum(size * len(ends) for size, ends in self._free.copy().items())
        return f"<BufferPool {free} bytes free>"


def as_tensor(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    """`array`, in the numpy dtype that torch dtype `dtype` is stored as, as a tensor without a copy."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
