"""The batches that wait for the trainer: in parcels, in their order, and no more of them than were asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

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
    """A few batches that go to the trainer together, oldest first; none, and `is_end`, mark the end of an epoch.

    `waited_s` is how long the last `take` had to wait for its batch.
    """

    segment: Segment
    batches: deque[Delivery] = field(default_factory=deque)
    waited_s: float = 0.0
    is_end: bool = False

    is_flow: ClassVar[bool] = False  # whether its batches are gathered while they are taken

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def num_ungathered(self) -> int:
        """How many of its batches are still to be gathered."""
        return 0

    @property
    def is_low(self) -> bool:
        """Whether it is time to see to what comes after it."""
        return True

    @property
    def turns_low(self) -> bool:
        """Whether it is low since the last batch was taken."""
        return False

    def take(self, timeout_s: float) -> Delivery | None:
        """The next batch; None when it is not there within `timeout_s`, or another thread has closed the loader."""
        try:
            return self.batches.popleft()
        except IndexError:
            return None

    def peek(self, timeout_s: float) -> Delivery | None:
        """What `take` would give, left where it is; None also where there is no batch."""
        return self.batches[0] if self.batches else None

    def discard(self) -> None:
        """Nobody will take the rest."""
        self.batches.clear()


class Shelf:
    """Parcels of up to about `most` batches together; `batches` counts those that wait. Not thread-safe.

    `in_hand` is the flow that was taken last, if it was one: it goes on being gathered. `taken` is what was taken last.
    """

    def __init__(self, most: int) -> None:
        self.batches = 0
        self.in_hand: Parcel | None = None
        self.taken: Parcel | None = None
        self._most = most
        # Once all batches are there, the gathering thread rests until half are gone: each time that it wakes up, it
        # takes the GIL from the trainer.
        self._resume = most // 2 + 1
        self._parcels: deque[Parcel] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._parcels and not self.in_hand

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

    def waiting(self, segment: Segment) -> tuple[int, int]:
        """How many batches the trainer has before it, and how many of `segment` among them are still to be gathered."""
        flows = [*self._parcels] if self.in_hand is None else [self.in_hand, *self._parcels]
        promised = sum(parcel.num_ungathered for parcel in flows if parcel.segment is segment)
        return sum(map(len, flows)), promised

    @property
    def first(self) -> Parcel:
        """What comes next."""
        return self._parcels[0]

    def holds(self, epoch: int) -> bool:
        """Whether what comes next is of `epoch`."""
        return bool(self._parcels) and self._parcels[0].segment.request.epoch == epoch

    def put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self.batches += len(parcel)

    def take(self) -> Parcel:
        parcel = self.taken = self._parcels[0]
        self.in_hand = parcel if parcel.is_flow else None
        self._gone(parcel)
        return parcel

    def lost(self, epoch: int, had: Parcel | None) -> Parcel | None:
        """What was taken last, if it is of `epoch` and not what the trainer `had`: a signal came before it was there."""
        taken = self.taken
        if taken is None or taken is had or taken.segment.request.epoch != epoch:
            return None
        self._gone(taken)
        return taken

    def _gone(self, parcel: Parcel) -> None:
        if self._parcels and self._parcels[0] is parcel:
            self._parcels.popleft()
        self.batches = sum(map(len, self._parcels))

    def let_go(self) -> None:
        """The trainer has no use for what it took."""
        self.in_hand = self.taken = None

    def drop(self, unwanted: Callable[[Request], bool]) -> None:
        """Throw away what was asked for by `unwanted` requests."""
        parcels, self._parcels = self._parcels, deque()
        for parcel in parcels:
            if unwanted(parcel.segment.request):
                parcel.discard()
            else:
                self._parcels.append(parcel)
        self.batches = sum(map(len, self._parcels))
