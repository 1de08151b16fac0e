"""A file mapped read-only, without a file descriptor that stays open.

Python's own mmap keeps a copy of the descriptor, so that a snapshot of a few thousand shards would run into
the limit of open files (1024 in many shells). Here the map is all there is.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["FileMap", "ask_for_all", "count_cached"]

_FAILED: Final = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ: Final = 22  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_SYS_PROCESS_MADVISE: Final = 440  # on all architectures
_MOST_RANGES: Final = 1024  # of one call (IOV_MAX)


class FileMap:
    """The first `size_bytes` of the file `fd`; unmapped when this object and all arrays on it are gone."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        address = _libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            raise _system_error()
        self.address = int(address)
        self.size_bytes = size_bytes
        finalizer = weakref.finalize(self, _libc.munmap, address, size_bytes)
        finalizer.atexit = False  # other threads may still read then; the kernel unmaps

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.size_bytes,),
            "data": (self.address, True),
        }

    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, uint8 `[size_bytes]`, read-only; the array keeps the map."""
        return np.asarray(self)

    def read_all(self) -> None:
        """Bring all pages in. As `bring_in`, but that before Linux 5.14 it does nothing."""
        self.bring_in(0, self.size_bytes)

    def bring_in(self, start: int, stop: int) -> bool:
        """Bring the pages of the bytes from `start` up to, not with, `stop` in; False where the kernel cannot.

        Raises OSError where a plain access would end the process with SIGBUS: on a read error, or when the
        file has been cut short. (Linux 5.14.)
        """
        start -= start % mmap.PAGESIZE
        if _libc.madvise(self.address + start, stop - start, _MADV_POPULATE_READ) == 0:
            return True
        error = _system_error()
        if error.errno == errno.EFAULT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if error.errno not in (errno.EINVAL, errno.EAGAIN):
            raise error
        return False

    def expect_random(self) -> None:
        """Let a page fault read its page alone. Otherwise the kernel reads what lies around it, too (128 KiB as a rule, 8 MiB
        where `read_ahead_kb` says so), which throws out what other batches need where a cache is larger than memory.
        """
        _libc.madvise(self.address, self.size_bytes, mmap.MADV_RANDOM)

    def is_cached(self, start: int, stop: int) -> bool:
        """Whether the pages of [start, stop) are in memory; True also where the kernel does not tell us."""
        start -= start % mmap.PAGESIZE
        pages = np.zeros(-(-(stop - start) // mmap.PAGESIZE), np.uint8)
        failed = _libc.mincore(self.address + start, stop - start, pages.ctypes.data)
        return bool(failed) or bool((pages & 1).all())

    def ask_for(self, start: int, stop: int) -> None:
        """Begin to read [start, stop) from the disk, all at once and not in the small steps of page faults."""
        start -= start % mmap.PAGESIZE
        _libc.madvise(self.address + start, stop - start, mmap.MADV_WILLNEED)


def ask_for_all(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> None:
    """Begin to read the pages of the mapped addresses from `starts` up to `stops`, int64 `[n]` each, from the disk.

    By one system call for many ranges where the kernel lets us (Linux 5.13; before 6.13 it asks for CAP_SYS_NICE),
    otherwise by one for each: every call gives the GIL away and has to get it again. Addresses that are not mapped (any
    more) do no harm.
    """
    ranges = np.empty((len(starts), 2), np.uint64)
    ranges[:, 0] = starts - starts % mmap.PAGESIZE
    ranges[:, 1] = stops - ranges[:, 0].view(np.int64)
    for first in range(0, len(ranges), _MOST_RANGES):
        part = ranges[first : first + _MOST_RANGES]
        if not _advise_together(part):
            for address, size in part.tolist():
                _libc.madvise(address, size, mmap.MADV_WILLNEED)


def _advise_together(ranges: npt.NDArray[np.uint64]) -> bool:
    """`madvise(MADV_WILLNEED)` of `ranges`, uint64 `[n, 2]` of address and size, by one call; False where it is refused."""
    try:
        process = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return False
    try:
        done = _libc.syscall(
            ctypes.c_long(_SYS_PROCESS_MADVISE),
            ctypes.c_int(process),
            ctypes.c_void_p(ranges.ctypes.data),
            ctypes.c_size_t(len(ranges)),
            ctypes.c_int(mmap.MADV_WILLNEED),
            ctypes.c_uint(0),
        )
    finally:
        os.close(process)
    return bool(done == int(ranges[:, 1].sum()))


def count_cached(addresses: npt.NDArray[np.int64]) -> int:
    """How many of the pages at these mapped addresses are in memory; all of them where the kernel does not tell us."""
    page, cached = ctypes.c_ubyte(), 0
    for address in (addresses - addresses % mmap.PAGESIZE).tolist():
        cached += _libc.mincore(address, mmap.PAGESIZE, ctypes.byref(page)) != 0 or page.value & 1
    return cached


def _system_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
