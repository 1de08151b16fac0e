"""The held-out split: which samples belong to it, by their keys alone.

A sample is held out if the xxh3 hash (64 bits, seed 0) of its key's UTF-8 is below `holdout` times 2**64: the same on
every run, node and resume, whatever is cached, and whoever asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.config import check_share
from cachestream.errors import ConfigError

__all__ = ["HELD_OUT", "TRAIN", "WHOLE", "Split", "SplitName", "check_holdout", "check_split", "is_held_out"]

SplitName = Literal["train", "held-out"]
Hashes = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]

# The samples that a shard has of its stretches of the remote: all, or those of one split.
WHOLE: Final = 0
TRAIN: Final = 1
HELD_OUT: Final = 2


@dataclass(frozen=True, slots=True)
class Split:
    """One of the two splits of a cache that holds out the share `holdout` of its samples."""

    name: SplitName
    holdout: float

    @property
    def held_out(self) -> bool:
        return self.name == "held-out"

    def rows(self, hashes: Hashes) -> IntArray:
        """The rows of its samples among those of a shard, whose keys have the `hashes`: int64 `[n]`, ascending."""
        return np.flatnonzero((hashes < np.uint64(_bound(self.holdout))) == self.held_out)


def is_held_out(key: bytes, holdout: float) -> bool:
    """Whether the sample of this key (UTF-8) is held out."""
    return xxhash.xxh3_64_intdigest(key) < _bound(holdout)


def _bound(holdout: float) -> int:
    return int(holdout * 2.0**64)


def check_holdout(holdout: object) -> float:
    """`holdout`, a share above 0 and below 1; raises ConfigError for another value."""
    check_share("holdout", holdout)
    share = float(holdout)  # type: ignore[arg-type]
    if not _bound(share):
        raise ConfigError(f"holdout={holdout!r} holds nothing out: give a share above 0, such as 0.05")
    return share


def check_split(split: object) -> SplitName:
    """`split`, the name of one; raises ConfigError for another value."""
    if split == "train":
        return "train"
    if split == "held-out":
        return "held-out"
    raise ConfigError(
        f"split={split!r}: give 'train' or 'held-out'; a set whose splits are folders is opened by its folder"
    )
