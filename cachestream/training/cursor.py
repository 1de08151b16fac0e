"""Where the trainer is in a loader's epochs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from cachestream.training.epoch import Segment
from cachestream.training.parcels import Parcel

__all__ = ["Cursor"]


@dataclass(slots=True, eq=False)
class Cursor:
    """Where the trainer is: after `batches` of `epoch`, the last from `segment`.

    `loaded` is the state that it was begun from, until its first batch. `parcel` is what has been fetched.
    `failure` is the error that the epoch ended with before its first batch. `iteration` is what the trainer iterates.
    """

    epoch: int
    batches: int
    loaded: dict[str, Any] | None = None
    segment: Segment | None = None
    finished: bool = False
    parcel: Parcel | None = None
    failure: str = ""
    iteration: weakref.ref[Any] | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether it was left in the midst (by a `break`): nobody can take another batch."""
        return self.segment is not None and self.iteration is not None and self.iteration() is None
