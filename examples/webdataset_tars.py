"""Train from WebDataset's tars as they lie, on the first samples of many of them within seconds.

    python examples/webdataset_tars.py "s3://bucket/train-{000000..001281}.tar" /scratch/train --size-limit 200GB

Credentials for S3 come from the environment or the usual AWS files. Started again, it goes on from the cache.
"""

import argparse
import json
from contextlib import closing
from typing import Any

import numpy as np
from PIL import Image

import cachestream as cs

parser = argparse.ArgumentParser()
parser.add_argument("tars", help="a URL, a {000000..001281} range, a wildcard or a folder")
parser.add_argument("cache", help="a folder on a local disk")
parser.add_argument("--size-limit", default="1GB")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


def prepare(sample: dict[str, Any]) -> dict[str, Any]:
    """Runs in the background, once for each sample: its fields are the extensions in the tar."""
    pixels = sample["jpg"] if "jpg" in sample else sample["png"]
    image = Image.fromarray(pixels.transpose(1, 2, 0)).resize((64, 64))
    label = sample["cls"] if "cls" in sample else json.loads(sample["json"])["label"]
    return {"image": np.asarray(image).transpose(2, 0, 1), "label": label}


source = cs.TarSource(
    args.tars, samples_per_visit=100
)  # a share of a tar at a time: early epochs are diverse
loader = cs.stream(source, args.cache, args.size_limit, batch_size=32, transform=prepare, num_workers=2)
with closing(loader):
    for epoch in range(args.epochs):
        labels: set[int] = set()
        for batch in loader:  # {"image": uint8 [32, 3, 64, 64], "label": int64 [32]}
            labels.update(batch["label"].tolist())
        print(f"epoch {epoch + 1}: {len(loader)} batches, {len(labels)} classes")
