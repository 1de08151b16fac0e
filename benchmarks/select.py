"""Selected samples, selected fields, and batches by tokens: `python -m benchmarks.select` (needs `datasets`).

60,000 samples with a picture of 4 KiB, a vector of 256 bytes and a label, batches of 256: the tenth with one label, beside a cache of
these samples alone. 16,384 samples of 1 to 512 tokens (log-normal) by `max_tokens=` and in batches of 64, beside Hugging Face `datasets`
with `filter`, a DataLoader, and batches cut by the same rule. All in turns, by the processor time of the process.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader

import cachestream as cs
from benchmarks.measure import emit, scratch
from cachestream.storage.view import View
from cachestream.training.alike_batches import group_by_length, shuffle_batches
from tests.support.caches import add_shard

SAMPLES, SHARD, TEXTS, TURNS = 60_000, 2000, 16_384, 5
BUDGET, BATCH = 16_384, 256


def fill(folder: Path, samples: Iterator[dict[str, Any]]) -> cs.Cache:
    cache, shard = cs.Cache(folder, size_limit="4GB", min_free=0), []
    for number, sample in enumerate(samples):
        shard.append((str(number), sample))
        if len(shard) == SHARD:
            add_shard(cache, shard)
            shard = []
    if shard:
        add_shard(cache, shard)
    return cache


def pictures(step: int) -> Iterator[dict[str, Any]]:
    pixels = np.random.default_rng(0).integers(0, 255, 4096 + SAMPLES, dtype=np.uint8)
    for n in range(0, SAMPLES, step):
        yield {"picture": pixels[n : n + 4096], "x": pixels[n : n + 256], "label": np.int64(n % 10)}


def cpu_s(work: Callable[[], object]) -> float:
    begun_s = time.process_time()
    work()
    return time.process_time() - begun_s


def medians(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median processor time of each of `works`, which run in turns after a first time."""
    for work in works.values():
        work()
    taken = [{name: cpu_s(work) for name, work in works.items()} for _ in range(TURNS)]
    return {name: statistics.median(turn[name] for turn in taken) for name in works}


def drain(loader: Any) -> None:
    for _ in loader:
        pass


def label_0(columns: cs.ShardColumns) -> Any:
    return columns["label"] == 0


def selecting(folder: Path) -> dict[str, float]:
    whole, tenth = fill(folder / "whole", pictures(1)), fill(folder / "tenth", pictures(10))
    with (
        cs.EpochLoader(whole, BATCH, where=label_0) as selected,
        cs.EpochLoader(tenth, BATCH) as alone,
        cs.EpochLoader(whole, BATCH, columns=["x", "label"]) as narrow,
        cs.EpochLoader(whole, BATCH) as wide,
    ):
        loaders = {"selected": selected, "alone": alone, "narrow": narrow, "wide": wide}
        took_s = medians({name: lambda one=one: drain(one) for name, one in loaders.items()})  # type: ignore[misc]
    first, again = [], []
    for _ in range(TURNS):
        view = View(label_0, None)
        first.append(cpu_s(lambda view=view: view.evaluate(whole, None)))  # type: ignore[misc]
        again.append(cpu_s(lambda view=view: view.evaluate(whole, None)))  # type: ignore[misc]
    table = datasets.Dataset.from_dict({"label": np.arange(SAMPLES) % 10}).with_format("numpy")
    filtered = [
        cpu_s(lambda: table.filter(lambda rows: rows["label"] == 0, batched=True)) for _ in range(TURNS)
    ]
    evaluate_s = statistics.median(first)
    return {
        "where_to_own_cache": took_s["alone"] / took_s["selected"],
        "columns_to_all": took_s["wide"] / took_s["narrow"],
        "evaluate_s_per_million": evaluate_s * 1e6 / SAMPLES,
        "again_ms": statistics.median(again) * 1e3,
        "evaluate_to_filter": statistics.median(filtered) / evaluate_s,
    }


def pad(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    return values, torch.tensor([len(sample["tokens"]) for sample in samples])


class TokenBatches:
    """A batch sampler for a DataLoader: batches as `max_tokens=` cuts them, in another order each epoch."""

    def __init__(self, lengths: Any) -> None:
        self.lengths, self.epoch = lengths, 0

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        order = np.random.default_rng(self.epoch).permutation(len(self.lengths))
        cut = group_by_length(self.lengths, order, BUDGET, BATCH, 100 * BATCH)
        indices, bounds = shuffle_batches(*cut, 1, self.epoch)
        return (part.tolist() for part in np.split(indices, bounds[1:-1]))


def padding_of(loader: Any) -> float:
    padded = tokens = 0
    for batch in loader:
        values, lengths = batch["tokens"]
        padded, tokens = padded + values.numel(), tokens + int(lengths.sum())
    return 1 - tokens / padded


def by_tokens(folder: Path) -> dict[str, float]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.5, 0.8, TEXTS), 1, 512).astype(np.int64)
    texts = [rng.integers(0, 50_000, length) for length in lengths]
    cache = fill(folder / "texts", ({"tokens": text} for text in texts))
    table = datasets.Dataset.from_dict({"tokens": texts, "length": lengths}).with_format("torch")
    table = table.filter(lambda rows: rows["length"] >= 4, batched=True)
    kept = np.asarray(table.with_format("numpy")["length"][:])
    options: dict[str, Any] = {"ragged": "padded", "where": lambda columns: columns.lengths("tokens") >= 4}
    with (
        cs.EpochLoader(cache, BATCH, max_tokens={"tokens": BUDGET}, **options) as budget,
        cs.EpochLoader(cache, 64, drop_last=False, **options) as fixed,
    ):
        peer = DataLoader(table.select_columns(["tokens"]), batch_sampler=TokenBatches(kept), collate_fn=pad)
        loaders = {"budget": budget, "fixed": fixed, "peer": peer}
        took_s = medians({name: lambda one=one: drain(one) for name, one in loaders.items()})  # type: ignore[misc]
        shares = padding_of(budget), padding_of(fixed)
    million = int(kept.sum()) / 1e6
    return {
        "padding_max_tokens": shares[0],
        "padding_fixed": shares[1],
        "max_tokens_million_per_s": million / took_s["budget"],
        "fixed_million_per_s": million / took_s["fixed"],
        "datasets_million_per_s": million / took_s["peer"],
        "max_tokens_to_datasets": took_s["peer"] / took_s["budget"],
    }


def main() -> None:
    torch.set_num_threads(1)
    datasets.disable_caching()
    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    with scratch() as folder:
        emit(**selecting(folder), **by_tokens(folder))


if __name__ == "__main__":
    main()
