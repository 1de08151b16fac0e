"""The batches of one segment, gathered ahead in the trainer's order, and the queue in which they wait for it.

A thread of ours that gathers needs the GIL for each batch, and a trainer that computes in Python gives it up for as long
as that takes. So where all is simple (fields of one shape, all shards mapped, no transform) the trainer's thread asks for
the coming batches itself, whenever it takes one, which is a matter of microseconds; the bytes are moved by threads of
`_gather`, which never wait for the GIL. It also starts the copies to a GPU, of all that has been gathered by then.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import numpy as np
import torch

from cachestream.errors import EpochError
from cachestream.training.batches.buffers import outside_inference
from cachestream.training.batches.collate import packed
from cachestream.training.batches.columns import Columns, FixedColumns, are_fixed, new_queue
from cachestream.training.batches.locations import SampleLocations
from cachestream.training.batches.readahead import ReadAhead
from cachestream.training.batches.transfer import Staged, Transfer
from cachestream.training.segment import Request, Segment

if TYPE_CHECKING:
    from cachestream.training.batches._gather import Queue


class QueuedBatch(NamedTuple):
    """A batch for the trainer, of `size` samples. With it, `number` batches of the epoch are done; `skipped`
    samples of it were left out because they are damaged.
    """

    staged: Staged
    number: int
    size: int
    skipped: int


@dataclass(slots=True, eq=False)
class BatchGroup:
    """A few batches that go to the trainer together, oldest first; none, and `is_end`, mark the end of an epoch.

    `waited_s` is how long the last `take` had to wait for its batch.
    """

    segment: Segment
    batches: deque[QueuedBatch] = field(default_factory=deque)
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

    def take(self, timeout_s: float) -> QueuedBatch | None:
        """The next batch; None when it is not there within `timeout_s`, or another thread has closed the loader."""
        try:
            return self.batches.popleft()
        except IndexError:
            return None

    def peek(self, timeout_s: float) -> QueuedBatch | None:
        """What `take` would give, left where it is; None also where there is no batch."""
        return self.batches[0] if self.batches else None

    def discard(self) -> None:
        """Nobody will take the rest."""
        self.batches.clear()


class BatchQueue:
    """Parcels of up to about `most` batches together; `batches` counts those that wait. Not thread-safe.

    `in_hand` is the flow that was taken last, if it was one: it goes on being gathered. `taken` is what was taken last.
    """

    def __init__(self, most: int) -> None:
        self.batches = 0
        self.in_hand: BatchGroup | None = None
        self.taken: BatchGroup | None = None
        self._most = most
        # Once all batches are there, the gathering thread rests until half are gone: each time that it wakes up, it
        # takes the GIL from the trainer.
        self._resume = most // 2 + 1
        self._parcels: deque[BatchGroup] = deque()

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
    def first(self) -> BatchGroup:
        """What comes next."""
        return self._parcels[0]

    def holds(self, epoch: int) -> bool:
        """Whether what comes next is of `epoch`."""
        return bool(self._parcels) and self._parcels[0].segment.request.epoch == epoch

    def put(self, parcel: BatchGroup) -> None:
        self._parcels.append(parcel)
        self.batches += len(parcel)

    def take(self) -> BatchGroup:
        parcel = self.taken = self._parcels[0]
        self.in_hand = parcel if parcel.is_flow else None
        self._gone(parcel)
        return parcel

    def lost(self, epoch: int, had: BatchGroup | None) -> BatchGroup | None:
        """What was taken last, if it is of `epoch` and not what the trainer `had`: a signal came before it was there."""
        taken = self.taken
        if taken is None or taken is had or taken.segment.request.epoch != epoch:
            return None
        self._gone(taken)
        return taken

    def _gone(self, parcel: BatchGroup) -> None:
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
        self.batches: deque[QueuedBatch] = deque()

    def __len__(self) -> int:
        return self.last - self.first


class Flow(BatchGroup):
    """The batches of `places`, gathered as they are taken; all their shards are mapped, and stay so."""

    is_flow = True

    def __init__(self, feed: Feed, segment: Segment, places: SampleLocations, ahead: ReadAhead) -> None:
        super().__init__(segment)
        self.asked: deque[Asked] = deque()
        # Small batches come a few at a time: what asking costs is shared. While some are taken, others are gathered.
        self._most_together = segment.batches_together
        self._together = self._most_together if places.first else 1  # the first is not to wait for others
        self.most_ahead = max(feed.prefetch, 2 * self._most_together if self._most_together > 1 else 1)
        self.low = max(self.most_ahead, len(places) // 4)
        # Rows go around the caches where the batches ahead, those of the trainer and those it lets go do not fit in.
        in_use = self.most_ahead + 2 * self._most_together
        self._around = in_use * segment.batch_bytes >= _AROUND_BYTES
        self._feed = feed
        self._places = places
        self._ahead = ahead
        self._bounds = places.bounds.tolist()
        self._taken = 0
        self._next = 0
        self._in_hand: deque[QueuedBatch] = deque()
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

    def take(self, timeout_s: float) -> QueuedBatch | None:
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

    def peek(self, timeout_s: float) -> QueuedBatch | None:
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

    def _delivery(
        self, number: int, size: int, columns: Columns, ready: torch.cuda.Event | None
    ) -> QueuedBatch:
        return QueuedBatch(Staged(packed(columns, self._schema), ready), number, size, 0)


def _rows_of(columns: Columns, start: int, stop: int) -> Columns:
    """Samples `start` to `stop`; by `data`, or autograd would take a batch that is changed in place for a change of all."""
    return {name: column[start:stop].data for name, column in columns.items()}


_MOST_AHEAD: Final = 1024
_AROUND_BYTES: Final = 16 << 20  # about what a process can keep of the last cache before the memory

# What the tasks of a closed queue still write to, where the disk has not answered, by the process and the queue.
_abandoned: Final[dict[tuple[int, Queue], Any]] = {}


def check_process(pid: int) -> None:
    """Raise EpochError in a child that was forked from process `pid`."""
    if pid != os.getpid():
        raise EpochError(
            f"this EpochLoader belongs to process {pid}: threads do not survive a fork; make one in each process"
        )


def _drop_abandoned() -> None:
    """Let go what nobody writes to any more; without a lock, since nobody knows what goes with it."""
    for pid, queue in list(_abandoned):
        if pid != os.getpid() or queue.close(0.0):
            _abandoned.pop((pid, queue), None)


class Feed:
    """Asks for the batches of flows, in their order, up to `prefetch` ahead. Thread-safe.

    Memory that a task uses is held from before it is submitted until it is done, whoever has forgotten its batch meanwhile:
    a signal may end any of this after any step, and `rewind` begins again then. Where batches move
    on to a device, `_unsent` are those that have not: they are sent in their order, as soon as somebody sees them whole.
    """

    def __init__(self, prefetch: int, transfer: Transfer) -> None:
        self.prefetch = min(prefetch, _MOST_AHEAD)
        self.transfer = transfer
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._queue: Queue | None = None
        self._flows: deque[Flow] = deque()
        self._held: deque[tuple[int, Any]] = deque()
        self._unsent: deque[tuple[Flow, Asked]] = deque()
        self._open: list[Flow] = []  # of which batches may be on their way
        self._is_helped = False
        self._closed = False

    def add(self, flow: Flow, threads: int) -> None:
        """Have the batches of `flow` gathered after those of the flows before it, by up to `threads` threads."""
        _drop_abandoned()
        with self._lock:
            if self._closed:
                return
            if self._queue is None:
                self._queue = new_queue(threads)
            self._open = [*(other for other in self._open if other.asked or other in self._flows), flow]
            self._flows.append(flow)
            self._top_up(self._queue)

    def take(self, flow: Flow, timeout_s: float) -> Asked | None:
        """The next batches of `flow`, waited for; None when that takes too long, or the feed is closed."""
        check_process(self._pid)
        with self._lock:
            queue = self._queue
            if queue is None:
                return None
            while not flow.asked and self._flows:
                self._ask(queue)
            if not flow.asked:
                return None
            asked = flow.asked[0]
        if queue.completed() < asked.number:
            began_s = time.perf_counter()
            done = queue.wait(asked.number, timeout_s)
            flow.waited_s = time.perf_counter() - began_s
            if not done:
                return None
        with self._lock:
            if not flow.asked:  # another thread has closed the loader
                return None
            self._send(queue)
            flow.asked.popleft()
            if not self._is_helped or 2 * self._num_asked() < flow.most_ahead:
                self._is_helped = False
                self._top_up(queue)
        return asked

    def ask_ahead(self) -> None:
        """As `take` does; from now on another thread sees to it in time, while the trainer computes."""
        with self._lock:
            self._is_helped = True
            if self._queue is not None:
                self._send(self._queue)
                self._top_up(self._queue)

    def forget(self, flow: Flow) -> None:
        """Nobody will take the rest of `flow`."""
        with self._lock:
            flow.asked.clear()
            self._unsent = deque(entry for entry in self._unsent if entry[0] is not flow)
            if flow in self._flows:
                self._flows.remove(flow)
            self._open = [other for other in self._open if other is not flow]

    def rewind(self, flow: Flow) -> None:
        """Have all batches of `flow` that were not taken gathered anew."""
        with self._lock:
            self.forget(flow)
            flow.rewind()
            if not self._closed and not flow.is_asked:
                self._open.append(flow)
                self._flows.appendleft(flow)

    def close(self, timeout_s: float) -> None:
        """Have nothing more gathered; waits for what is."""
        with self._lock:
            self._closed = True
            self._flows.clear()
            self._open.clear()
            queue, self._queue = self._queue, None
            held, self._held = self._held, deque()
            self._unsent.clear()
        if queue is not None and not queue.close(timeout_s):
            _abandoned[self._pid, queue] = held  # its threads write there, whenever the disk answers
        _drop_abandoned()

    def _top_up(self, queue: Queue) -> None:
        """With the lock: drop what is done, and ask for as much as may be ahead."""
        held, completed = self._held, queue.completed()
        while held and held[0][0] <= completed:
            held.popleft()
        while self._flows and self._num_asked() < self._flows[0].most_ahead:
            self._ask(queue)

    def _num_asked(self) -> int:
        return sum([flow.num_asked for flow in self._open])

    def _ask(self, queue: Queue) -> None:
        flow = self._flows[0]
        asked = flow.lend(queue.submitted() + 1)
        self._held.append((asked.number, (flow, asked)))
        flow.submit(queue, asked)
        if self.transfer.moves:
            self._unsent.append((flow, asked))
        else:
            flow.stage(asked)
        flow.note(asked)
        if flow.is_asked:
            self._flows.popleft()

    def _send(self, queue: Queue) -> None:
        """With the lock: send what has been gathered."""
        unsent, completed = self._unsent, queue.completed() if self._unsent else 0
        while unsent and unsent[0][1].number <= completed:
            flow, asked = unsent[0]
            flow.send(asked)
            unsent.popleft()
