"""A link that flows share, in simulated time."""

from __future__ import annotations

import heapq
import itertools
import math

import simpy

__all__ = ["Link"]


class Link:
    """A link that flows share: each moves min(`each`, `total` / number of flows) bytes a second."""

    def __init__(self, env: simpy.Environment, total: float, each: float) -> None:
        self._env, self._total, self._each = env, total, each
        self._flows: list[tuple[float, int, simpy.Event]] = []  # by the level at which they end
        self._numbers = itertools.count()
        self._level = self._started = self._since_s = (
            0.0  # level: what a flow that was always there has moved
        )
        self._armed_s = math.inf

    @property
    def moved_bytes(self) -> float:
        """The bytes that all flows have moved."""
        self._advance()
        return self._started - sum(end - self._level for end, _, _ in self._flows)

    def transfer(self, size_bytes: float) -> simpy.Event:
        """Begin a flow; the event comes when it has ended."""
        self._advance()
        self._started += size_bytes
        ended = self._env.event()
        heapq.heappush(self._flows, (self._level + size_bytes, next(self._numbers), ended))
        self._arm()
        return ended

    def cancel(self, ended: simpy.Event) -> float:
        """Take a flow away. Returns the bytes that it still had to move."""
        self._advance()
        for flow in self._flows:
            if flow[2] is ended:
                self._flows.remove(flow)
                heapq.heapify(self._flows)
                self._arm()
                self._started -= flow[0] - self._level
                return flow[0] - self._level
        return 0.0

    def _rate(self) -> float:
        return min(self._each, self._total / max(1, len(self._flows)))

    def _advance(self) -> None:
        now_s = self._env.now
        self._level += self._rate() * (now_s - self._since_s)
        self._since_s = now_s

    def _arm(self) -> None:
        """Look again when the first flow ends; a timer that comes too early looks again in turn."""
        if not self._flows:
            return
        due_s = self._env.now + max(0.0, self._flows[0][0] - self._level) / self._rate()
        if due_s < self._armed_s:
            self._armed_s = due_s
            self._env.timeout(due_s - self._env.now, due_s).callbacks.append(self._look)

    def _look(self, timer: simpy.Event) -> None:
        if timer.value == self._armed_s:
            self._armed_s = math.inf
        self._advance()
        while self._flows and self._flows[0][0] - self._level < 1.0:  # a byte
            heapq.heappop(self._flows)[2].succeed()
        self._arm()
