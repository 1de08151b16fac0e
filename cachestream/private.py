"""Files that are for their owner alone: what a cache says of its data is no one else's business."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["give_to_owner", "open_private"]


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`: the file it makes is readable by its owner only, and no child inherits it.

    What root makes in a user's cache is that user's. Links are not followed: they are no part of a cache.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if flags & os.O_CREAT and os.geteuid() == 0:
        give_to_owner(fd, os.path.dirname(path))
    return fd


def give_to_owner(made: int | str, folder: str) -> None:
    """Give what root has just made, an open file or a folder, to whom `folder` belongs: it would be locked out else."""
    with suppress(OSError):  # some filesystems know no owners: there all are let in
        owner, mine = os.stat(folder), os.stat(made)
        is_new = os.path.isdir(made) or (mine.st_nlink == 1 and mine.st_size == 0)
        if mine.st_uid == 0 and owner.st_uid != 0 and is_new:
            os.chown(made, owner.st_uid, owner.st_gid)
