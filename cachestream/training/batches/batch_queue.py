"""The queue of gathered batches between the gathering thread and the trainer."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cachestream.training.batches.transfer import Staged
    from cachestream.training.segment import Request, Segment


class QueuedBatch(NamedTuple):
    """Batch `number` of an epoch, from 1, with `size` samples; `skipped` more are damaged and left out."""

    staged: Staged
    number: int
    size: int
    skipped: int


@dataclass(eq=False)
class BatchGroup:
    """A few batches that go to the trainer together, oldest first. A group without batches, with `is_end`
    set, marks the end of an epoch.

    `waited_s` is the time that the last `take` waited for its batch. `num_ungathered` batches are not
    gathered yet. The next group should be gathered when only `low` batches are left.
    """

    segment: Segment
    batches: deque[QueuedBatch] = field(default_factory=deque)
    waited_s: float = 0.0
    is_end: bool = False

    is_prefetched = False  # True where the batches are gathered while they are taken
    num_ungathered = 0
    low = sys.maxsize

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def is_low(self) -> bool:
        return len(self) <= self.low

    @property
    def turns_low(self) -> bool:
        """True if the last `take` made `is_low` true."""
        return len(self) == self.low

    def take(self, timeout_s: float) -> QueuedBatch | None:
        """Take out the next batch; None after `timeout_s`, or if another thread closes the loader."""
        try:
            return self.batches.popleft()
        except IndexError:
            return None

    def peek(self, timeout_s: float) -> QueuedBatch | None:
        """Return what `take` would return, and leave it in the group; None also if there is no batch."""
        return self.batches[0] if self.batches else None

    def discard(self) -> None:
        """Drop the remaining batches."""
        self.batches.clear()


class BatchQueue:
    """Batch groups in the trainer's order, with about `most` batches in all. Not thread-safe.

    `in_hand` is the group taken last if its batches are still being gathered.
    """

    def __init__(self, most: int) -> None:
        self.in_hand: BatchGroup | None = None
        self._most = most
        # A full queue is filled again only when half of it is empty: each wake-up of the gathering thread
        # takes the GIL from the trainer.
        self._resume = most // 2 + 1
        self._groups: deque[BatchGroup] = deque()

    @property
    def batches(self) -> int:
        """The number of batches that wait."""
        return sum(map(len, self._groups))

    @property
    def is_empty(self) -> bool:
        return not self._groups and not self.in_hand

    @property
    def is_full(self) -> bool:
        """True if the gathering thread should pause."""
        return self.batches >= self._most

    @property
    def has_room_again(self) -> bool:
        """True if a gathering thread that paused should go on."""
        return self.batches < self._resume

    def waiting(self, segment: Segment) -> tuple[int, int]:
        """Return the number of batches that the trainer has not taken, and of those in `segment` that are not
        gathered yet.
        """
        groups = [*self._groups] if self.in_hand is None else [self.in_hand, *self._groups]
        ungathered = sum(group.num_ungathered for group in groups if group.segment is segment)
        return sum(map(len, groups)), ungathered

    @property
    def first(self) -> BatchGroup:
        """The next group."""
        return self._groups[0]

    def holds(self, epoch: int) -> bool:
        """Return whether the next group is of `epoch`."""
        return bool(self._groups) and self._groups[0].segment.request.epoch == epoch

    def put(self, group: BatchGroup) -> None:
        self._groups.append(group)

    def take(self) -> BatchGroup:
        group = self._groups.popleft()
        self.in_hand = group if group.is_prefetched else None
        return group

    def drop(self, unwanted: Callable[[Request], bool]) -> None:
        """Discard the groups of `unwanted` requests, and forget the group in hand."""
        self.in_hand = None
        groups, self._groups = self._groups, deque()
        for group in groups:
            if unwanted(group.segment.request):
                group.discard()
            else:
                self._groups.append(group)
