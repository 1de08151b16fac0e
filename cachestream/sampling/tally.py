"""What a sampling process has done since its last commit: progress, spans and skipped samples."""

from __future__ import annotations

from collections.abc import Sequence

from cachestream.model import Span
from cachestream.remote.retry import redact_text
from cachestream.sampling.coverage import END
from cachestream.storage.publish import Progress
from cachestream.storage.tables import FailureRow

__all__ = ["Tally"]

_REASON_CHARS = 300


class Tally:
    """Grows sample by sample, becomes a Progress, and is cleared once that is committed."""

    def __init__(self) -> None:
        self._claims: dict[int, tuple[int, int]] = {}
        self._failures: dict[tuple[str, str], tuple[int, str]] = {}
        self.settled: list[int] = []
        self.done = (
            0  # samples that were dealt with, and units that failed, but for those that ended the process
        )
        self._spans: list[list[tuple[int, int]]] = []  # start and stop of each

    @property
    def has_news(self) -> bool:
        return bool(self._claims or self._failures)

    @property
    def spans(self) -> list[Span]:
        """What the open shard holds, or would if it had not been dropped or skipped."""
        return [Span(start, stop) for start, stop in self._spans]

    def passed(self, claim_id: int, position: int, start: int, stop: int) -> None:
        """The samples at the offsets `start` to `stop` of a unit are packed, dropped or skipped."""
        self._claims[claim_id] = (position, stop)
        self.done += stop - start
        self._extend((position, start), (position, stop))

    def finished(self, claim_id: int, position: int, rest: Sequence[tuple[int, int]]) -> None:
        """The unit at `position` is done; `rest`: ranges of offsets in which it turned out to have no more.

        Only these count as held by the open shard, besides what `passed`: a span over samples that lie in
        another shard would hide it when that one is evicted.
        """
        self._claims[claim_id] = (position + 1, 0)
        for start, stop in rest:
            self._extend((position, start), (position + 1, 0) if stop == END else (position, stop))

    def _extend(self, start: tuple[int, int], stop: tuple[int, int]) -> None:
        if self._spans and self._spans[-1][1] == start:
            self._spans[-1][1] = stop
        else:
            self._spans.append([start, stop])

    def skipped(self, kind: str, error: BaseException, example: str, count: int = 1) -> None:
        """Count samples that were skipped because of `error`.

        Messages begin with the place as a rule ("s3://bucket/a.jpg: truncated"): the place becomes the example, so
        that those of one reason are counted together.
        """
        text, example = redact_text(str(error).strip()) or "no message", redact_text(example)
        place, colon, rest = text.partition(": ")
        if colon and rest and kind == "sample" and ("/" in place or place == example):
            text, example = rest, place
        name = "" if kind in ("sample", "schema", "quarantined") else f"{type(error).__name__}: "
        reason = f"{name}{text}"[:_REASON_CHARS]
        before, first = self._failures.get((kind, reason), (0, example))
        self._failures[kind, reason] = (before + count, first)

    def progress(self, pass_id: int) -> Progress:
        failures = tuple(
            FailureRow(kind, reason, count, example)
            for (kind, reason), (count, example) in self._failures.items()
        )
        claims = tuple((claim_id, *done) for claim_id, done in self._claims.items())
        return Progress(pass_id, claims, tuple(self.settled), failures)

    def clear(self) -> None:
        self._claims.clear()
        self._failures.clear()
        self.done = 0
        self.settled.clear()
        self._spans.clear()
