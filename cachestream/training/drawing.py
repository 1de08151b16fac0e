"""The order of a new snapshot's samples: one list that all ranks of a cache split."""

from __future__ import annotations

import base64
from collections.abc import Callable

import numpy as np

from cachestream.errors import RankMismatchError
from cachestream.permutation import mix_key
from cachestream.schema import IntArray
from cachestream.training.checkpoint import OrderKind, SegmentRecord
from cachestream.training.dataset import EpochDataset
from cachestream.training.loader_options import EpochSettings
from cachestream.training.plan import run_length
from cachestream.training.ranks import Ranks
from cachestream.training.samplers import Selection, evaluate
from cachestream.training.segment import Request
from cachestream.training.weights import KeyWeights, draw


def rounds_of(request: Request) -> tuple[str, str]:
    """The names of the two rounds in which ranks may exchange values before the round that settles the
    segment.
    """
    return f"{request.name}.lists", f"{request.name}.order"


def exchange_updates(
    weights: KeyWeights, request: Request, ranks: Ranks, cancelled: Callable[[], bool]
) -> None:
    """Apply the updates of all ranks. Called for every segment, also of a recorded order: other ranks may
    have to draw.
    """
    answers = ranks.agree(rounds_of(request)[0], {"updates": weights.pending()}, cancelled)
    weights.settle(answer["updates"] for answer in answers)


def draw_order(
    settings: EpochSettings,
    request: Request,
    dataset: EpochDataset,
    ranks: Ranks,
    remaining: int | None,
    cancelled: Callable[[], bool],
) -> SegmentRecord:
    """Draw the order of a segment, of at most `remaining` samples (None: all).

    Raises the errors of the sampler, ConfigError for samples that do not exist, and as `StoreRanks.agree`
    does.
    """
    snapshot, drawing = dataset.snapshot, settings.drawing
    key = mix_key(drawing.seed, request.epoch, request.index)
    drawn = snapshot.num_samples if remaining is None else min(snapshot.num_samples, remaining)
    if (weights := drawing.weights) is not None:
        made = ranks.share(
            rounds_of(request)[1],
            lambda: {"drawn": _pack(draw(weights.of_snapshot(snapshot), drawn, key))},
            cancelled,
        )
        listed = _unpack(made["drawn"])
        return SegmentRecord(snapshot.shard_ids, snapshot.counts, "listed", len(listed), key, listed)
    if drawing.locality is not None:
        local = drawing.locality, run_length(snapshot.counts)
        return SegmentRecord(snapshot.shard_ids, snapshot.counts, "local", drawn, key, local=local)
    if drawing.sampler is None:
        kind: OrderKind = "shuffled" if drawing.shuffle else "sequential"
        return SegmentRecord(snapshot.shard_ids, snapshot.counts, kind, drawn, key)
    chosen = evaluate(drawing.sampler, dataset, request.epoch, key, remaining, len(ranks.group))
    if not chosen.shared and len(ranks.group) > 1:
        chosen = _join_selections(chosen, settings, request, ranks, cancelled)
    size, bounds = len(chosen.indices), chosen.bounds
    return SegmentRecord(snapshot.shard_ids, snapshot.counts, "listed", size, key, chosen.indices, bounds)


def _join_selections(
    mine: Selection, settings: EpochSettings, request: Request, ranks: Ranks, cancelled: Callable[[], bool]
) -> Selection:
    """Join the selections that the samplers of the group's ranks made into one order, from which each rank
    gets its own.
    """
    answers = ranks.agree_in_group(
        rounds_of(request)[0],
        {
            "drawn": _pack(mine.indices),
            "bounds": None if mine.bounds is None else _pack(mine.bounds),
        },
        cancelled,
    )
    lists = [_unpack(answer["drawn"]) for answer in answers]
    cuts = [answer["bounds"] for answer in answers]
    if any(cut is None for cut in cuts) and not all(cut is None for cut in cuts):
        raise RankMismatchError(
            "some ranks' samplers give batches, others samples: give all the same sampler"
        )
    bounds = None if cuts[0] is None else [_unpack(cut) for cut in cuts]
    return interleave(lists, bounds, settings.batch_size)


def interleave(lists: list[IntArray], bounds: list[IntArray] | None, batch_size: int) -> Selection:
    """Interleave the ranks' lists by batches, so that ranks which split the result get their own lists.

    The result has as many batches as the shortest list; the last one takes the same number of samples from
    each list.
    """
    if bounds is not None:
        batches = [
            lists[rank][bounds[rank][i] : bounds[rank][i + 1]]
            for i in range(min(map(len, bounds)) - 1)
            for rank in range(len(lists))
        ]
        ends = np.cumsum([0, *map(len, batches)]).astype(np.int64)
        return Selection(np.concatenate([np.empty(0, np.int64), *batches]), ends, shared=True)
    least = min(map(len, lists))
    whole = least - least % batch_size
    heads = np.stack([indices[:whole].reshape(-1, batch_size) for indices in lists], axis=1)
    tails = [indices[whole:least] for indices in lists]
    return Selection(np.concatenate([heads.reshape(-1), *tails]), None, shared=True)


def _pack(numbers: IntArray) -> str:
    return base64.b64encode(numbers.astype("<i8").tobytes()).decode()


def _unpack(text: str) -> IntArray:
    return np.frombuffer(base64.b64decode(text), "<i8").astype(np.int64)
