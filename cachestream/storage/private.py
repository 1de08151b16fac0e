"""Files that are for their owner alone: what a cache says of its data is no one else's business."""

from __future__ import annotations

import os

__all__ = ["open_private"]


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`: the file it makes is readable by its owner only, and no child inherits it."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
