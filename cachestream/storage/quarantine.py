"""Putting damaged shards aside: a few are kept to be looked at, within a small share of the limit."""

from __future__ import annotations

import os
from typing import Final

from cachestream.private import move
from cachestream.storage.directory import Directory, remove_if_there, size_of_file, sync_folder
from cachestream.storage.faults import translated_disk_errors

__all__ = ["KEPT_AT_MOST", "KEPT_SHARE", "move_aside"]

KEPT_AT_MOST: Final = 4
KEPT_SHARE: Final = 20  # of the limit, at most one part in so many: the rest is for shards that can be used


def move_aside(directory: Directory, path: str, limit_bytes: int) -> None:
    """Move the shard file `path`, if it is there, into the quarantine, or remove it where that has no room.

    The newest few stay, as far as they take no more than a share of `limit_bytes`.
    """
    with translated_disk_errors(path, "putting it aside"):
        try:
            move(path, os.path.join(directory.quarantine, os.path.basename(path)))
        except FileNotFoundError:
            return
        kept_bytes = 0
        names = sorted(os.listdir(directory.quarantine), reverse=True)
        for place, name in enumerate(names):
            kept = os.path.join(directory.quarantine, name)
            kept_bytes += size_of_file(kept)
            if place >= KEPT_AT_MOST or kept_bytes > limit_bytes // KEPT_SHARE:
                remove_if_there(kept)
        sync_folder(directory.quarantine)
        sync_folder(os.path.dirname(path))
