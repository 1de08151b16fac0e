"""cachestream: `cs.stream` over WebDataset's tars; decoded views are cached, epochs run over what is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import cachestream as cs
from benchmarks.peers.accuracy.views import BATCH, LOADER_WORKERS, Batches, Remote
from cachestream.demo.data import shrink

BUCKET: Final = "tars"


def prepare(views_at: Path, bucket: Path) -> None:
    """The tars are there."""


def _shrink(sample: Mapping[str, Any]) -> dict[str, Any]:
    return shrink({"image": sample["jpg"], "label": sample["cls"]})


def batches(remote: Remote, seed: int, option: str) -> Batches:
    with cs.stream(
        f"s3://{BUCKET}/{{000000..{remote.shards - 1:06d}}}.tar",
        cache=remote.folder / "cache",
        size_limit="2GB",
        batch_size=BATCH,
        transform=_shrink,
        num_workers=LOADER_WORKERS,
        samples_per_visit=16,
        concurrency=2,
        seed=seed,
        storage_options={
            "key": remote.key,
            "secret": remote.secret,
            "endpoint_url": remote.endpoint_url,
            "client_kwargs": {"region_name": "us-east-1"},
        },
    ) as loader:
        while True:
            for batch in loader:
                yield batch["image"], batch["label"]
