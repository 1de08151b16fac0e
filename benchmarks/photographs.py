"""Photographs that are decoded once, beside decoding them in every epoch: `python -m benchmarks.photographs`.

2,000 JPEGs of 640 × 480, resized and cropped to 224 × 224, in shuffled batches of 64, everything in the page cache. "decoding" is
a DataLoader with two processes whose dataset decodes as our sources do: by simplejpeg where it is installed, at a part of the size
where that is enough. The EpochLoader gets them from a cache that was filled with the same pixels; one epoch of both is compared.
"""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import cachestream as cs
from benchmarks.measure import emit, scratch
from cachestream.sources.decode.images import ImageOptions, decode_image

IMAGES: Final = 2000
DISTINCT: Final = 50
BATCH: Final = 64
SIZE: Final = 224
EPOCHS: Final = 5


def photograph(width: int, height: int, seed: int) -> bytes:
    """A JPEG of smooth colours with noise."""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(smooth).astype(np.int16) + rng.normal(0, 6, (height, width, 3)).astype(np.int16)
    stream = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


class Decoding(Dataset[Any]):
    """The files, decoded each time that they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.jpg"))
        self._options = ImageOptions(resize=SIZE, crop=SIZE)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(decode_image(self._paths[index].read_bytes(), self._options))


def write(folder: Path) -> None:
    folder.mkdir()
    distinct = [photograph(640, 480, seed) for seed in range(DISTINCT)]
    for number in range(IMAGES):
        (folder / f"{number:05d}.jpg").write_bytes(distinct[number % DISTINCT])


def images_per_s(epoch: Callable[[], Iterable[torch.Tensor]]) -> float:
    """Images a second, the median of the epochs after the first."""
    rates = []
    for _ in range(EPOCHS):
        begun_s = time.perf_counter()
        count = sum(len(batch) for batch in epoch())
        rates.append(count / (time.perf_counter() - begun_s))
    return statistics.median(rates[1:])


def sums(epoch: Iterable[torch.Tensor]) -> list[int]:
    """A number for each image of an epoch, sorted: the same for the same images in any order."""
    return sorted(int(image.long().sum()) for batch in epoch for image in batch)


def main() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        write(folder / "photographs")
        decoding: DataLoader[Any] = DataLoader(
            Decoding(folder / "photographs"), BATCH, shuffle=True, num_workers=2, persistent_workers=True
        )
        cache = cs.Cache(folder / "cache", size_limit="2GB")
        source = cs.open_source(str(folder / "photographs"), resize=SIZE, crop=SIZE, label=None)
        with cs.start_worker(cache, source, num_workers=2) as worker:
            worker.wait(timeout_s=120)
        with cs.EpochLoader(cache, BATCH, drop_last=False) as loader:
            assert sums(batch["image"] for batch in loader) == sums(decoding)
            ours = images_per_s(lambda: (batch["image"] for batch in loader))
        decoded = images_per_s(lambda: decoding)
    emit(decoding_images_per_s=decoded, loader_images_per_s=ours, loader_to_decoding=ours / decoded)


if __name__ == "__main__":
    main()
