"""LitData: chunks made by `optimize`, read through its cache.

Options: "" takes all data; a number is `subsample`, the share of the data chosen beforehand that every epoch repeats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import litdata
from litdata.streaming import downloader

from benchmarks.peers.accuracy import views

BUCKET: Final = "lit"
_SMALL: Final = "5MB"  # as chunks are small it would fetch 64 at once, the first of which then come last


def _sample(view: tuple[int, bytes, int]) -> dict[str, object]:
    return {"jpg": view[1], "cls": view[2]}


def prepare(views_at: Path, bucket: Path) -> None:
    litdata.optimize(
        _sample, list(views.read(views_at)), str(bucket), chunk_size=views.SHARD_SAMPLES, num_workers=1
    )


def batches(remote: views.Remote, seed: int, option: str) -> views.Batches:
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # else it refuses an endpoint without TLS
    dataset = litdata.StreamingDataset(
        f"s3://{BUCKET}",
        cache_dir=str(remote.folder / "lit"),
        shuffle=True,
        seed=seed,
        drop_last=True,
        subsample=float(option or 1.0),
        max_cache_size="20GB" if option else _SMALL,
        storage_options=remote.boto_options,
    )
    loader = litdata.StreamingDataLoader(dataset, **views.LOADER)
    yield from views.endless(loader)
