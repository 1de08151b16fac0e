"""Shards out of the page cache, and what the disk can do: for benchmarks of caches larger than memory."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np

__all__ = ["cached_share", "evict", "fio_gb_per_s"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def _maps(folder: Path) -> list[tuple[int, int]]:
    """Address and bytes of what this process has mapped of the files in `folder`."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors") and str(folder) in line:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            found.append((low, high - low))
    return found


def evict(folder: Path) -> None:
    """Drop the shards in `folder` from the page cache. Pages that a process has in its tables stay: ours go first.

    As much free memory is touched then: a virtual machine may have to get it from its host first, at a tenth of the speed.
    """
    for _ in range(5):
        _drop(folder)
        if cached_share(folder) < 0.01:
            break
    np.ones(sum(size for _, size in _maps(folder)) + (256 << 20), np.uint8)


def _drop(folder: Path) -> None:
    for address, size in _maps(folder):
        _libc.madvise(address, size, mmap.MADV_DONTNEED)
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cached_share(folder: Path) -> float:
    """Which share of the mapped shards in `folder` is in the page cache."""
    pages = cached = 0
    for address, size in _maps(folder):
        found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        _libc.mincore(address, size, found)
        pages += len(found)
        cached += sum(page & 1 for page in found)
    return cached / max(1, pages)


def fio_gb_per_s(folder: Path, block: int, depth: int, seconds: int = 4, pattern: str = "randread") -> float:
    """What `fio` reads past the page cache: `block` bytes at a time at random places, `depth` at once."""
    if shutil.which("fio") is None:
        raise SystemExit(
            "fio is missing, which this is measured against: install it (Debian: apt-get install fio)"
        )
    file = folder / "fio"
    command = [
        "fio", "--name=read", f"--filename={file}", "--size=1g", f"--rw={pattern}", f"--bs={block}",
        f"--iodepth={depth}", "--ioengine=libaio", "--direct=1", f"--runtime={seconds}", "--time_based",
        "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300)
    return float(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"]) / 1e9
