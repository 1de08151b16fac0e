"""How long until the first sample of many names:
`python -m benchmarks.listing {manifest,folder} {local,s3,ftp} COUNT [--each N] [--first N]`.

A manifest names 2,000 small files again and again; a folder holds `--each` empty files (1,000) in each of its folders.
`--first`: so many names are listed before, 0 for all; without it, as many as `FileSource` takes by itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cachestream as cs
from benchmarks.measure import scratch
from tests.support.ftp import run_ftp_server
from tests.support.s3 import run_s3_server

FILES = 2000


def write_manifest(bucket: Path, base: str, count: int) -> str:
    """The URL of a text of `count` names."""
    names = [f"{number:07d}-of-the-training-set.bin" for number in range(FILES)]
    for name in names:
        (bucket / name).write_bytes(b"x" * 100)
    (bucket / "list.txt").write_text("".join(f"{base}{names[i % FILES]}\n" for i in range(count)))
    return f"{base}list.txt"


def write_folder(bucket: Path, base: str, count: int, each: int) -> str:
    """The URL of a folder of `count` files."""
    for number in range(count):
        folder = bucket / f"class-{number // each:04d}"
        if number % each == 0:
            folder.mkdir()
        (folder / f"{number % each:06d}.bin").touch()
    return base


@contextmanager
def served(place: str, folder: Path) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """A folder, how its URLs begin at `place`, and what it takes to read them."""
    bucket = folder / "served" / "names"
    if place == "s3":
        with run_s3_server(folder / "served", fresh=False) as server:
            yield server.bucket("names"), "s3://names/", {"storage_options": server.storage_options}
        return
    bucket.mkdir(parents=True)
    if place == "ftp":
        with run_ftp_server(folder / "served") as ftp:
            yield bucket, "ftp://127.0.0.1/names/", {"storage_options": ftp.options}
        return
    yield bucket, f"{bucket}/", {}


def main(kind: str, place: str, count: int, each: int, first: int | None) -> None:
    """Print what one run took."""
    with scratch() as folder, served(place, folder) as (bucket, base, options):
        what: Any = (
            cs.Manifest(write_manifest(bucket, base, count))
            if kind == "manifest"
            else write_folder(bucket, base, count, each)
        )
        if first is not None:
            options["first_names"] = first or None
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
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("manifest", "folder"))
    parser.add_argument("place", choices=("local", "s3", "ftp"))
    parser.add_argument("count", type=int)
    parser.add_argument("--each", type=int, default=1000)
    parser.add_argument("--first", type=int)
    given = parser.parse_args()
    main(given.kind, given.place, given.count, given.each, given.first)
