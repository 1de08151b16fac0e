"""How long a unit may not answer: when those behind it go first, and when it is left out (pure)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Silence"]


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
