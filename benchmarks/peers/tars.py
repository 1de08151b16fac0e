"""WebDataset's tars: read in order through a shuffle buffer by WebDataset, at random by wids."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import webdataset as wds
import wids
from torch.utils.data import DataLoader

from benchmarks.peers.workload import Epochs, Workload

_SHUFFLE_BUFFER = 1000


def prepare(folder: Path, work: Workload) -> None:
    shards = []
    for number, samples in enumerate(work.shards()):
        path = folder / f"{number:05d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in samples:
                record = work.record(i)
                member = tarfile.TarInfo(f"{i:06d}.bin")
                member.size = len(record)
                tar.addfile(member, io.BytesIO(record))
        shards.append({"url": str(path), "nsamples": len(samples)})
    (folder / "shards.json").write_text(json.dumps(shards))


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    shards = json.loads((folder / "shards.json").read_text())
    yield (_wids if option == "wids" else _webdataset)(shards, work, workers)


def _wids(shards: list[dict[str, Any]], work: Workload, workers: int) -> Epochs:
    dataset = wids.ShardListDataset(
        shards,
        lru_size=len(shards) + 1,
        localname=lambda url: url,
        transformations=[lambda sample: work.unpack(sample[".bin"].getbuffer())],
        keep=True,
    )
    return DataLoader(
        dataset,
        batch_size=work.batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=work.stack,
    )


def _webdataset(shards: list[dict[str, Any]], work: Workload, workers: int) -> Epochs:
    dataset = (
        wds.WebDataset([shard["url"] for shard in shards], shardshuffle=len(shards), empty_check=False)
        .shuffle(_SHUFFLE_BUFFER, initial=_SHUFFLE_BUFFER)
        .map(lambda sample: work.unpack(sample["bin"]))
        .batched(work.batch, collation_fn=work.stack)
    )
    loader: Epochs = wds.WebLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0
    )
    return loader
