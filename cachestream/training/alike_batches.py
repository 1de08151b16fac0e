"""Batches of samples that are alike: of like length, as many as fit a budget of tokens; or of one shape.

For a budget, a random order is divided into windows; each is sorted by length and cut into batches, greedily. A batch
counts as it is padded, its longest sample times its samples, which is what fairseq's `max_tokens` limits (Ott
et al. 2019); sorting within windows is that of torchtext's `BucketIterator` and transformers'
`LengthGroupedSampler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from cachestream.config import check_count
from cachestream.errors import ConfigError
from cachestream.permutation import Permutation, mix_key

if TYPE_CHECKING:
    from cachestream.schema import IntArray
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.loader_options import LoaderOptions

_WINDOW: Final = 100  # batches of `batch_size` for each rank
_GROUPS_KEY: Final = 1
_REST_KEY: Final = 2


def check_max_tokens(max_tokens: object) -> None:
    """Raise ConfigError unless `max_tokens` maps one field to a budget."""
    if not isinstance(max_tokens, Mapping) or len(max_tokens) != 1:
        raise ConfigError(
            f"max_tokens={max_tokens!r}: give the field with the tokens, and the most in a batch, padding "
            "included, such as {'tokens': 8192}"
        )
    check_count("max_tokens", next(iter(max_tokens.values())))


def token_batches(
    dataset: EpochDataset, options: LoaderOptions, size: int, key: int, ranks: int
) -> tuple[IntArray, IntArray]:
    """Batches of `size` samples of `dataset`, at most `max_tokens` in each, for all `ranks`: the samples,
    int64 `[n]`, and the bounds of batches, int64 `[batches + 1]`.

    Raises ConfigError for a sample longer than the budget, and for a field without lengths.
    """
    assert options.max_tokens is not None
    ((field, budget),) = options.max_tokens.items()
    lengths = dataset.lengths(field)
    most = int(lengths.max(initial=0))
    if most > budget:
        raise ConfigError(
            f"max_tokens={{{field!r}: {budget}}}: {int((lengths > budget).sum())} of {len(lengths)} samples "
            f"are longer, up to {most} tokens: raise the budget, or leave them out with "
            f"where=lambda columns: columns.lengths({field!r}) <= {budget}"
        )
    order = np.arange(size, dtype=np.int64)
    if options.shuffle:
        order = Permutation(len(lengths), key).at(order)
    window = _WINDOW * options.batch_size * ranks
    indices, bounds = group_by_length(lengths, order, budget, options.batch_size, window)
    return shuffle_batches(indices, bounds, ranks, key) if options.shuffle else (indices, bounds)


def group_by_length(
    lengths: IntArray, order: IntArray, budget: int, batch_size: int, window: int
) -> tuple[IntArray, IntArray]:
    """Sort the samples of `order` (int64 `[n]`) by length within each `window` of them, longest first, and
    cut them: return the samples, int64 `[n]`, and the ends of the batches, int64 `[batches + 1]`.

    A batch has at most `batch_size` samples, and its longest one (of `lengths`) times them is at most
    `budget`, unless it is one sample. No batch lies in two windows.
    """
    windows = np.arange(len(order)) // window
    indices = order[np.lexsort((-lengths[order], windows))]
    fit = np.clip(budget // np.maximum(lengths[indices], 1), 1, batch_size)
    stops = np.minimum(np.arange(len(order)) + fit, np.minimum((windows + 1) * window, len(order))).tolist()
    bounds = [0]
    while bounds[-1] < len(stops):  # one step a batch: where it ends depends on where it begins
        bounds.append(stops[bounds[-1]])
    return indices, np.array(bounds, np.int64)


def shuffle_batches(indices: IntArray, bounds: IntArray, ranks: int, key: int) -> tuple[IntArray, IntArray]:
    """Shuffle the batches, in groups of `ranks` that stay together: ranks make each step with batches of like
    length. A few at a random place, which make no whole group, come last.
    """
    groups, rest = divmod(len(bounds) - 1, ranks)
    place = ranks * (mix_key(key, _REST_KEY) % (groups + 1))
    last = np.arange(place, place + rest)
    whole = np.delete(np.arange(len(bounds) - 1), last).reshape(groups, ranks)
    if groups:
        whole = whole[Permutation(groups, mix_key(key, _GROUPS_KEY)).at(np.arange(groups, dtype=np.int64))]
    return reordered(indices, bounds, np.concatenate([whole.reshape(-1), last]))


def reordered(indices: IntArray, bounds: IntArray, batches: IntArray) -> tuple[IntArray, IntArray]:
    """The samples and the bounds of `batches`, by their numbers, in this order."""
    starts, sizes = bounds[:-1][batches], np.diff(bounds)[batches]
    ends = np.append(0, np.cumsum(sizes)).astype(np.int64)
    return indices[np.repeat(starts - ends[:-1], sizes) + np.arange(ends[-1])], ends


# --- of one shape, as for images of several sizes


def shape_batches(
    dataset: EpochDataset, options: LoaderOptions, size: int, key: int, ranks: int
) -> tuple[IntArray, IntArray]:
    """Batches of `size` samples of `dataset`, in each of which the field `group_by` has one shape, for all
    `ranks`: the samples, int64 `[n]`, and the bounds of batches, int64 `[batches + 1]`.

    Raises ConfigError for a field without a shape.
    """
    assert options.group_by is not None
    groups = dataset.shape_groups(options.group_by)
    order = np.arange(size, dtype=np.int64)
    if options.shuffle:
        order = Permutation(len(groups), key).at(order)
    indices, bounds = cut_by_group(groups, order, options.batch_size)
    if options.shuffle:
        # Batches of one shape lie side by side, so that the ranks make most steps with equal shapes.
        return shuffle_batches(indices, bounds, ranks, key)
    return in_order_of_arrival(indices, bounds)


def cut_by_group(groups: IntArray, order: IntArray, batch_size: int) -> tuple[IntArray, IntArray]:
    """Cut the samples of `order` (int64 `[n]`) into batches of up to `batch_size` that each have one of
    `groups`.

    Returns the samples, int64 `[n]`, in their order within a group, and the bounds of batches, int64
    `[batches + 1]`.
    """
    indices = order[np.argsort(groups[order], kind="stable")]
    of_group = groups[indices]
    begins = (
        np.flatnonzero(np.append(True, of_group[1:] != of_group[:-1]))
        if len(indices)
        else np.empty(0, np.int64)
    )
    sizes = np.diff(np.append(begins, len(indices)))
    places = np.arange(len(indices)) - np.repeat(begins, sizes)
    return indices, np.append(np.flatnonzero(places % batch_size == 0), len(indices)).astype(np.int64)


def in_order_of_arrival(indices: IntArray, bounds: IntArray) -> tuple[IntArray, IntArray]:
    """Order batches by their first samples, which come in the order of arrival within each."""
    batches = np.argsort(indices[bounds[:-1]], kind="stable")
    return reordered(indices, bounds, batches)
