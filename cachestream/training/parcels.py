"""The batches that wait for the trainer: in parcels, in their order, and no more of them than were asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cachestream.training.epoch import Request, Segment
from cachestream.training.transfer import Staged

__all__ = ["Delivery", "Parcel", "Shelf"]


class Delivery(NamedTuple):
    """A batch for the trainer, of `size` samples. With it, `number` batches of the epoch are done; `skipped`
    samples of it were left out because they are damaged.
    """

    staged: Staged
    number: int
    size: int
    skipped: int


@dataclass(slots=True, eq=False)
class Parcel:
    """A few batches that go to the trainer together, oldest first; none marks the end of an epoch."""

    segment: Segment
    batches: deque[Delivery] = field(default_factory=deque)


class Shelf:
    """Parcels of up to about `most` batches together; `batches` counts those that wait. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self.batches = 0
        self._most = most
        # Once all batches are there, the gathering thread rests until half are gone: each time that it wakes up, it
        # takes the GIL from the trainer.
        self._resume = most // 2 + 1
        self._parcels: deque[Parcel] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._parcels

    @property
    def is_full(self) -> bool:
        """Whether to rest: all batches are there."""
        return self.batches >= self._most

    @property
    def has_room_again(self) -> bool:
        """Whether to go on after that: half of them are gone."""
        return self.batches < self._resume

    @property
    def until_room(self) -> int:
        """How many batches have to be taken until then."""
        return max(0, self.batches - self._resume + 1)

    @property
    def is_low(self) -> bool:
        """Whether less than half of the batches are there."""
        return not self.batches or 2 * self.batches < self._most

    def holds(self, epoch: int) -> bool:
        """Whether what comes next is of `epoch`."""
        return bool(self._parcels) and self._parcels[0].segment.request.epoch == epoch

    def put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self.batches += len(parcel.batches)

    def take(self) -> Parcel:
        parcel = self._parcels.popleft()
        self.batches -= len(parcel.batches)
        return parcel

    def drop(self, unwanted: Callable[[Request], bool]) -> None:
        """Throw away what was asked for by `unwanted` requests."""
        self._parcels = deque(p for p in self._parcels if not unwanted(p.segment.request))
        self.batches = sum(len(parcel.batches) for parcel in self._parcels)
