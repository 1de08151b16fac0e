"""From prose to code: the weights of two sources change while a model trains, and every batch holds to them.

    python examples/mixture.py               (no network, seconds: both texts come with Python)

"prose" is the language reference that `help()` shows, "code" is Python's own standard library, both in windows of 256
bytes. The mixture begins with nine tenths of prose and ends with nine tenths of code. The last lines compare the
planned numbers of samples with those drawn, and say how well the model predicts the next byte of either.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import nn

import cachestream as cs

WINDOW = 256
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--windows", type=int, default=800, help="of either text, at most")
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()


def windows(text: str) -> list[dict[str, Any]]:
    data = np.frombuffer(text.encode(), np.uint8)[: WINDOW * args.windows]
    return [{"text": window} for window in data[: len(data) // WINDOW * WINDOW].reshape(-1, WINDOW)]


library = Path(sysconfig.get_paths()["stdlib"])
prose = windows("\n".join(topics.values()))
code = windows("\n".join(path.read_text("utf-8") for path in sorted(library.glob("asyncio/*.py"))))
mixed = cs.mix({"prose": (prose, 1), "code": (code, 1)})


steps = args.epochs * ((len(prose) + len(code)) // args.batch_size)


def mixture(step: int) -> dict[str, float]:
    done = min(step / steps, 1)
    return {"prose": 0.9 - 0.8 * done, "code": 0.1 + 0.8 * done}


planned = {"prose": 0.0, "code": 0.0}
model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
losses = {"prose": 0.0, "code": 0.0}

with (
    tempfile.TemporaryDirectory() as folder,
    cs.Cache(f"{folder}/cache", size_limit="50MB", min_free=0) as cache,
    cs.start_worker(cache, mixed, num_workers=1) as worker,
):
    worker.wait(120)
    with cs.EpochLoader(cache, args.batch_size, mixture=mixture, with_keys=True) as loader:
        step = 0
        for epoch in range(args.epochs):
            for batch in loader:
                for name, weight in mixture(step).items():
                    planned[name] += weight * args.batch_size
                step += 1
                text: torch.Tensor = batch["text"].long()
                scores = model(text[:, :-1]).transpose(1, 2)
                each = nn.functional.cross_entropy(scores, text[:, 1:], reduction="none").mean(1)
                optimiser.zero_grad()
                each.mean().backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                is_code = torch.tensor([key.startswith("code") for key in batch["__key__"]])
                for name, mine in (("code", each[is_code]), ("prose", each[~is_code])):
                    losses[name] = float(mine.detach().mean()) if len(mine) else losses[name]
            print(f"epoch {epoch}: loss of prose {losses['prose']:.2f}, of code {losses['code']:.2f}")
        for name, figures in loader.stats.mixture.items():
            print(
                f"{name}: planned {planned[name]:.1f}, drawn {figures.drawn} ({figures.share:.1%}), "
                f"{figures.repeated} of them again in their epoch"
            )
