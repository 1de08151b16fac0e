"""The data of the task: JPEG views of places, as the demo makes them, and views of the same places held out."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from benchmarks.peers.accuracy.shrinking import shrink_jpeg
from cachestream.demo.data import PLACES

__all__ = [
    "BATCH",
    "LOADER",
    "LOADER_WORKERS",
    "SHARD_SAMPLES",
    "Batches",
    "Feed",
    "Remote",
    "decode",
    "endless",
    "read",
    "stack",
]

SHARD_SAMPLES: Final = (
    128  # of every format: 0.8 MB, so that at a slow remote nobody waits long for a first one
)
BATCH: Final = 32
LOADER_WORKERS: Final = 2  # processes that fetch and decode, of every loader

Batches: TypeAlias = Generator[tuple[Tensor, Tensor], None, None]
_KEPT: Final[list[object]] = []


@dataclass(frozen=True, slots=True)
class Remote:
    """The S3 server as a loader sees it, `shards` objects in each bucket, and an empty `folder` of the run's own."""

    endpoint_url: str
    key: str
    secret: str
    shards: int
    folder: Path

    @property
    def boto_options(self) -> dict[str, str]:
        return {
            "endpoint_url": self.endpoint_url,
            "aws_access_key_id": self.key,
            "aws_secret_access_key": self.secret,
            "region_name": "us-east-1",
        }


class Feed(Protocol):
    """Interface of the modules of this folder that stand for a loader."""

    BUCKET: str

    def prepare(self, views_at: Path, bucket: Path) -> None:
        """Write the views in the format of the loader."""

    def batches(self, remote: Remote, seed: int, option: str) -> Batches:
        """Shuffled batches without end: uint8 `[BATCH, 3, SIDE, SIDE]` and int64 `[BATCH]`."""


def read(folder: Path) -> Iterator[tuple[int, bytes, int]]:
    """The number of each view in `folder`, its JPEG file and its place; neighbours show different places."""
    for path in sorted(folder.glob("*/*.jpg"), key=lambda path: path.stem):
        number = int(path.stem)
        yield number, path.read_bytes(), number % PLACES


def decode(jpeg: bytes) -> Tensor:
    """uint8 `[3, SIDE, SIDE]`: just what the demo's `shrink` makes of the decoded view."""
    return torch.from_numpy(shrink_jpeg({"jpg": jpeg, "cls": 0})["image"])


def stack(samples: Iterable[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    """A batch of samples with fields "jpg" and "cls", decoded; the peers do it in their worker processes."""
    samples = list(samples)
    images = torch.stack([decode(sample["jpg"]) for sample in samples])
    return images, torch.tensor([int(sample["cls"]) for sample in samples])


LOADER: Final[dict[str, Any]] = {  # what torch's DataLoader and those that are like it are told
    "batch_size": BATCH,
    "num_workers": LOADER_WORKERS,
    "persistent_workers": True,
    "collate_fn": stack,
}


def endless(loader: Iterable[Any]) -> Batches:
    """One epoch of `loader` after the other. It is never torn down: the process ends first, where that would hang."""
    _KEPT.append(loader)
    while True:
        yield from loader
