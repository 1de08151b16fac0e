"""The state of the filling and its reason, as the supervisor records them for all who look."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from cachestream.storage.filling import RESTS, WAITS
from cachestream.storage.status import describe_skipped, shortage_of_disk
from cachestream.storage.telemetry import NO_SPACE, NOTHING_FREE, STATE_NAMES, WRITING, Board
from cachestream.worker.job import Job

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

_FULL_AFTER_S: Final = 3.0  # by then all processes that wait for space have tried again


class FillRecord:
    """The state of the filling and its reason, recorded in the catalogue when they change."""

    def __init__(self, job: Job, cache: Cache, board: Board) -> None:
        self._job, self._cache, self._board = job, cache, board
        self.state = self.message = ""
        self._is_looking: bool | None = None  # unknown at first: an earlier supervisor may have been killed
        self._waited_at_bytes = -1
        self._room_made = cache.filling.state().room_made
        self._room_expected_s = -math.inf
        self._catalogue_id: str | None = None

    def write(self, state: str, message: str = "", output: str = "") -> None:
        """Record the state, its reason, and the last output of a process that has failed."""
        written_bytes = self._board.totals().written_bytes
        # Filling may take the room that an epoch leaves between two ticks: then it waits for another epoch.
        waits_anew = message == WAITS and written_bytes > self._waited_at_bytes
        if (state, message) == (self.state, self.message) and not waits_anew:
            return
        if message == WAITS:
            self._waited_at_bytes = written_bytes
        catalogue_id = self._cache.filling.record(state, message, output)
        self._catalogue_id = self._catalogue_id or catalogue_id
        self.state, self.message = state, message

    def write_looking(self, is_looking: bool) -> None:
        """Record whether the remote is still searched for changes, so that another pass may follow."""
        if is_looking != self._is_looking:
            self._cache.filling.record_looking(is_looking)
            self._is_looking = is_looking

    def write_transform(self) -> None:
        """Record the transform of this worker."""
        self._cache.filling.record_transform(self._job.transform)

    def write_complete(self, shared: str) -> None:
        """Record that the pass is complete, and for which reasons the cache lacks samples of the remote.

        `shared`: the message of a group of caches that does not answer.

        A transform that drops some samples does so on purpose, one that drops all hardly does.
        """
        state = self._cache.filling.state()
        dropped = self._board.totals().dropped
        all_dropped = f"transform returned None for {dropped} samples, which leaves them out"
        dropped_all = all_dropped if dropped and not state.num_samples else ""
        reasons = shared, describe_skipped(state.failures), dropped_all
        self.write("complete", "; ".join(filter(None, reasons)))

    def write_filling(self, running: Collection[int], now_s: float, message: str) -> None:
        """Record that the `running` processes fill the cache, or that all of them wait for space."""
        states = self._board.states()
        found = {states[index] for index in running}
        if self._board.sharing_slot["state"] == NO_SPACE:  # the shards of others do not fit
            found = {STATE_NAMES[NO_SPACE] if one == STATE_NAMES[NOTHING_FREE] else one for one in found}
        if not found or found - {STATE_NAMES[NO_SPACE], STATE_NAMES[WRITING]}:
            self.write("filling", message)
        elif STATE_NAMES[WRITING] not in found:  # such a process may be about to find that there is no space
            self._write_full(now_s)

    def _write_full(self, now_s: float) -> None:
        evicts = self._job.when_full == "evict" and self._cache.eviction != "none"
        state = self._cache.filling.state()
        # Files outside the cache take the space, and may be removed at any time.
        is_short = bool(shortage_of_disk(self._cache.directory, state.min_free))
        has_room, self._room_made = state.room_made != self._room_made, state.room_made
        is_used = evicts and self._cache.reservations.leases.count() > 0
        if is_short or has_room or is_used:
            self._room_expected_s = now_s
        if now_s - self._room_expected_s > _FULL_AFTER_S:
            message = RESTS if evicts else ""
            is_new = (self.state, self.message) != ("full", message)
            if is_new and self._cache.filling.record_full(message, state.room_made):
                self.state, self.message = "full", message
        else:
            self.write("filling", WAITS if is_used and not is_short else "")

    def is_of(self, catalogue_id: str | None) -> bool:
        """True if the catalogue is the one in which the state was recorded."""
        return catalogue_id == self._catalogue_id

    def write_anew(self) -> None:
        """Record the state again: the catalogue was rebuilt from the shards."""
        is_looking, self._is_looking = bool(self._is_looking), None
        self._catalogue_id = None
        self.write_looking(is_looking)
        self.write_transform()
        self.state = ""  # a pass is open again, or the next tick corrects that
        self.write("filling")
