"""Train on the long topics of Python's help only, in batches of as many words as fit, with little padding.

    python examples/token_budget.py

Every paragraph of `pydoc_data.topics`, which Python ships, is a sample: its text, its words as numbers, and the
number of its topic. Nothing is written again for the selection or for the batches.
"""

import tempfile
import zlib
from pydoc_data.topics import topics
from typing import Any

import numpy as np

import cachestream as cs

BUDGET = 4096


def paragraphs() -> list[dict[str, Any]]:
    samples = []
    for number, text in enumerate(topics.values()):
        for paragraph in filter(str.strip, text.split("\n\n")):
            words = [zlib.crc32(word.encode()) % 32_768 for word in paragraph.split()]
            samples.append({"text": paragraph, "words": np.array(words), "topic": number})
    return samples


def show(name: str, loader: cs.EpochLoader) -> None:
    batches = samples = words = padded = 0
    for batch in loader:
        values, lengths = batch["words"]
        batches, samples = batches + 1, samples + len(lengths)
        words, padded = words + int(lengths.sum()), padded + values.numel()
    loader.close()
    print(
        f"{name}: {samples} samples, {words} words in {batches} batches, and {1 - words / padded:.1%} of the values are padding"
    )


with tempfile.TemporaryDirectory() as folder, cs.Cache(folder + "/cache", "100MB") as cache:
    with cs.start_worker(cache, paragraphs(), num_workers=1) as worker:
        worker.wait(timeout_s=120)

    def whole_sentences(columns: cs.ShardColumns) -> Any:
        lengths = columns.lengths("words")
        return (lengths >= 4) & (lengths <= BUDGET)

    with cache.snapshot(where=whole_sentences) as dataset:
        lengths = dataset.lengths("words")  # int64 [len(dataset)]
        print(
            f"selected {len(dataset)} of {cache.num_samples} paragraphs, of {lengths.min()} to {lengths.max()} words"
        )

    options: dict[str, Any] = {"where": whole_sentences, "columns": ["words", "topic"], "ragged": "padded"}
    show("fixed batches", cs.EpochLoader(cache, 64, drop_last=False, **options))
    show("max_tokens", cs.EpochLoader(cache, 256, max_tokens={"words": BUDGET}, **options))
