"""The price of `locality=` in shuffling: `python -m benchmarks.locality`.

100,000 samples in shards of 2,000, sorted into 100 classes, so that a batch of one place has one class; batches of 256. For
each window: the entropy of the classes in a batch as a share of a full shuffle's, the number of classes in a batch, and the
distance of neighbours in the order as a share of a full shuffle's. Pure arithmetic: the same on every machine.
"""

from __future__ import annotations

import statistics

import numpy as np
import numpy.typing as npt

from benchmarks.measure import emit
from cachestream.permutation import Permutation
from cachestream.training.plan import LocalOrder, SampleOrder, SequentialOrder, ShuffledOrder, run_length

SAMPLES, SHARD, CLASSES, BATCH = 100_000, 2_000, 100, 256
WINDOWS = (1_000, 4_000, 16_000, 64_000)
KEY = 11


def orders() -> dict[str, SampleOrder]:
    run = run_length(np.full(SAMPLES // SHARD, SHARD))
    local = {str(w): LocalOrder(SAMPLES, SAMPLES, w, run, KEY) for w in WINDOWS}
    return {
        "full": ShuffledOrder(SAMPLES, Permutation(SAMPLES, KEY)),
        **local,
        "none": SequentialOrder(SAMPLES),
    }


def entropy_bits(labels: npt.NDArray[np.int64]) -> float:
    """The entropy of the classes among `labels`, in bits."""
    share = np.bincount(labels, minlength=CLASSES) / len(labels)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def quality(order: SampleOrder) -> tuple[float, float, float]:
    """Distance of neighbours (in samples), entropy (bits) and number of classes in a batch."""
    drawn = order.at(np.arange(order.size, dtype=np.int64))
    labels = drawn // (SAMPLES // CLASSES)
    batches = labels[: SAMPLES // BATCH * BATCH].reshape(-1, BATCH)
    return (
        float(np.abs(np.diff(drawn)).mean()),
        statistics.mean(map(entropy_bits, batches)),
        statistics.mean(len(np.unique(batch)) for batch in batches),
    )


def main() -> None:
    found = {name: quality(order) for name, order in orders().items()}
    distance, bits, _ = found["full"]
    figures: dict[str, float] = {}
    for name, (of_distance, of_bits, classes) in found.items():
        figures[f"entropy_share_{name}"] = of_bits / bits
        figures[f"classes_{name}"] = classes
        figures[f"distance_share_{name}"] = of_distance / distance
    emit(**figures)


if __name__ == "__main__":
    main()
