"""The batches of one stretch of an epoch, gathered in the order in which the trainer takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cachestream.errors import EpochError
from cachestream.training.ahead import ReadAhead
from cachestream.training.batches import packed
from cachestream.training.columns import FixedColumns, are_fixed
from cachestream.training.epoch import Segment
from cachestream.training.gather import Columns
from cachestream.training.modes import outside_inference
from cachestream.training.parcels import Delivery, Parcel
from cachestream.training.places import Places
from cachestream.training.processor import fits_caches
from cachestream.training.transfer import Staged

if TYPE_CHECKING:
    from cachestream.training._gather import Queue
    from cachestream.training.feed import Feed

__all__ = ["Asked", "Flow", "can_flow"]


def can_flow(segment: Segment) -> bool:
    """Whether the batches of `segment` are of the simple kind."""
    simple = not segment.with_keys and isinstance(segment.ragged, str)
    return simple and are_fixed(segment.snapshot.schema)


class Asked:
    """A few batches, `first` to `last` of their flow, that are gathered together into `arrays`, which begin at `outs`: whole
    when the queue has done task `number`. `batches` are for the trainer, once they are staged.
    """

    __slots__ = ("arrays", "batches", "first", "last", "number", "outs")

    def __init__(
        self, number: int, first: int, last: int, arrays: list[np.ndarray[Any, Any]], outs: tuple[int, ...]
    ) -> None:
        self.number = number
        self.first = first
        self.last = last
        self.arrays = arrays
        self.outs = outs
        self.batches: deque[Delivery] = deque()

    def __len__(self) -> int:
        return self.last - self.first


class Flow(Parcel):
    """The batches of `places`, gathered as they are taken; all their shards are mapped, and stay so."""

    is_flow = True

    def __init__(self, feed: Feed, segment: Segment, places: Places, ahead: ReadAhead) -> None:
        super().__init__(segment)
        self.asked: deque[Asked] = deque()
        # Small batches come a few at a time: what asking costs is shared. While some are taken, others are gathered.
        self._most_together = segment.batches_together
        self._together = self._most_together if places.first else 1  # the first is not to wait for others
        self.most_ahead = max(feed.prefetch, 2 * self._most_together if self._most_together > 1 else 1)
        self.low = max(self.most_ahead, len(places) // 4)
        # What is ahead, what the trainer has, and what it lets go.
        in_use = self.most_ahead + 2 * self._most_together
        self._around = not fits_caches(in_use * segment.batch_bytes, segment.plan.ranks)
        self._feed = feed
        self._places = places
        self._ahead = ahead
        self._bounds = places.bounds.tolist()
        self._taken = 0
        self._next = 0
        self._in_hand: deque[Delivery] = deque()
        self._columns = FixedColumns(segment.maps)
        self._schema = segment.snapshot.schema
        self._shards = places.shards.ctypes.data
        self._rows = places.rows.ctypes.data

    def __len__(self) -> int:
        return len(self._places) - self._taken

    @property
    def num_asked(self) -> int:
        """How many of its batches are on their way."""
        return self.asked[-1].last - self.asked[0].first if self.asked else 0

    @property
    def num_ungathered(self) -> int:
        return len(self._places) - self._next

    @property
    def is_low(self) -> bool:
        return len(self) <= self.low

    @property
    def turns_low(self) -> bool:
        return len(self) == self.low

    @property
    def is_asked(self) -> bool:
        """Whether all of its batches have been asked for."""
        return self._next == len(self._places)

    # --- the trainer's side, and that of who helps it

    def begin(self, threads: int) -> None:
        """Have it gathered, by up to `threads` threads."""
        self._feed.add(self, threads)

    def ask_ahead(self) -> None:
        """Ask for what may be ahead now, in the trainer's place."""
        self._feed.ask_ahead()

    def take(self, timeout_s: float) -> Delivery | None:
        self.waited_s = 0.0
        try:
            if self.peek(timeout_s) is None:
                return None
            self._taken += 1
            return self._in_hand.popleft()
        except EpochError:
            raise
        except BaseException:  # a signal's, such as KeyboardInterrupt: anything may be half done
            self._feed.rewind(self)
            raise

    def peek(self, timeout_s: float) -> Delivery | None:
        if not self._in_hand:
            asked = self._feed.take(self, timeout_s)
            if asked is None:
                return None
            self._in_hand = asked.batches
        return self._in_hand[0]

    def discard(self) -> None:
        self._feed.forget(self)

    # --- the feed's side

    def lend(self, number: int) -> Asked:
        """Memory for the next few batches, to be gathered by task `number`."""
        first, last = self._next, min(self._next + self._together, len(self._places))
        for batch in range(first, last):
            self._ahead.reach(self._places.first + batch)
        size = self._bounds[last] - self._bounds[first]
        room = max(size, self._most_together * self.segment.plan.batch_size)  # of one size for all
        arrays, outs = self._columns.lend(self._feed.transfer.pool.lend, size, room)
        return Asked(number, first, last, arrays, outs)

    def submit(self, queue: Queue, asked: Asked) -> None:
        """Have what was lent for gathered."""
        start, stop = self._bounds[asked.first], self._bounds[asked.last]
        shards, rows = self._shards + 8 * start, self._rows + 8 * start
        queue.submit(shards, rows, stop - start, self._columns.sources, asked.outs, self._around)

    def note(self, asked: Asked) -> None:
        """What was asked for is on its way."""
        self.asked.append(asked)
        self._next, self._together = asked.last, min(self._most_together, 4 * self._together)

    def rewind(self) -> None:
        """Go back to the first batch that was not taken."""
        self._in_hand.clear()
        self._next, self._together = self._taken, 1

    def stage(self, asked: Asked) -> None:
        """Make the tensors of what was asked for: where they stay in host memory, there is time before it is gathered."""
        part, arrays = self._columns.part, asked.arrays
        with outside_inference():
            for number, start, stop in self._spans(asked):
                asked.batches.append(self._delivery(number, stop - start, part(arrays, start, stop), None))

    def send(self, asked: Asked) -> None:
        """Send what was asked for, and has been gathered, to the device: small batches in one piece."""
        size = self._bounds[asked.last] - self._bounds[asked.first]
        with outside_inference():
            whole, ready = self._feed.transfer.send(self._columns.part(asked.arrays, 0, size), None)
            for number, start, stop in self._spans(asked):
                columns = whole if len(asked) == 1 else _rows_of(whole, start, stop)
                asked.batches.append(self._delivery(number, stop - start, columns, ready))

    def _spans(self, asked: Asked) -> Iterator[tuple[int, int, int]]:
        """The number in the epoch of each batch that was asked for, and which of its samples it has."""
        ends = self._bounds[asked.first : asked.last + 1]
        done, first = self.segment.request.done + self._places.first + asked.first, ends[0]
        for i, (start, stop) in enumerate(pairwise(ends), 1):
            yield done + i, start - first, stop - first

    def _delivery(self, number: int, size: int, columns: Columns, ready: torch.cuda.Event | None) -> Delivery:
        return Delivery(Staged(packed(columns, self._schema), ready), number, size, 0)


def _rows_of(columns: Columns, start: int, stop: int) -> Columns:
    """Samples `start` to `stop`; by `data`, or autograd would take a batch that is changed in place for a change of all."""
    return {name: column[start:stop].data for name, column in columns.items()}
