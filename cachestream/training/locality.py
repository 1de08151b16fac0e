"""An order shuffled within a window, so that a cache larger than memory is read in long runs: pure, in O(1) memory.

The samples, as they lie in the shards, are cut into runs of consecutive ones. The runs are put into a pseudo-random
order, and then each stretch of `window` samples of that order is shuffled. So batches come from `window` samples at a
time, which fit in memory; every run is read as a whole, once an epoch; and a window holds runs from all over the cache.

Such two-level shuffles are common: MosaicML Streaming's `py1b` shuffles shards and then blocks of `shuffle_block_size`
samples; WebDataset shuffles shards and then draws from a buffer of samples, as tf.data does (`buffer_size`). A block is
taken here rather than a buffer, since any position of it is computed by itself: a resume needs no more than a number.
Where the first run begins is drawn too, so that runs and windows have other borders every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from cachestream.model import IntArray
from cachestream.permutation import Permutation, mix_key

__all__ = ["LocalOrder", "run_length"]

RUNS_A_SHARD: Final = 16  # of 4 MiB at the usual size of shards: a disk reads them as quickly as whole shards
_RUNS_KEY: Final = 1
_START_KEY: Final = 2
_WINDOW_KEY: Final = 3


def run_length(counts: IntArray) -> int:
    """How many samples a run has, for shards of `counts` samples: a sixteenth of the largest."""
    return max(1, int(counts.max(initial=1)) // RUNS_A_SHARD)


@dataclass(frozen=True, slots=True)
class LocalOrder:
    """The first `size` of `num_samples`, shuffled within windows of `window` samples made of runs of `run`.

    A bijection of range(num_samples) for given (num_samples, window, run, key); see the module for the algorithm.
    The last run, if it is shorter than the others, comes last.
    """

    size: int
    num_samples: int
    window: int
    run: int
    key: int

    def at(self, positions: IntArray) -> IntArray:
        """The sample indices at `positions` (int64 `[n]`, each in range(size)), int64 `[n]`."""
        windows = positions // self.window
        firsts = windows * self.window
        within = positions - firsts
        if len(windows) and windows[0] == windows[-1] and (windows == windows[0]).all():
            return self._samples(firsts + self._shuffle(int(windows[0])).at(within))
        placed = np.empty_like(positions)
        for number in np.unique(windows).tolist():
            here = np.flatnonzero(windows == number)
            placed[here] = firsts[here] + self._shuffle(number).at(within[here])
        return self._samples(placed)

    def needs(self, position: int) -> tuple[int, int]:
        """The first place and the one after the last, in the order of runs, to have been read when `position` is
        reached: its window, and of the one after as much as has passed of this one, so that the disk has steady work.
        """
        window = position - position % self.window
        end = min(-(-self.size // self.window) * self.window, self.num_samples)
        return window, min(position + self.window, end)

    def stretches(self, first: int, last: int) -> tuple[IntArray, IntArray]:
        """What lies at places [first, last) of the order of runs: consecutive samples, as the first of each stretch
        and the one after its last, int64 `[n]` each.
        """
        if first >= last:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        cuts = np.arange(first - first % self.run + self.run, last, self.run, dtype=np.int64)
        begins, ends = np.concatenate([[first], cuts]), np.concatenate([cuts, [last]])
        samples = self._samples(begins)
        stops = samples + ends - begins
        # A run may pass the end of the last shard, and goes on in the first.
        over = stops[stops > self.num_samples] - self.num_samples
        starts = np.concatenate([samples, np.zeros(len(over), np.int64)])
        return starts, np.concatenate([np.minimum(stops, self.num_samples), over])

    def _samples(self, places: IntArray) -> IntArray:
        """The samples at `places` in the order of runs."""
        whole = self.num_samples // self.run
        runs = places // self.run
        rows = places - runs * self.run
        if whole > 1:
            full = runs < whole
            runs[full] = _permutation(whole, mix_key(self.key, _RUNS_KEY)).at(runs[full])
        start = mix_key(self.key, _START_KEY) % self.num_samples
        found: IntArray = (runs * self.run + rows + start) % self.num_samples
        return found

    def _shuffle(self, window: int) -> Permutation:
        length = min(self.window, self.num_samples - window * self.window)
        return _permutation(length, mix_key(self.key, _WINDOW_KEY, window))


@lru_cache(maxsize=64)
def _permutation(n: int, key: int) -> Permutation:
    return Permutation(n, key)
