"""Calls to Linux that the layers share: file maps, page cache, filesystem types, private files, processes.

Python's own mmap keeps a copy of the descriptor, so that a snapshot of a few thousand shards would exceed the
limit of open files (1024 in many shells). `FileMap` keeps the mapping only.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import shutil
import signal
import stat
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ: Final = 22  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_sync_file_range = getattr(_libc, "sync_file_range", None)  # not in every libc
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE: Final = 2
_SYS_PROCESS_MADVISE: Final = 440  # on all architectures
_MAX_RANGES: Final = 1024  # of one call (IOV_MAX)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36


class FileMap:
    """The first `size_bytes` of the file `fd`; unmapped when this object and all arrays on it are gone."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        address = _libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == _MAP_FAILED:
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

    def bring_in(self, start: int, stop: int) -> bool:
        """Read the pages of the bytes [start, stop) into memory; False where the kernel cannot.

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
        """Let a page fault read its page alone.

        Otherwise the kernel also reads the pages around it (128 KiB as a rule, up to `read_ahead_kb`), which
        evicts pages that other batches need where a cache is larger than memory.
        """
        _libc.madvise(self.address, self.size_bytes, mmap.MADV_RANDOM)

    def is_cached(self, start: int, stop: int) -> bool:
        """Return whether the pages of [start, stop) are in memory; True also where the kernel
        does not tell.
        """
        start -= start % mmap.PAGESIZE
        pages = np.zeros(-(-(stop - start) // mmap.PAGESIZE), np.uint8)
        failed = _libc.mincore(self.address + start, stop - start, pages.ctypes.data)
        return bool(failed) or bool((pages & 1).all())

    def ask_for(self, start: int, stop: int) -> None:
        """Begin to read [start, stop) from the disk at once, not page fault by page fault."""
        start -= start % mmap.PAGESIZE
        _libc.madvise(self.address + start, stop - start, mmap.MADV_WILLNEED)


def ask_for_all(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> None:
    """Begin to read the pages of the mapped addresses from `starts` up to `stops`, int64 `[n]` each.

    Uses one system call for many ranges where the kernel allows it (Linux 5.13; before 6.13 with
    CAP_SYS_NICE), and otherwise one for each range: every call releases the GIL and has to acquire it again.
    Unmapped addresses are ignored.
    """
    ranges = np.empty((len(starts), 2), np.uint64)
    ranges[:, 0] = starts - starts % mmap.PAGESIZE
    ranges[:, 1] = stops - ranges[:, 0].view(np.int64)
    for first in range(0, len(ranges), _MAX_RANGES):
        part = ranges[first : first + _MAX_RANGES]
        if not _advise_together(part):
            for address, size in part.tolist():
                _libc.madvise(address, size, mmap.MADV_WILLNEED)


def _advise_together(ranges: npt.NDArray[np.uint64]) -> bool:
    """`madvise(MADV_WILLNEED)` of `ranges` (uint64 `[n, 2]`: address, size) by one call; False where it is
    refused.
    """
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


def boot_id() -> str:
    """The identity of this run of the machine, which a restart changes; "" where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().decode().strip()
    except (OSError, UnicodeError):
        return ""


def begin_writeback(fd: int, size_bytes: int) -> None:
    """Start writing back the last `size_bytes` before the position of `fd`.

    Otherwise the kernel writes when its limit of unwritten memory is met, in bursts that stop the writers.
    """
    if _sync_file_range is not None:
        start = os.lseek(fd, 0, os.SEEK_CUR) - size_bytes
        _sync_file_range(fd, start, size_bytes, _SYNC_FILE_RANGE_WRITE)


def count_cached(addresses: npt.NDArray[np.int64]) -> int:
    """Count the pages at these mapped addresses that are in memory; all of them where the kernel does not
    tell.
    """
    page, cached = ctypes.c_ubyte(), 0
    for address in (addresses - addresses % mmap.PAGESIZE).tolist():
        cached += _libc.mincore(address, mmap.PAGESIZE, ctypes.byref(page)) != 0 or page.value & 1
    return cached


def _system_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


# Filesystems whose locks, sizes or speed depend on other machines or a remote store.
_NETWORK_FILESYSTEM: Final = re.compile(
    r"9p|acfs|afs|beegfs|ceph|cifs|coda|davfs|gfs2|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|panfs|prl_fs|pvfs2"
    r"|smb3|smbfs|vboxsf|wekafs"
    r"|fuse\..*(s3|gcs|blob|rclone|sshfs|ceph|gluster|juice|goofys|dav|ftp|afs|hdfs|weka|quobyte|alluxio).*"
)
_OCTAL: Final = re.compile(rb"\\([0-3][0-7]{2})")  # how mountinfo writes blanks and backslashes


def is_network_filesystem(kind: str) -> bool:
    """Return whether `kind`, a type as `filesystem_of` gives it, is a network filesystem."""
    return _NETWORK_FILESYSTEM.fullmatch(kind) is not None


def filesystem_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """The type of the filesystem that holds `path`, or "" where the system does not tell."""
    try:
        with open(mountinfo, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        left, _, right = (part.split() for part in line.partition(b" - "))
        if len(left) < 5 or not right:
            continue
        mount = os.fsdecode(_OCTAL.sub(lambda digits: bytes([int(digits[1], 8)]), left[4]))
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # the later of two mounts at one path hides the other
            best, kind = mount, right[0].decode(errors="replace")
    return kind


_KINDS: Final = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
# Errors of opening, replacing or removing what is no regular file.
NOT_A_FILE: Final = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV})


class NotAFileError(FileNotFoundError):
    """Something that is no regular file lies where a file belongs: for a reader there is no file."""


def kind_of(path: str) -> str | None:
    """The kind of what lies at `path`, such as "directory"; None for a regular file, and for nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(os.lstat(path).st_mode))
    except OSError:
        return None


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`: the file it makes is readable by its owner only, and no child inherits it.

    Links are not followed. Raises NotAFileError for what is no regular file.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for its other end.
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in NOT_A_FILE and (kind := kind_of(path)) is not None:
            raise NotAFileError(error.errno, f"it is a {kind}", path) from error
        raise
    if stat.S_ISREG(mode := os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise NotAFileError(errno.ENXIO, f"it is a {_KINDS[stat.S_IFMT(mode)]}", path)


def move(source: str, target: str) -> None:
    """Rename `source` to `target`, in place of the file that is there."""
    try:
        os.replace(source, target)
    except IsADirectoryError as error:
        error.filename = target
        raise


def remove(path: str) -> None:
    """Remove the file `path`, or whatever lies in its place, a directory with all that it holds.

    For names that are the cache's own. Raises FileNotFoundError where there is nothing.
    """
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def other_owner(folder: str) -> int | None:
    """The user to whom `folder` belongs, if it is neither this process's nor root; root is no exception."""
    owner = os.stat(folder).st_uid
    return None if owner in (os.geteuid(), 0) else owner


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal `number` when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends (a subreaper); False where that is refused."""
    return bool(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0)


def lower_session(pid: int, nice: int) -> bool:
    """Give the session of a process as little of the processors as the value `nice` gives a process.

    Where sessions are scheduled as groups (sched_autogroup, in most distributions), that of a process counts
    within its own session only: a background process of its own session takes as much as a trainer. Returns
    False if the kernel asks to try later: it takes one change in a tenth of a second.
    """
    try:
        with open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
            file.write(str(nice))
    except BlockingIOError:
        return False
    except OSError:  # no such groups, or no such process any more
        return True
    return True


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, the first 15 characters of it."""
    _libc.prctl(_PR_SET_NAME, name.encode())


def is_there(pid: int) -> bool:
    """True if there is a process `pid`, or any process in the group that it led.

    A new process may not lead its group yet.
    """
    for look in (os.kill, os.killpg):
        try:
            look(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError:
            pass
        return True
    return False


def is_stopped(pid: int) -> bool:
    """True if the process is stopped (by SIGSTOP or a debugger)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")
