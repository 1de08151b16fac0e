"""A discrete-event model of many nodes that fill bounded caches from one remote, at the grain of shards.

Nodes claim shards, fetch and decode them, and copy those of others. The order of the units, the shares of a partition and the
bytes that an epoch replaces are the library's own functions. What is aggregated:

- A node that fills alone fetches its shards one after the other at one rate: they are one flow. That is exact, since no event
  depends on a single one of them.
- The flows from the remote have equal caps and share it equally, so that one number, the bytes that each has moved, tells when
  the next one ends. That is exact, too (processor sharing by virtual time).
- When a shard is published, the times of all its copies are set at once. Copies form a binomial tree; a node receives one at a
  time, in the order in which shards were published, and its owner sends one at a time. The other senders are not followed: all
  nodes send as much as they receive. So this is the pipelined broadcast of Johnsson and Ho, "Optimum Broadcasting and
  Personalized Communication in Hypercubes" (IEEE Transactions on Computers, 1989), which keeps every link busy. A test holds it
  against nodes that each ask an idle neighbour at random.

Left out: traffic from the remote and between nodes do not share a link; trainers do nothing but steps.

`cachestream plan` (tools/forecast.py) simulates one cache with every shard, its uses and its victims: thousands of such caches would
take days, and here no figure depends on which shard goes, so that the two share the rules of a cache and no loop.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Final

import numpy as np
import simpy

from benchmarks.scale_out.contents import units_between
from benchmarks.scale_out.link import Link
from benchmarks.scale_out.values import Arrangement, Outcome, Setup
from cachestream.permutation import mix_key
from cachestream.schema import IntArray
from cachestream.storage.eviction import Room, bytes_to_retire
from cachestream.worker.order import Partition, PassPlan

__all__ = ["simulate"]

_ASKED: Final = 64  # nodes at a time that a replaced one asks for shards

Steps = Generator[simpy.Event, Any, None]


class _Cluster:
    """Nodes that fail and are replaced, and their links. Subclasses say how they fill their caches."""

    plans: list[PassPlan]  # of each node, or of the group

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.first = -(-setup.min_samples // setup.samples_per_shard)  # shards with which a trainer begins
        nodes, self.env = setup.nodes, simpy.Environment()
        total = min(setup.job_bytes_per_s, setup.requests_per_s * setup.request_bytes)
        each = min(setup.calibration.remote_bytes_per_s, setup.fetched_bytes / setup.own_s)
        self.link = Link(self.env, total, each)
        self.rng = np.random.default_rng(mix_key(setup.seed, 1))
        self.slowness = np.exp(np.maximum(self.rng.normal(0.0, setup.unevenness, nodes), 0.0))
        self.full_s, self.ready_s = np.full(nodes, math.inf), np.full(nodes, math.inf)
        self.passed = np.zeros(nodes, np.int64)  # the shards that a node has received
        self.is_up = np.ones(nodes, bool)
        self.copied = self.failures = 0
        self.waiting_s = self.reread_bytes = 0.0
        self.warm_s: list[float] = []
        self.processes = [self.env.process(self._run(node)) for node in range(nodes)]
        self.env.process(self._fail())

    def _run(self, node: int, failed_s: float | None = None) -> Steps:
        """A node until it fails; `failed_s`: when the one failed that it replaces."""
        try:
            if failed_s is not None:
                yield self.env.timeout(self.setup.replace_s)
            yield from self._fill(node, failed_s)
        except simpy.Interrupt:
            return

    def _fill(self, node: int, failed_s: float | None) -> Steps:
        raise NotImplementedError

    def _lose(self, node: int) -> None:
        """Forget what a node held."""

    def _held_units(self) -> Iterator[IntArray]:
        """The units that nodes hold, in parts."""
        raise NotImplementedError

    def _fail(self) -> Steps:
        for at_s, node in self.setup.failures():
            yield self.env.timeout(at_s - self.env.now)
            if self.is_up[node]:
                self.failures += 1
                self.is_up[node] = False
                if self.processes[node].is_alive:
                    self.processes[node].interrupt()
                self._lose(node)
                self.processes[node] = self.env.process(self._run(node, self.env.now))

    def _begin(self, node: int, failed_s: float | None) -> None:
        """A node has enough to train; all others have waited for it since it failed."""
        self.is_up[node] = True
        if math.isinf(self.ready_s[node]):
            self.ready_s[node] = self.env.now
        elif failed_s is not None:
            self.waiting_s += self.env.now - failed_s

    def _fetch(self, node: int, shards: int) -> Steps:
        began_s, size_bytes = self.env.now, float(shards * self.setup.fetched_bytes)
        flow = self.link.transfer(size_bytes)
        try:
            yield flow
            least_s = shards * self.setup.own_s * self.slowness[node]
            yield self.env.timeout(max(0.0, began_s + least_s - self.env.now))
        except simpy.Interrupt:
            self.reread_bytes += size_bytes - self.link.cancel(flow)
            raise

    def _refill(self, held: int, done: int, length: int) -> int:
        """The shards that a full cache replaces in an epoch; none where it holds all of `length`."""
        setup, used = self.setup, held * self.setup.shard_bytes
        if not setup.turnover:
            return 0
        fits = length <= held
        remaining = 0 if fits else math.inf if done > held or not done else used * (length - done) / done
        retiring = bytes_to_retire(
            Room(setup.limit_bytes, used), setup.turnover, remaining, setup.shard_bytes
        )
        return min(held, retiring // setup.shard_bytes)

    def _next_epoch(self) -> simpy.Event:
        epoch_s = self.setup.epoch_s
        return self.env.timeout((math.floor(self.env.now / epoch_s) + 1) * epoch_s - self.env.now)

    def _seen_share(self) -> float:
        """The part of the data set that one node has held so far, on average."""
        seen = np.minimum(self.passed, [plan.share or 0 for plan in self.plans])
        return float(seen.mean()) / self.setup.num_shards

    def outcome(self) -> Outcome:
        """The figures at the end of the run."""
        self.env.run(until=self.setup.duration_s)
        setup, is_held = self.setup, np.zeros(self.setup.num_shards, bool)
        for units in itertools.takewhile(lambda _: not is_held.all(), self._held_units()):
            is_held[units] = True
        full_s = np.where(self.full_s > setup.duration_s, math.inf, self.full_s)
        warm_s = sorted(self.warm_s) + [math.inf] * (self.failures - len(self.warm_s)) or [math.inf]
        return Outcome(
            full_s=float(np.quantile(full_s, 0.5, method="inverted_cdf")),
            full_p99_s=float(np.quantile(full_s, 0.99, method="inverted_cdf")),
            distinct_samples=int(is_held.sum()) * setup.samples_per_shard,
            seen_share=self._seen_share(),
            egress_bytes=float(self.link.moved_bytes),
            copied_bytes=float(self.copied * setup.shard_bytes),
            first_s=float(self.ready_s.max()),
            waiting_s=float(self.ready_s.max() + self.waiting_s),
            failures=self.failures,
            reread_bytes=float(self.reread_bytes),
            warm_s=float(warm_s[len(warm_s) // 2]),
        )


class _Separate(_Cluster):
    """Nodes that fetch all that they hold: alone, or each its share."""

    def __init__(self, setup: Setup, arrangement: Arrangement) -> None:
        self.capacity = setup.shards_in_cache
        is_alone = arrangement is Arrangement.ALONE
        self.plans = [self._plan(setup, node, is_alone=is_alone) for node in range(setup.nodes)]
        self.held = np.zeros(setup.nodes, np.int64)
        super().__init__(setup)

    @staticmethod
    def _plan(setup: Setup, node: int, *, is_alone: bool) -> PassPlan:
        units = setup.num_shards
        partition = None if is_alone else Partition(node, setup.nodes)
        return PassPlan("shuffle", setup.seed + node * is_alone, 0, units, "", units, partition)

    def _held_units(self) -> Iterator[IntArray]:
        for plan, passed in zip(self.plans, self.passed.tolist(), strict=True):
            yield units_between(plan, max(0, passed - min(plan.share or 0, self.capacity)), passed)

    def _lose(self, node: int) -> None:
        self.reread_bytes += float(self.held[node] * self.setup.fetched_bytes)
        self.held[node] = 0

    def _fill(self, node: int, failed_s: float | None) -> Steps:
        units = self.plans[node].share or 0
        target = min(units, self.capacity)
        first = min(target, self.first)
        yield from self._fetch(node, first)
        self.held[node] = first
        self._begin(node, failed_s)
        yield from self._fetch(node, target - first)
        self.held[node] = target
        if failed_s is not None:
            self.warm_s.append(self.env.now - failed_s)
        if math.isinf(self.full_s[node]):
            self.full_s[node] = self.env.now
            self.passed[node] += target
        while refill := self._refill(target, int(self.passed[node]), units):
            yield self._next_epoch()
            yield from self._fetch(node, refill)
            self.passed[node] += refill


class _Group(_Cluster):
    """Nodes that fetch a shard once and copy it to all others. Positions are those of the group's passes."""

    def __init__(self, setup: Setup) -> None:
        nodes, shards = setup.nodes, min(setup.shards_in_cache, setup.num_shards)
        self.plans = [PassPlan("shuffle", setup.seed, 0, setup.num_shards, "", setup.num_shards)]
        self.capacity = shards
        # The positions that each node keeps; a new one takes the place of its oldest.
        self.kept = np.full((nodes, shards), -1, np.int32)
        self.quota = shards  # that a node may have received: once full, what an epoch replaces is added
        self.up_s, self.down_s = np.zeros(nodes), np.zeros(nodes)  # until when the links are taken
        self.last_s = np.zeros(nodes)  # the last arrival of a shard
        self.next = self.published = 0
        self.wanted, self.returned = self.capacity, deque[int]()
        super().__init__(setup)
        self.more = self.env.event()
        self.env.process(self._epochs())

    def _held_units(self) -> Iterator[IntArray]:
        yield units_between(self.plans[0], 0, self.next)[np.unique(self.kept[self.kept >= 0])]

    def _fill(self, node: int, failed_s: float | None) -> Steps:
        """Fetch what nobody has claimed, one shard at a time, and publish it."""
        if failed_s is not None:
            yield from self._restore(node, failed_s)
        while True:
            while not self.returned and self.next >= self.wanted:
                yield self.more
            position = self.returned.popleft() if self.returned else self.next
            self.next += position == self.next
            try:
                yield from self._fetch(node, 1)
            except simpy.Interrupt:
                self.returned.append(position)
                self._wake()
                raise
            self._publish(node, position)

    def _wake(self) -> None:
        self.more.succeed()
        self.more = self.env.event()

    def _publish(self, owner: int, position: int) -> None:
        """Give a shard to all nodes that run, as far as they may have more."""
        keepers = np.flatnonzero(self.is_up & (self.passed < self.quota))
        self.kept[keepers, self.passed[keepers] % self.kept.shape[1]] = position
        self.passed[keepers] += 1
        self.published += 1
        self.last_s[owner] = max(self.last_s[owner], self.env.now)
        self._spread(owner, keepers[keepers != owner])
        if self.published <= self.capacity:
            self._mark(keepers)

    def _mark(self, keepers: IntArray) -> None:
        """Note the nodes that can begin, and those that are full."""
        first = max(1, min(self.first, self.capacity))
        ready = keepers[(self.passed[keepers] >= first) & np.isinf(self.ready_s[keepers])]
        self.ready_s[ready] = self.last_s[ready]
        if self.published == self.capacity:
            self.full_s = self.last_s.copy()

    def _spread(self, owner: int, takers: IntArray) -> None:
        """Copy a shard along a binomial tree.

        All who have it send one copy each: generation g, 2^(g-1) nodes, begins g - 1 copies after the shard was published, or
        when the taker's link is free. Who is free first comes first.
        """
        if not len(takers):
            return
        self.copied += len(takers)
        takers = takers[np.argsort(self.down_s[takers])]
        generations = np.frexp(np.arange(len(takers)) + 1.0)[1]
        copy_s, begin_s = self.setup.copy_s, max(self.env.now, self.up_s[owner])
        self.up_s[owner] = begin_s + copy_s
        may_begin_s = np.maximum(self.down_s[takers], begin_s + (generations - 1) * copy_s)
        self.down_s[takers] = self.last_s[takers] = may_begin_s + copy_s * self.slowness[takers]

    def _epochs(self) -> Steps:
        """Once full, the group replaces a part of its shards in each epoch."""
        setup, shards = self.setup, self.kept.shape[1]
        length = shards if self.capacity == setup.num_shards else setup.num_shards
        while True:
            yield self._next_epoch()
            if self.published >= self.wanted:
                refill = self._refill(shards, self.published, length)
                self.quota += refill
                self.wanted += refill
                self._wake()

    def _restore(self, node: int, failed_s: float) -> Steps:
        """Copy what a node lost from those that keep it too, and fetch what nobody keeps."""
        setup, now_s = self.setup, self.env.now
        senders, lone = self._sources(node)
        self.copied += len(senders)
        self.reread_bytes += float(lone * setup.fetched_bytes)
        copy_s = setup.copy_s * self.slowness[node]
        loads = np.bincount(senders, minlength=setup.nodes) * copy_s
        self.up_s = np.where(loads > 0, np.maximum(self.up_s, now_s) + loads, self.up_s)
        self.down_s[node] = now_s + len(senders) * copy_s
        copied_s = max(self.down_s[node], self.up_s[senders].max(initial=0.0))
        first = min(len(senders), self.first)
        lone_first = min(lone, self.first - first)
        yield self.env.timeout(first * copy_s)
        yield from self._fetch(node, lone_first)
        self._begin(node, failed_s)
        yield from self._fetch(node, lone - lone_first)
        yield self.env.timeout(max(0.0, copied_s - self.env.now))
        self.warm_s.append(self.env.now - failed_s)

    def _sources(self, node: int) -> tuple[IntArray, int]:
        """For each shard that a node lost another node that keeps it, and the number of shards that nobody else keeps.

        What the group has replaced meanwhile is not missed: the node gets what another one has.
        """
        others = self.rng.permutation(np.flatnonzero(self.is_up))
        if len(others):
            self.kept[node], self.passed[node] = self.kept[others[0]], self.passed[others[0]]
        self.kept[node, self.kept[node] < self.published - self.capacity] = -1
        filled = min(int(self.passed.max()), self.kept.shape[1])
        lost, keeper = self.kept[node][self.kept[node] >= 0], np.full(self.next, -1, np.int64)
        for start in range(0, len(others), _ASKED):
            asked = others[start : start + _ASKED]
            positions = self.kept[asked, :filled]
            keeper[positions[positions >= 0]] = np.repeat(asked, (positions >= 0).sum(axis=1))
            if (keeper[lost] >= 0).all():
                break
        senders = keeper[lost]
        return senders[senders >= 0], int((senders < 0).sum())


def simulate(setup: Setup, arrangement: Arrangement) -> Outcome:
    """Simulate a run."""
    is_group = arrangement is Arrangement.SHARE
    return (_Group(setup) if is_group else _Separate(setup, arrangement)).outcome()
