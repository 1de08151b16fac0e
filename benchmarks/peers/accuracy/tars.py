"""WebDataset: tars read through curl from presigned addresses, with a shuffle buffer.

Options: "" streams each epoch; "cache" keeps the tars in `cache_dir` and draws them with replacement, so that some
are read again from there.
"""

from __future__ import annotations

import io
import itertools
import random
import tarfile
from pathlib import Path
from typing import Any, Final

import boto3
import webdataset as wds
from botocore.config import Config

from benchmarks.peers.accuracy import views

BUCKET: Final = "tars"
_SHUFFLE_BUFFER: Final = (
    256  # samples: as the remote is slow, a larger one would hold back most of what has come
)
_VALID_S: Final = 24 * 3600


def prepare(views_at: Path, bucket: Path) -> None:
    samples = views.read(views_at)
    for shard in itertools.count():
        group = list(itertools.islice(samples, views.SHARD_SAMPLES))
        if not group:
            return
        with tarfile.open(bucket / f"{shard:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, jpeg, place in group:
                for ending, content in (("jpg", jpeg), ("cls", str(place).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{ending}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def batches(remote: views.Remote, seed: int, option: str) -> views.Batches:
    addresses = _presigned(remote)
    if option == "cache":
        cache = remote.folder / "tars"
        cache.mkdir()
        kept: dict[str, Any] = {"resampled": True, "cache_dir": str(cache), "url_to_name": _name}
    else:
        kept = {"shardshuffle": len(addresses)}
    random.seed(seed)
    dataset = (
        wds.WebDataset(addresses, seed=seed, empty_check=False, **kept)
        .shuffle(_SHUFFLE_BUFFER, initial=views.BATCH)
        .batched(views.BATCH, collation_fn=views.stack, partial=False)
    )
    loader = wds.WebLoader(
        dataset, batch_size=None, num_workers=views.LOADER_WORKERS, persistent_workers=True
    )
    yield from views.endless(loader)


def _presigned(remote: views.Remote) -> list[str]:
    config = Config(signature_version="s3v4", s3={"addressing_style": "path"})
    client = boto3.client("s3", config=config, **remote.boto_options)
    addresses = [
        client.generate_presigned_url(
            "get_object", Params={"Bucket": BUCKET, "Key": f"{shard:06d}.tar"}, ExpiresIn=_VALID_S
        )
        for shard in range(remote.shards)
    ]
    return [f"pipe:curl -s -f '{address}'" for address in addresses]


def _name(command: str) -> str:
    """The name of a tar's file in `cache_dir`."""
    return command.split("?", 1)[0].rsplit("/", 1)[1]
