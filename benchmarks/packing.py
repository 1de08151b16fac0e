"""Token windows beside Hugging Face's streaming with the same packing: `python -m benchmarks.packing`.

Text: the sources of Python's standard library, one document a module, as JSON Lines on a real S3 server; a BPE tokenizer trained
on a part of it. First a narrow network, and the language model of `examples/pack_tokens.py` that trains for 30 s from each
loader, beginning with its creation: tokens a second, the share of the time spent waiting, and the loss on windows that neither
has seen. Then no limit and no model: each loader goes over all windows, the first time and once more. Both have one
process beside the trainer, the same tokenizer and the same packing.
"""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from datasets import load_dataset
from datasets.utils.logging import disable_progress_bar
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

import cachestream as cs
from benchmarks.measure import emit, scratch
from cachestream.sources.token_windows import packed_windows
from examples.pack_tokens import EOS, LanguageModel, train_tokenizer
from tests.support.proxy import run_proxy
from tests.support.s3 import run_s3_server

BLOCK: Final = 128
BATCH: Final = 16
SECONDS: Final = 30.0
BYTES_PER_S: Final = 100e3
FILES: Final = 60
FILE_BYTES: Final = 50_000
HELD_OUT: Final = 128  # windows
Batch = dict[str, torch.Tensor]


def modules() -> Iterator[str]:
    """The sources of the standard library's modules of 1 to 20 kB, the same order everywhere."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"), key=lambda path: path.name[::-1]):
        if 1_000 < path.stat().st_size < 20_000 and "packages" not in path.parent.name:
            yield path.read_text(encoding="utf-8", errors="replace")


def write(bucket: Path) -> tuple[list[str], list[str]]:
    """Write the files; returns the first documents, which are in no file, and the names of the files."""
    texts = modules()
    first = [next(texts) for _ in range(20)]
    names = []
    for number in range(FILES):
        lines, size = [], 0
        while size < FILE_BYTES and (text := next(texts, "")):
            lines.append(json.dumps({"text": text}) + "\n")
            size += len(lines[-1])
        if lines:
            names.append(f"{number:03}.jsonl")
            (bucket / names[-1]).write_text("".join(lines), encoding="utf-8")
    return first, names


def windows_of(texts: Iterable[str], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    documents = (("", np.array([*tokenizer.encode(text).ids, EOS], np.int32)) for text in texts)
    found = packed_windows(documents, BLOCK + 1, split=True)
    return [window.sample(None) for window in found if not window.room]


class PackBatch:
    """The packing for `datasets`, which calls it with a few documents at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, documents: dict[str, list[str]]) -> dict[str, Any]:
        windows = windows_of(documents["text"], self.tokenizer)
        return {
            name: [window[name] for window in windows] for name in ("tokens", "document_ids", "positions")
        }


def hugging_face(urls: list[str], options: dict[str, Any], tokenizer: Tokenizer) -> DataLoader[Any]:
    data = load_dataset("json", data_files=urls, split="train", streaming=True, storage_options=options)
    packed = data.map(PackBatch(tokenizer), batched=True, batch_size=8, remove_columns=["text"])
    shuffled = packed.shuffle(seed=0, buffer_size=256).with_format("torch")
    return DataLoader(shuffled, batch_size=BATCH, num_workers=1, drop_last=True)


def ours(urls: list[str], options: dict[str, Any], tokenizer: Tokenizer, cache: Path) -> Any:
    return cs.stream(
        urls,
        cache,
        "1GB",
        batch_size=BATCH,
        num_workers=1,
        storage_options=options,
        transform=cs.pack_tokens(BLOCK, "text", tokenizer=tokenizer, eos=EOS),
    )


def train(loader: Iterable[Any], begun_s: float, held_out: Batch, vocab_size: int) -> dict[str, float]:
    """Train until SECONDS after `begun_s`, epoch by epoch."""
    torch.manual_seed(0)
    model = LanguageModel(vocab_size, BLOCK)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    steps, waited_s, asked_s, first_s = 0, 0.0, begun_s, 0.0
    while asked_s - begun_s < SECONDS:
        for batch in loader:
            came_s = time.perf_counter()
            waited_s += came_s - asked_s
            first_s = first_s or came_s - begun_s
            if came_s - begun_s >= SECONDS:
                break
            optimiser.zero_grad()
            model.loss(batch).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            steps += 1
            asked_s = time.perf_counter()
        asked_s = min(asked_s, time.perf_counter())
        if time.perf_counter() - begun_s >= SECONDS:
            break
    with torch.no_grad():
        loss = float(model.loss(held_out))
    return {
        "first_batch_s": first_s,
        "tokens_per_s": steps * BATCH * BLOCK / SECONDS,
        "waiting_percent": 100 * min(1.0, waited_s / SECONDS),
        "loss": loss,
    }


def passes(loader: Iterable[Any], begun_s: float) -> list[float]:
    """Tokens a second from `begun_s` over all batches, and over all of them once more."""
    found = []
    for _ in range(2):
        tokens = sum(batch["tokens"].numel() for batch in loader)
        now_s = time.perf_counter()
        found.append(tokens / (now_s - begun_s))
        begun_s = now_s
    return found


def main() -> None:
    disable_progress_bar()
    torch.set_num_threads(1)
    with scratch() as folder, run_s3_server(folder / "s3", fresh=False) as server:
        first, names = write(server.bucket("text"))
        tokenizer = train_tokenizer(first)
        held_out = torch.utils.data.default_collate(windows_of(first, tokenizer)[:HELD_OUT])
        urls, vocab_size = [f"s3://text/{name}" for name in names], tokenizer.get_vocab_size()
        figures: dict[str, float] = {}
        for name in ("ours", "theirs"):
            with run_proxy(server.port, bytes_per_s=BYTES_PER_S) as proxy:
                options, begun_s = server.options_through(proxy.port), time.perf_counter()
                if name == "theirs":
                    found = train(hugging_face(urls, options, tokenizer), begun_s, held_out, vocab_size)
                else:
                    with ours(urls, options, tokenizer, folder / "narrow") as loader:
                        found = train(loader, begun_s, held_out, vocab_size)
            figures |= {f"{name}_{figure}": value for figure, value in found.items()}
        options, begun_s = server.storage_options, time.perf_counter()
        with ours(urls, options, tokenizer, folder / "wide") as loader:
            loader.worker.wait(timeout_s=120)
            figures["ours_first_pass_per_s"], figures["ours_later_passes_per_s"] = passes(loader, begun_s)
        begun_s = time.perf_counter()
        first_pass, later = passes(hugging_face(urls, options, tokenizer), begun_s)
        figures |= {"theirs_first_pass_per_s": first_pass, "theirs_later_passes_per_s": later}
    for figure in ("tokens_per_s", "first_pass_per_s", "later_passes_per_s"):
        figures[f"{figure}_ratio"] = figures[f"ours_{figure}"] / figures[f"theirs_{figure}"]
    figures["loss_lower_by"] = figures["theirs_loss"] - figures["ours_loss"]
    emit(**figures)


if __name__ == "__main__":
    main()
