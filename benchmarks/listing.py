"""How long until the first sample of many names: `python -m benchmarks.listing {manifest,folder} {local,s3} COUNT [all]`.

A manifest names 2,000 small files again and again; a folder holds 1,000 empty files in each of its folders. "all": the
folder is listed to its end before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import cachestream as cs
from benchmarks.measure import scratch
from tests.support.s3 import run_s3_server

FILES = 2000


def write_manifest(bucket: Path, base: str, count: int) -> str:
    """The URL of a text of `count` names."""
    names = [f"{number:07d}-of-the-training-set.bin" for number in range(FILES)]
    for name in names:
        (bucket / name).write_bytes(b"x" * 100)
    (bucket / "list.txt").write_text("".join(f"{base}{names[i % FILES]}\n" for i in range(count)))
    return f"{base}list.txt"


def write_folder(bucket: Path, base: str, count: int) -> str:
    """The URL of a folder of `count` files."""
    for number in range(count):
        if number % 1000 == 0:
            (bucket / f"class-{number // 1000:04d}").mkdir()
        (bucket / f"class-{number // 1000:04d}" / f"{number % 1000:06d}.bin").touch()
    return base


def main(kind: str, place: str, count: int, *, at_once: bool) -> None:
    """Print what one run took."""
    with scratch() as folder, run_s3_server(folder / "s3", fresh=False) as server:
        bucket = server.bucket("names")
        base = "s3://names/" if place == "s3" else f"{bucket}/"
        options: dict[str, Any] = {"storage_options": server.storage_options} if place == "s3" else {}
        write = write_manifest if kind == "manifest" else write_folder
        where = write(bucket, base, count)
        what: Any = cs.Manifest(where) if kind == "manifest" else where
        if at_once:
            options["first_names"] = None
        with cs.Cache(folder / "cache", size_limit="1GB", min_free=0) as cache:
            begun_s = time.monotonic()
            source = cs.open_source(what, **options)
            opened_s = time.monotonic()
            with cs.start_worker(cache, source, num_workers=2, shard_size="100kB", concurrency=4) as worker:
                cache.wait(1, 300)
                first_s = time.monotonic()
                worker.stop()
    print(
        f"{kind} {place} {count:,}: opened after {opened_s - begun_s:.1f} s, first sample {first_s - begun_s:.1f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), at_once="all" in sys.argv)
