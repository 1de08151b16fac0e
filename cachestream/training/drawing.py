"""The order in which an epoch takes the samples of a snapshot: one list that all ranks of a cache split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cachestream.permutation import mix_key
from cachestream.storage.snapshots import weigh_shards
from cachestream.storage.view import row_hashes
from cachestream.training.plan import OrderRecord, count_batches, rebuild, run_length
from cachestream.training.ranks import pack_numbers, unpack_numbers
from cachestream.training.samplers import Selection, evaluate, join_selections
from cachestream.training.token_batches import token_batches
from cachestream.training.weights import draw

if TYPE_CHECKING:
    from cachestream.schema import IntArray, Snapshot
    from cachestream.storage.cache import Cache
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.loader_options import LoaderOptions
    from cachestream.training.ranks import Ranks
    from cachestream.training.segment import Request


@dataclass(frozen=True, slots=True)
class Drawing:
    """The drawing of the order of one segment.

    `limit`: the samples that the epoch still takes; None: all. `rounds`: the names of the rounds in which the
    ranks exchange lists, and the order.
    """

    cache: Cache
    options: LoaderOptions
    ranks: Ranks
    request: Request
    limit: int | None
    rounds: tuple[str, str]

    def settle(self, snapshot: Snapshot, record: OrderRecord | None) -> None:
        """Exchange the weights, or agree on the mixture. With a `record`, which says what was drawn on this
        cache, the ranks of other caches may still draw by them.
        """
        options, ranks, request = self.options, self.ranks, self.request
        if options.weights is not None:
            options.weights.exchange(ranks, self.rounds[0])
        if options.mixture is not None:
            size = self._at_most(snapshot.num_samples if record is None else rebuild(record)[0].size)
            batches = count_batches(size, options.batch_size, len(ranks.group), options.drop_last)
            first = request.first_step + request.done
            steps = range(first, first + batches)
            options.mixture.agree(self.cache, request.epoch, steps, ranks, self.rounds[0])

    def draw(self, dataset: EpochDataset) -> OrderRecord:
        """Draw the order of the samples of `dataset`.

        Raises the sampler's errors, ConfigError for unknown samples, and those of `StoreRanks.agree`.
        """
        options, snapshot = self.options, dataset.snapshot
        size = self._at_most(snapshot.num_samples)
        record = OrderRecord(
            *(snapshot.shard_ids, snapshot.counts, "shuffled", size, self._key),
            split=None if options.split is None else options.split.name,
            selected=row_hashes(snapshot),
        )
        if (chosen := self._select(dataset, size)) is not None:
            listed, bounds = chosen.indices, chosen.bounds
            return replace(record, kind="listed", drawn=len(listed), listed=listed, bounds=bounds)
        if options.locality is not None:
            return replace(record, kind="local", local=(options.locality, run_length(snapshot.counts)))
        return record if options.shuffle else replace(record, kind="sequential")

    @property
    def _key(self) -> int:
        return mix_key(self.options.seed, self.request.epoch, self.request.index)

    def _at_most(self, size: int) -> int:
        return size if self.limit is None else min(size, self.limit)

    def _select(self, dataset: EpochDataset, size: int) -> Selection | None:
        """The samples that weights, a mixture, a sampler or a token budget choose; None without any of them."""
        options, ranks, ranks_here = self.options, self.ranks, len(self.ranks.group)
        if options.weights is not None or options.mixture is not None:
            mine = (
                {"drawn": pack_numbers(self._draw_for_all(dataset.snapshot, size))} if ranks.leads else None
            )
            drawn = ranks.share(self.rounds[1], mine)["drawn"]
            return Selection(unpack_numbers(drawn), None, shared=True)
        if options.sampler is not None:
            chosen = evaluate(options.sampler, dataset, self.request.epoch, self._key, self.limit, ranks_here)
            if not chosen.shared and ranks_here > 1:
                chosen = join_selections(chosen, options.batch_size, ranks, self.rounds[0])
            return chosen
        if options.max_tokens is not None:
            field, budget = next(iter(options.max_tokens.items()))
            return token_batches(dataset, field, budget, options, size, self._key, ranks_here)
        return None

    def _draw_for_all(self, snapshot: Snapshot, size: int) -> IntArray:
        """Draw by the weights or the mixture, for all ranks of the cache."""
        options = self.options
        if (weights := options.weights) is not None:
            drawn = draw(weights.of_snapshot(snapshot), size, self._key)
            weigh_shards(self.cache, weights.of_shards())
            return drawn
        assert options.mixture is not None
        self.cache.filling.record_mixture(options.mixture.shares)
        batch = options.batch_size * len(self.ranks.group)
        return options.mixture.draw(snapshot, batch, size, self._key)
