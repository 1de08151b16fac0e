"""cachestream: `cs.stream`; decoded views are cached, epochs run over what is there.

Options: "" reads WebDataset's tars, "mds" the shards that MosaicML Streaming wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.peers.accuracy import views
from benchmarks.peers.accuracy.shrinking import shrink_jpeg, shrink_view
from cachestream import stream

BUCKET: Final = "tars"


def prepare(views_at: Path, bucket: Path) -> None:
    """It reads what others prepared."""


def batches(remote: views.Remote, seed: int, option: str) -> views.Batches:
    what: dict[str, Any] = {
        "source": f"s3://{BUCKET}/{{000000..{remote.shards - 1:06d}}}.tar",
        "transform": shrink_view,
    }
    if option == "mds":
        what = {"source": "s3://mds/", "format": "mds", "transform": shrink_jpeg}
    with stream(
        **what,
        cache=remote.folder / "cache",
        size_limit="2GB",
        batch_size=views.BATCH,
        num_workers=views.LOADER_WORKERS,
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
