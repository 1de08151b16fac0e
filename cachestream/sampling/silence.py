"""How long a unit may not answer: when those behind it go first, when it is left out, and when it is asked again (pure)."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Answers", "Silence"]

_AWAY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Silence:
    """A unit has brought nothing since `since_s`, for the `reason` that it gave last."""

    since_s: float
    reason: str

    def is_long(self, now_s: float, hang_timeout_s: float) -> bool:
        """Whether those behind it are not to wait any longer: they come, if it is not the remote as a whole."""
        return now_s - self.since_s >= hang_timeout_s / 3

    def is_too_long(self, now_s: float, hang_timeout_s: float) -> bool:
        """Whether it is to be left out, if its remote does answer."""
        return now_s - self.since_s >= 4 * hang_timeout_s


@dataclass(slots=True)
class Answers:
    """When the remotes of a source answered last, and when one did again after an outage: nobody waits longer then."""

    _last_s: dict[Hashable, float] = field(default_factory=dict)
    _back_s: dict[Hashable, float] = field(default_factory=dict)

    def heard(self, remote: Hashable, now_s: float) -> None:
        """Something came from `remote`."""
        if self.is_away(remote, now_s):
            self._back_s[remote] = now_s
        self._last_s[remote] = now_s

    def is_away(self, remote: Hashable, now_s: float) -> bool:
        """Whether nothing has come from `remote` lately, whatever was asked of it."""
        return now_s - self._last_s.get(remote, -math.inf) > _AWAY_S

    def is_back(self, remote: Hashable, since_s: float) -> bool:
        """Whether an outage of `remote` has ended after `since_s`."""
        return self._back_s.get(remote, -math.inf) > since_s
