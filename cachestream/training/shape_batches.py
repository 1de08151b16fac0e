"""Batches of samples of one shape, whose field is one tensor: bucketing by shape, as for images of several
sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cachestream.permutation import Permutation
from cachestream.training.token_batches import reordered, shuffle_batches

if TYPE_CHECKING:
    from cachestream.schema import IntArray
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.loader_options import LoaderOptions


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
