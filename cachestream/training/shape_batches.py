"""Batches of samples of one shape, whose field is one tensor: bucketing by shape, as for images of several
sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cachestream.permutation import Permutation
from cachestream.training.samplers import Selection
from cachestream.training.token_batches import shuffle_batches

if TYPE_CHECKING:
    from cachestream.schema import IntArray
    from cachestream.training.dataset import EpochDataset
    from cachestream.training.loader_options import LoaderOptions


def shape_batches(
    dataset: EpochDataset, field: str, options: LoaderOptions, size: int, key: int, ranks: int
) -> Selection:
    """Batches of `size` samples of `dataset`, in each of which `field` has one shape, for all `ranks`.

    Raises ConfigError for a field without a shape.
    """
    groups = dataset.shape_groups(field)
    order = np.arange(size, dtype=np.int64)
    if options.shuffle:
        order = Permutation(len(groups), key).at(order)
    indices, bounds = cut_by_group(groups, order, options.batch_size)
    if options.shuffle:
        # Batches of one shape lie side by side, so that the ranks make most steps with equal shapes.
        return Selection(*shuffle_batches(indices, bounds, ranks, key), shared=True)
    return Selection(*in_order_of_arrival(indices, bounds), shared=True)


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
    starts, sizes = bounds[:-1][batches], np.diff(bounds)[batches]
    ends = np.append(0, np.cumsum(sizes)).astype(np.int64)
    return indices[np.repeat(starts - ends[:-1], sizes) + np.arange(ends[-1])], ends
