"""One unit on its way from the remote to a shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cachestream.sampling.lots import Lot
from cachestream.sampling.silence import Silence

__all__ = ["Flight", "LaterError"]


class LaterError(Exception):
    """The unit was put aside: it is to be read again later, by whichever thread is free then."""


@dataclass(slots=True, eq=False)
class Flight:
    """One unit to be read: `skip` says which of its samples are not wanted.

    One that is `finished` when it is submitted is only delivered in its turn: `covered` when the cache
    has all of it, or with the `error` for which it is not read. `cached` are the ranges of offsets that lie
    in other shards, and `parts`, where samples are held out, those of the train split and of the held-out one. All before
    the offset `done` has been dealt with.

    All before the offset `came` has been read. `asked_s`: since when its remote was asked for something, and has sent
    nothing; 0 where it was not. While it does not answer it has a `silence`, and is tried again after the `delays`; one that
    is `aside` (`has_own_claim`, then) lets the others go first, until `again_at_s`. Its last try failed at `paused_at_s`.
    """

    position: int
    unit: int
    claim_id: int
    skip: Callable[[int], bool]
    cached: Sequence[tuple[int, int]] = ()
    parts: Sequence[Sequence[tuple[int, int]]] = ()
    done: int = 0
    covered: bool = False
    lots: deque[Lot] = field(default_factory=deque)
    waiting_bytes: int = 0
    finished: bool = False
    error: BaseException | None = None
    came: int = 0
    reading: bool = False
    asked_s: float = 0.0
    silence: Silence | None = None
    delays: Iterator[float] | None = None
    aside: bool = False
    has_own_claim: bool = False
    paused_at_s: float = 0.0
    again_at_s: float = 0.0

    @property
    def is_awaited(self) -> bool:
        """Whether nothing of it has come that was not delivered."""
        return not self.lots and not self.finished

    def silent(self, now_s: float, hang_timeout_s: float) -> bool:
        """Whether it has not answered for long: in its attempts so far, or in the one that goes on."""
        if self.silence is None and self.asked_s:
            since = Silence(self.asked_s, f"unit {self.unit}: no answer yet")
            self.silence = since if since.is_long(now_s, hang_timeout_s) else None
        return self.silence is not None and self.silence.is_long(now_s, hang_timeout_s)

    def heard(self, lot: Lot) -> None:
        """The remote answers."""
        self.came = lot.offsets[-1] + 1
        self.silence = self.delays = None
