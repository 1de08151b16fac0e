"""Watches from outside that a cache keeps its limit: what its directory occupies, looked at all the time."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Self


_PAUSE_S: Final = 0.01
_Found = dict[tuple[int, int], int]


class LimitWatch:
    """A thread that adds up the allocated bytes of everything below `root`, files of all kinds and folders.

    It shares no code with what it watches. `peak_bytes` is the most it saw, in `looks` looks.
    """

    def __init__(self, root: str, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.looks = 0
        self._root = root
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="limit-watch", daemon=True)

    @property
    def exceeded(self) -> bool:
        return self.peak_bytes > self.limit_bytes

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._ended.wait(_PAUSE_S):
            found, after = _look(self._root), _look(self._root)
            # A look takes time: a file evicted during it and one written into its space would both count.
            if found.keys() <= after.keys():
                self.peak_bytes = max(self.peak_bytes, sum(found.values()))
                self.looks += 1


def _look(folder: str) -> _Found:
    """(device, inode) to allocated bytes, of `folder` and everything below it; what goes meanwhile is left out."""
    found: _Found = {}
    try:
        _add(found, os.stat(folder))
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return found
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            found.update(_look(entry.path))
            continue
        try:
            _add(found, os.lstat(entry.path))
        except FileNotFoundError:
            continue
    return found


def _add(found: _Found, info: os.stat_result) -> None:
    found[info.st_dev, info.st_ino] = info.st_blocks * 512
