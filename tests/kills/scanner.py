"""A process that adds up, again and again, what everything in a cache directory occupies, and remembers the most.

A directory cannot be added up in one instant: a file seen early may be gone before its successor is seen. So
everything is looked at twice, and only what was there both times counts, with the smaller of its sizes: all of it
was there at the moment between the two looks. What is found is never more than what was, and by one byte over the
limit is over.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.worker.support import TOKEN

NUMBERS = np.dtype([("limit", "<i8"), ("most", "<i8"), ("over", "<i8"), ("looks", "<i8")])
PAUSE_S = 0.005  # between two looks; the machine is needed for what is looked at
_BLOCK = 512

Sizes = dict[tuple[int, int], int]  # device and inode → bytes


def look(folder: str, sizes: Sizes) -> None:
    """Add what `folder` and everything in it occupy."""
    try:
        info = os.lstat(folder)
        sizes[info.st_dev, info.st_ino] = info.st_blocks * _BLOCK
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    look(entry.path, sizes)
                    continue
                info = entry.stat(follow_symlinks=False)
                sizes[info.st_dev, info.st_ino] = info.st_blocks * _BLOCK
    except FileNotFoundError:
        pass  # gone meanwhile: so it does not count


def occupied_bytes(root: str) -> int:
    """The bytes that were in `root` at one moment, or fewer."""
    first: Sizes = {}
    look(root, first)
    second: Sizes = {}
    look(root, second)
    return sum(min(size, second[key]) for key, size in first.items() if key in second)


class Numbers:
    """The numbers that the scanner and the test share, in a file of their own."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(NUMBERS.itemsize))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), NUMBERS.itemsize)
        self.row = np.frombuffer(self._map, NUMBERS)[0:1]

    def __getitem__(self, name: str) -> int:
        return int(self.row[name][0])

    def __setitem__(self, name: str, value: int) -> None:
        self.row[name] = value


@contextmanager
def scanning(root: str, path: Path, limit_bytes: int) -> Iterator[Numbers]:
    """Scan `root` in a process of its own; the limit may be changed in what this gives."""
    numbers = Numbers(path)
    numbers["limit"] = limit_bytes
    environment = {key: value for key, value in os.environ.items() if key != TOKEN}  # it is none of the scene
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kills.scanner", root, str(path)], env=environment
    )
    try:
        yield numbers
        assert process.poll() is None, "the scanner itself has ended"
    finally:
        process.kill()
        process.wait(timeout=60.0)


def main() -> None:
    root, path = sys.argv[1:]
    numbers = Numbers(Path(path))
    while True:
        # A limit that is lowered holds from the first look that begins afterwards.
        limit = numbers["limit"]
        size = occupied_bytes(root)
        numbers["looks"] += 1
        numbers["most"] = max(numbers["most"], size)
        if size > max(limit, numbers["limit"]):
            numbers["over"] = max(numbers["over"], size - limit)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
