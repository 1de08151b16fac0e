"""Train from a data set of MosaicML Streaming's or LitData's as it lies: no conversion, none of their libraries.

    python examples/from_peers.py s3://bucket/imagenet/train mds /scratch/train --size-limit 200GB

The last argument's folder is the cache. Credentials for S3 come from the environment or the usual AWS files.
"""

import argparse
from contextlib import closing

import cachestream as cs

parser = argparse.ArgumentParser()
parser.add_argument("url", help="the folder that holds the index.json")
parser.add_argument("format", choices=["mds", "litdata"])
parser.add_argument("cache", help="a folder on a local disk")
parser.add_argument("--size-limit", default="1GB")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

loader = cs.stream(
    args.url,
    args.cache,
    args.size_limit,
    format=args.format,
    samples_per_visit=200,  # a share of a shard at a time: early epochs are diverse; only where they are not compressed
    resize=256,
    crop=224,
    batch_size=32,
    num_workers=2,
)
with closing(loader):
    for epoch in range(args.epochs):
        samples = 0
        for batch in loader:  # the set's own columns: {"image": uint8 [32, 3, 224, 224], "label": int64 [32]}
            samples += len(next(iter(batch.values())))
        print(f"epoch {epoch + 1}: {samples} samples of {', '.join(batch)}")
