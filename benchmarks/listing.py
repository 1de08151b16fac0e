"""First batch from a bucket that was never listed: `python -m benchmarks.listing`.

A folder of 20,000 small objects on a real S3 server (rclone), which lists some thousand names a second: listed to its end,
the first batch would come after a quarter of a minute. Counted from the call of `stream`, in a script that has loaded torch.
"""

from __future__ import annotations

import time
from typing import Final

import torch  # noqa: F401 - as the script that trains has done

import cachestream as cs
from benchmarks.measure import emit, scratch
from tests.support.s3 import run_s3_server

OBJECTS: Final = 20_000
OBJECT_BYTES: Final = 1000
BATCH: Final = 64


def main() -> None:
    with scratch() as folder, run_s3_server(folder / "s3", fresh=False) as server:
        bucket = server.bucket("objects")
        for number in range(OBJECTS):
            (bucket / f"{number:06d}.bin").write_bytes(bytes(OBJECT_BYTES))
        cs.EpochLoader  # noqa: B018 - loads the part of the package that needs torch
        begun_s = time.perf_counter()
        loader = cs.stream(
            "s3://objects/",
            cache=folder / "cache",
            size_limit="1GB",
            batch_size=BATCH,
            num_workers=2,
            storage_options=server.storage_options,
        )
        next(iter(loader))
        first_s = time.perf_counter() - begun_s
        loader.close()
    emit(first_batch_s=first_s)


if __name__ == "__main__":
    main()
