"""Train on a mix of a map-style Dataset, an IterableDataset and a function that simulates.

    python examples/dataset_and_function.py                    (its cache is ./mix-demo)

Few waves were recorded, many can be simulated: is one a sine, a triangle or a square? Three kinds of sources fill one
cache in proportion. The last line is the accuracy on other recordings.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import cachestream as cs


def wave(kind: int, rng: np.random.Generator, noise: float) -> dict[str, Any]:
    """A sine (0), a triangle (1) or a square (2) of some pitch and phase."""
    sine = np.sin(2 * np.pi * (rng.uniform(2, 6) * np.linspace(0, 1, 128) + rng.random()))
    pure = [sine, 2 / np.pi * np.arcsin(sine), np.sign(sine)][kind]
    return {"wave": (pure + rng.normal(0, noise, 128)).astype(np.float32), "kind": kind}


class Recordings(Dataset[dict[str, Any]]):  # read by their numbers, such as from files
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> dict[str, Any]:
        return wave(index % 3, np.random.default_rng(index), noise=0.4)


class Log(IterableDataset[dict[str, Any]]):  # read from begin to end: each worker, here each shard, its share
    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        for number in range(info.id if info else 0, 600, info.num_workers if info else 1):
            yield wave(number % 3, np.random.default_rng(10_000 + number), noise=0.8)


def simulate(rng: np.random.Generator) -> dict[str, Any]:
    return wave(int(rng.integers(3)), rng, noise=0.0)


# Weights are proportions of units: a recording, a shard of 600 / 20 = 30 waves, a call. So 300 : 600 : 600 waves.
log, simulation = cs.IterableSource(Log(), shards=20), cs.CallableSource(simulate, num_units=600)
source = cs.mix([(Recordings(), 1), (log, 2 / 30), (simulation, 2)])
names = ("recorded", "logged", "simulated")  # keys begin with the number of the source: "0/17"

network = nn.Sequential(
    nn.Conv1d(1, 16, 9, stride=2),
    nn.ReLU(),
    nn.Conv1d(16, 16, 9, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool1d(1),
    nn.Flatten(),
    nn.Linear(16, 3),
)
optimizer = torch.optim.Adam(network.parameters(), 1e-2)
with cs.stream(
    source, "mix-demo", "100MB", batch_size=32, epoch_size=1024, with_keys=True, num_workers=1
) as loader:
    for epoch in range(5):
        origins: Counter[str] = Counter()
        for batch in loader:  # {"wave": float32 [32, 128], "kind": int64 [32], "__key__": 32 texts}
            loss = nn.functional.cross_entropy(network(batch["wave"][:, None]), batch["kind"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            origins.update(names[int(key[0])] for key in batch["__key__"])
        print(f"epoch {epoch}: {', '.join(f'{origins[name]} {name}' for name in names)}")

others = [wave(number % 3, np.random.default_rng(20_000 + number), noise=0.4) for number in range(300)]
with torch.inference_mode():
    found = network(torch.tensor(np.stack([one["wave"] for one in others]))[:, None]).argmax(1)
print(f"{np.mean(found.numpy() == [one['kind'] for one in others]):.1%} of 300 other recordings are right")
