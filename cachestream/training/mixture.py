"""Mixtures: how many samples of each source of a `mix` come at each step, and which ones.

The source at each position is found by deadlines, as in R. Tijdeman, "The chairman assignment problem"
(Discrete Mathematics 32, 1980): also where the weights change at every step, the samples of a source differ
after every batch from the sum of its shares by at most 1 - 1 / (2 * sources - 2).
"""

from __future__ import annotations

import functools
import inspect
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cachestream.errors import CacheError, ConfigError, NotEnoughSamplesError
from cachestream.permutation import keyed_generator, mix_key
from cachestream.schema import KEY_FIELD, IntArray, Snapshot
from cachestream.storage.shard import MappedShard, ShardValues
from cachestream.storage.telemetry import SourceStats
from cachestream.training.plan import Plan
from cachestream.training.ranks import pack_numbers, unpack_numbers

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache
    from cachestream.training.plan import SampleOrder
    from cachestream.training.ranks import Ranks
    from cachestream.training.weights import Floats

_ROUNDING: Final = 1e-6  # above the error of a sum of shares, and far below the slack of the bound

Numbers = npt.NDArray[np.int16]  # of sources

logger = logging.getLogger("cachestream")


class Mixture:
    """The weights of `EpochLoader(mixture=)`, and the source of each sample. Used by one thread.

    `names` are those of the sources. Raises ConfigError for what can be no weights, and no function of them.
    """

    def __init__(self, given: Any) -> None:
        self.names: tuple[str, ...] = ()
        self._weights: Floats = np.empty((0, 0))  # of the steps of a segment, or one row for all
        self._given = given
        self._by_epoch = callable(given) and _parameter(given) == "epoch"
        self._numbers: ShardValues | None = None  # of the sources of samples
        if not callable(given):
            _row(given, "mixture")

    def agree(self, cache: Cache, epoch: int, steps: range, ranks: Ranks, name: str) -> None:
        """Take over rank 0's weights at `steps`, in round `name`. Raises what the user's function raises."""
        mine: dict[str, Any] = {}
        if ranks.rank == 0:
            names, given = self._names_in(cache), self._given
            if not callable(given):
                rows = [_row(given, "mixture", names)]
            elif self._by_epoch:
                rows = [_row(given(epoch), f"mixture(epoch={epoch})", names)]
            else:
                rows = [_row(given(step), f"mixture(step={step})", names) for step in steps or [steps.start]]
            mine = {"names": names, "weights": pack_numbers(np.concatenate(rows), "<f8")}
        answer = ranks.agree(name, mine)[0]
        self.names = tuple(answer["names"])
        self._weights = unpack_numbers(answer["weights"], "<f8").reshape(-1, len(self.names))

    def _names_in(self, cache: Cache) -> tuple[str, ...]:
        """The names of the sources in `cache`; the last ones while it cannot be read."""
        try:
            return source_names(cache.filling.state().source, cache.path)
        except CacheError:
            if not self.names:
                raise
            return self.names

    @property
    def shares(self) -> list[float]:
        """The share of each source in the steps of the segment, by its weights."""
        shares: list[float] = (self._weights / self._weights.sum(axis=1, keepdims=True)).mean(axis=0).tolist()
        return shares

    def draw(self, snapshot: Snapshot, batch: int, count: int, key: int) -> IntArray:
        """`count` samples in batches of `batch`, int64 `[count]`. Sources without a sample leave their share
        to others, with a warning. Raises NotEnoughSamplesError for a step at which nothing can be drawn.
        """
        names, weights, sources = self.names, self._weights, self._sources(snapshot)
        cached = np.bincount(sources, minlength=len(names) + 1)[: len(names)] > 0
        absent = " or ".join(names[i] for i in np.flatnonzero(~cached & weights.any(axis=0)))
        if not (weights * cached).any(axis=1).all():
            raise NotEnoughSamplesError(
                f"{snapshot.root}: mixture= asks for {absent} alone, of which no sample is cached: "
                "wait for more (min_samples=), or give another source a weight at first"
            )
        if absent:
            logger.warning("%s: no sample of %s is cached; others come instead", snapshot.root, absent)
        return choose(sources, apportion(weights * cached, batch, count), key)

    def sources_in(self, order: SampleOrder, snapshot: Snapshot) -> SegmentSources:
        """The sources along `order`, which is in sample numbers of `snapshot`."""
        sources, size = self._sources(snapshot), len(self.names)
        numbers = sources[order.at(np.arange(order.size))]
        for number, cached in enumerate(np.bincount(sources, minlength=size)[:size].tolist()):
            numbers[np.flatnonzero(numbers == number)[cached:]] += size + 1
        return SegmentSources(self.names, numbers)

    def _sources(self, snapshot: Snapshot) -> Numbers:
        """The number of the source of each sample, int16 `[num_samples]`; `len(names)` if it is unknown."""
        if self._numbers is None:
            read = functools.partial(_read, self.names)
            self._numbers = ShardValues(read, np.int16(len(self.names)))
        return self._numbers.of(snapshot)


def apportion(weights: Floats, batch: int, count: int) -> Numbers:
    """The source at each of `count` positions, in batches of `batch`, int16 `[count]`.

    Row k of `weights` `[steps, sources]`, which need not sum to 1, holds for batch k; the last one also for
    all that follow. Every batch takes, of the samples released by its end, those with the earliest
    deadlines. So the sources also alternate within a batch.
    """
    steps, sources = -(-count // batch), weights.shape[1]
    rows = weights[np.minimum(np.arange(steps), len(weights) - 1)]
    shares = batch * rows / rows.sum(axis=1, keepdims=True)
    ends = np.concatenate([np.zeros((1, sources)), np.cumsum(shares, axis=0)])
    slack = 1 / max(2, 2 * sources - 2)
    released = np.maximum(0, np.floor(ends[1:] - slack + _ROUNDING).astype(np.int64) + 1)
    times = np.arange(steps + 2)
    deadlines = [
        np.interp(
            np.arange(released[-1:, i].sum()) + 1 - slack, np.append(ends[:, i], ends[-1, i] + 1), times
        )
        for i in range(sources)
    ]
    drawn = np.empty(steps * batch, np.int16)
    done = np.zeros(sources, np.int64)
    for step in range(steps):
        waiting = [deadlines[i][done[i] : released[step, i]] for i in range(sources)]
        owners = np.repeat(np.arange(sources), [len(part) for part in waiting])
        taken = owners[np.argsort(np.concatenate(waiting), kind="stable")[:batch]]
        drawn[step * batch : (step + 1) * batch] = taken
        done += np.bincount(taken, minlength=sources)
    return drawn[:count]


def choose(sources: Numbers, positions: Numbers, key: int) -> IntArray:
    """A sample of the source at each of `positions`, int64 `[n]`, for the sources of the samples.

    The samples of a source come in a random order, all of them before one comes again in another.
    """
    order = np.empty(len(positions), np.int64)
    for number in np.unique(positions).tolist():
        places, members = np.flatnonzero(positions == number), np.flatnonzero(sources == number)
        rng = keyed_generator(mix_key(key, number))
        rounds = np.tile(members, (-(-len(places) // len(members)), 1))
        order[places] = rng.permuted(rounds, axis=1).reshape(-1)[: len(places)]
    return order


def source_names(source: str | None, where: str) -> tuple[str, ...]:
    """The names of the sources of the cache at `where`, from the fingerprint `source` of a `mix`."""
    kind, listed = [*(source or "").split(":"), ""][:2]
    if kind != "mix":
        raise ConfigError(
            f"mixture= is for a cache of several sources, and {where} is none: "
            "fill it from cs.mix({name: (source, weight)})"
        )
    return tuple(map(str, range(int(listed)))) if listed.isdecimal() else tuple(listed.split(","))


def _parameter(function: Callable[..., Any]) -> str:
    """The name of the parameter of a function of one number; raises ConfigError for another function."""
    try:
        return next(iter(inspect.signature(function).bind(0).arguments))
    except (TypeError, ValueError, StopIteration) as error:
        raise ConfigError(f"mixture={function!r}: give fn(step), or fn(epoch) ({error})") from error


def _row(given: Any, what: str, names: Sequence[str] | None = None) -> Floats:
    """The weights `given` for the sources `names` (None: not known yet), float64 `[sources]`."""
    wanted = f"{what} gives {reprlib.repr(given)}: give a number for each source"
    if names is not None:
        wanted += f" ({', '.join(names)}), 0 for one that is not drawn"
    if isinstance(given, Mapping):
        named = {str(name): weight for name, weight in given.items()}
        if names is not None and named.keys() != set(names):
            raise ConfigError(wanted)
        given = [named[name] for name in names or named]
    try:
        row = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{wanted} ({error})") from error
    is_row = row.ndim == 1 and len(row) == len(row if names is None else names)
    if not (is_row and np.isfinite(row.sum()) and (row >= 0).all() and row.any()):
        raise ConfigError(f"{wanted}; all are finite, 0 or more, and not all 0")
    return row


def _read(names: Sequence[str], shard: MappedShard) -> Numbers:
    """The numbers of the sources of a shard's samples, int16 `[num_samples]`: their keys begin with "NAME/"
    or "NAME.2/".
    """
    found = np.full(shard.num_samples, len(names), np.int16)
    shard.verify(KEY_FIELD, f"{KEY_FIELD}#offsets")
    text = np.append(shard.array(KEY_FIELD), np.zeros(64, np.uint8))
    starts = shard.array(f"{KEY_FIELD}#offsets")[:-1].astype(np.int64)
    for number, name in enumerate(names):
        fits = np.isin(text[starts + len(name)], list(b"./"))
        for place, letter in enumerate(name.encode()):
            fits &= text[starts + place] == letter
        found[fits] = number
    return found


class SegmentSources(NamedTuple):
    """The names of the sources, and the number of the source at each position of a segment's order, int16
    `[size]`: greater by `len(names) + 1` where a sample comes again in the segment.
    """

    names: tuple[str, ...]
    numbers: Numbers


class SourceCounts:
    """The samples of each source in the batches of all ranks of the cache."""

    def __init__(self) -> None:
        self._segment = SegmentSources((), np.empty(0, np.int16))
        self._plan = Plan(0, 1, 1, 0)
        self._before = 0  # batches of the loader before the segment
        self._counted = 0  # positions of the segment
        self._counts = np.zeros(2, np.int64)

    def enter(self, segment: SegmentSources, plan: Plan, batches: int) -> None:
        """Begin a segment after `batches` of the loader."""
        self.stats(batches)
        if segment.names != self._segment.names:
            self._counts = np.zeros(2 * len(segment.names) + 2, np.int64)
        self._segment, self._plan, self._before, self._counted = segment, plan, batches, 0

    def stats(self, batches: int) -> dict[str, SourceStats]:
        """The figures of each source after `batches` of the loader; empty without a mixture."""
        stop, names = self._plan.position(batches - self._before), self._segment.names
        new = self._segment.numbers[self._counted : stop]
        self._counts = self._counts + np.bincount(new, minlength=len(self._counts))
        self._counted = stop
        first, repeated = self._counts.reshape(2, -1)[:, :-1].tolist()
        total = max(1, sum(first) + sum(repeated))
        pairs = zip(names, first, repeated, strict=True)
        return {name: SourceStats(once + again, (once + again) / total, again) for name, once, again in pairs}
