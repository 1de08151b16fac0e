"""Rows gathered by the thread that asks, and by none of torch's.

How many threads torch uses in a thread of the trainer's is not ours to change: `torch.set_num_threads` sets what
other threads begin with too, and one whose first operation falls into that moment would keep it.
"""

from __future__ import annotations

import numpy as np
import torch

from cachestream.training import columns

__all__ = ["select_alone"]


def select_alone(rows: torch.Tensor, wanted: torch.Tensor, out: torch.Tensor) -> None:
    """`torch.index_select(rows, 0, wanted, out=out)` for rows of a window; `wanted` is trusted."""
    if columns.in_c is None or not out.is_contiguous():
        out.numpy()[...] = rows.numpy()[wanted.numpy()]
        return
    count = len(wanted)
    if not count:
        return
    # As the first rows of as many shards: their numbers, the rows', and where they begin.
    places = np.zeros((3, count), np.int64)
    places[0] = np.arange(count)
    places[2] = wanted.numpy() * rows.element_size() + rows.data_ptr()
    shards, size = places.ctypes.data, out.nbytes
    source = (shards + 16 * count, size // count)
    around = size >= columns.AROUND_BYTES
    columns.in_c.gather(shards, shards + 8 * count, count, source, (out.data_ptr(),), around)
