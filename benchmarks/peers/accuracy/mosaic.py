"""MosaicML Streaming: MDS shards, its local cache, and blocks of a few shards to shuffle in.

The connection that its constructor leaves open is dropped before the worker processes are forked, and the default
block, which spans the data set, is made small: as it is, nothing would come within the budget.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Final

from torch.utils.data import DataLoader

import benchmarks.peers.mosaic  # noqa: F401  (lets `streaming` be imported without what it does not need)
from benchmarks.peers.accuracy import views

BUCKET: Final = "mds"
_SHUFFLE_BLOCK: Final = 8 * views.SHARD_SAMPLES


def prepare(views_at: Path, bucket: Path) -> None:
    streaming = import_module("streaming")
    columns = {"jpg": "bytes", "cls": "int"}
    with streaming.MDSWriter(out=str(bucket), columns=columns, size_limit=_shard_bytes(views_at)) as writer:
        for _, jpeg, place in views.read(views_at):
            writer.write({"jpg": jpeg, "cls": place})


def _shard_bytes(views_at: Path) -> int:
    sizes = [len(jpeg) for _, jpeg, _ in views.read(views_at)]
    return views.SHARD_SAMPLES * sum(sizes) // len(sizes)


def batches(remote: views.Remote, seed: int, option: str) -> views.Batches:
    os.environ["S3_ENDPOINT_URL"] = remote.endpoint_url
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = remote.key, remote.secret
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    streaming = import_module("streaming")
    import_module("streaming.base.util").clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        remote=f"s3://{BUCKET}",
        local=str(remote.folder / "mds"),
        shuffle=True,
        shuffle_seed=seed,
        shuffle_block_size=_SHUFFLE_BLOCK,
        batch_size=views.BATCH,
    )
    for stream in dataset.streams:
        stream._downloader.clean_up()
    loader = DataLoader(dataset, drop_last=True, **views.LOADER)
    yield from views.endless(loader)
