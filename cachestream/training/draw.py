"""Draws: the ways to choose the samples of a segment and their order, all with one protocol.

`settle` makes what the ranks draw by equal on all of them, and `draw` gives the order: one that all ranks of
a cache split. A draw runs in the preparing thread; what may use the trainer's generators runs in the
trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from cachestream.errors import CacheError
from cachestream.permutation import mix_key
from cachestream.storage.snapshots import weigh_shards
from cachestream.training.alike_batches import shape_batches, token_batches
from cachestream.training.plan import Listed, count_batches, run_length
from cachestream.training.ranks import pack_numbers, unpack_numbers
from cachestream.training.samplers import (
    Selection,
    evaluate,
    join_selections,
    may_draw_globally,
    seeded_globally,
)
from cachestream.training.weights import draw

if TYPE_CHECKING:
    from cachestream.schema import IntArray, Snapshot
    from cachestream.storage.cache import Cache
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.mixture import Mixture, SegmentSources
    from cachestream.training.plan import OrderRecord, SampleOrder
    from cachestream.training.position import Position
    from cachestream.training.ranks import Ranks
    from cachestream.training.samplers import SamplerLike
    from cachestream.training.weights import KeyWeights
    from cachestream.training.window import Wanted

# Has the trainer's thread call a function, and returns its result.
InTrainer: TypeAlias = "Callable[[Callable[[], Selection]], Selection]"


@dataclass(frozen=True, slots=True)
class DrawContext:
    """The segment that is drawn for, which is `wanted`, and the ranks that split its order.

    `in_trainer` calls what may use the global generators.
    """

    cache: Cache
    options: LoaderOptions
    ranks: Ranks
    wanted: Wanted
    in_trainer: InTrainer

    @property
    def position(self) -> Position:
        return self.wanted.position

    @property
    def lists(self) -> str:
        """The name of the round in which lists of samplers, or updates of weights, are exchanged."""
        return f"{self.wanted.round}.lists"

    @property
    def order(self) -> str:
        """The name of the round in which the order is exchanged."""
        return f"{self.wanted.round}.order"

    @property
    def key(self) -> int:
        return mix_key(self.options.seed, self.position.epoch, self.position.index)

    @property
    def batch_size(self) -> int:
        """The samples of a batch of all ranks that share the cache."""
        return self.options.batch_size * len(self.ranks.sharers)

    @property
    def remaining(self) -> int | None:
        """The samples that the epoch still takes from the order of this cache's ranks; None: all."""
        if self.options.epoch_size is None:
            return None
        left = self.options.epoch_size - self.position.drawn
        return max(0, left * len(self.ranks.sharers) // self.ranks.num_data_ranks)


class Draw:
    """A draw of each sample once: in a random order, within windows (`locality`), or as they lie."""

    def settle(self, context: DrawContext, size: int) -> None:
        """Agree with all ranks, also those of other caches, on what is drawn by, for an order of `size`."""

    def draw(self, context: DrawContext, dataset: EpochDataset, record: OrderRecord) -> OrderRecord:
        """Draw the order of the samples of `dataset`: `record` is that of as many in a random order.

        Raises what the user's own code raises, ConfigError for unknown samples, and the errors of ranks.
        """
        options = context.options
        if options.locality is not None:
            local = options.locality, run_length(record.counts)
            return replace(record, kind="local", local=local)
        return record if options.shuffle else replace(record, kind="sequential")

    def confirm(self) -> None:
        """Take what was settled for done: all ranks agree on the segment."""

    def sources_in(self, order: SampleOrder, snapshot: Snapshot) -> SegmentSources | None:
        """The sources of a mixture along `order`."""
        return None


def _listed(record: OrderRecord, indices: IntArray, bounds: IntArray | None = None) -> OrderRecord:
    listed = Listed(indices)
    _ = listed.text  # made here, in the background: a state in mid-epoch refers to it
    return replace(record, kind="listed", drawn=len(indices), listed=listed, bounds=bounds)


class WeightedDraw(Draw):
    """Samples in proportion to the weights of their keys, drawn by the first rank of a cache for all."""

    def __init__(self, weights: KeyWeights) -> None:
        self._weights = weights

    def settle(self, context: DrawContext, size: int) -> None:
        self._weights.exchange(context.ranks, context.lists)

    def draw(self, context: DrawContext, dataset: EpochDataset, record: OrderRecord) -> OrderRecord:
        def drawn() -> IntArray:
            found = draw(self._weights.of_snapshot(dataset.snapshot), record.drawn, context.key)
            with suppress(CacheError):  # the next epoch records them
                weigh_shards(context.cache, self._weights.of_shards())
            return found

        return _listed(record, _drawn_by_the_first(context, drawn))

    def confirm(self) -> None:
        self._weights.confirm()


class MixtureDraw(Draw):
    """Samples of the sources of a mix by the weights of each step, drawn by the first rank of a cache."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture

    def settle(self, context: DrawContext, size: int) -> None:
        options, position = context.options, context.position
        batches = count_batches(size, options.batch_size, len(context.ranks.sharers), options.drop_last)
        first = position.first_step + position.done
        steps = range(first, first + batches)
        self._mixture.agree(context.cache, position.epoch, steps, context.ranks, context.lists)

    def draw(self, context: DrawContext, dataset: EpochDataset, record: OrderRecord) -> OrderRecord:
        def drawn() -> IntArray:
            with suppress(CacheError):
                context.cache.filling.record_mixture(self._mixture.shares)
            return self._mixture.draw(dataset.snapshot, context.batch_size, record.drawn, context.key)

        return _listed(record, _drawn_by_the_first(context, drawn))

    def sources_in(self, order: SampleOrder, snapshot: Snapshot) -> SegmentSources | None:
        return self._mixture.sources_in(order, snapshot)


def _drawn_by_the_first(context: DrawContext, drawn: Callable[[], IntArray]) -> IntArray:
    ranks = context.ranks
    mine = {"drawn": pack_numbers(drawn())} if ranks.leads else None
    found: IntArray = unpack_numbers(ranks.share(context.order, mine)["drawn"])
    return found


class SamplerDraw(Draw):
    """The samples of a sampler. One of torch's is called in the preparing thread, with a generator of ours.
    All others are called by the trainer, whose global generators are seeded meanwhile, and then restored.
    """

    def __init__(self, sampler: SamplerLike) -> None:
        self._sampler = sampler

    def draw(self, context: DrawContext, dataset: EpochDataset, record: OrderRecord) -> OrderRecord:
        key, ranks = context.key, context.ranks

        def evaluated() -> Selection:
            epoch, most = context.position.epoch, context.remaining
            return evaluate(self._sampler, dataset, epoch, key, most, len(ranks.sharers))

        def seeded() -> Selection:
            with seeded_globally(key):
                return evaluated()

        chosen = context.in_trainer(seeded) if may_draw_globally(self._sampler) else evaluated()
        if not chosen.shared and len(ranks.group) > 1:
            chosen = join_selections(chosen, context.options.batch_size, ranks, context.lists)
        return _listed(record, chosen.indices, chosen.bounds)


class FormedDraw(Draw):
    """Batches that `form` makes of the samples: of one shape, or of like length within a budget of tokens."""

    def __init__(
        self, form: Callable[[EpochDataset, LoaderOptions, int, int, int], tuple[IntArray, IntArray]]
    ) -> None:
        self._form = form

    def draw(self, context: DrawContext, dataset: EpochDataset, record: OrderRecord) -> OrderRecord:
        ranks = len(context.ranks.sharers)
        return _listed(record, *self._form(dataset, context.options, record.drawn, context.key, ranks))


def make_draw(options: LoaderOptions) -> Draw:
    """The draw of `options`, of which one at most says what is drawn."""
    if options.weights is not None:
        return WeightedDraw(options.weights)
    if options.mixture is not None:
        return MixtureDraw(options.mixture)
    if options.sampler is not None:
        return SamplerDraw(options.sampler)
    if options.group_by is not None:
        return FormedDraw(shape_batches)
    return Draw() if options.max_tokens is None else FormedDraw(token_batches)
