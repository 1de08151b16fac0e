"""Diversity of the first epoch over 100 tars: `python -m benchmarks.diversity`.

Each tar holds 200 samples of one class, as tars written class by class do: the worst case. Epoch 1
is drawn from the first 1,000 samples that arrive, through a bandwidth of 20 MB/s, in three ways:
tars one after the other (order="sequential"), shuffled tars, and visits of 20 samples.
"""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path
from typing import Any

import cachestream as cs
from benchmarks.measure import emit, scratch
from cachestream.testing.checks import cached_keys

TARS = 100
SAMPLES = 200
SAMPLE_BYTES = 10_000
FIRST = 1000


def write_tars(folder: Path) -> None:
    """Tars of one class each."""
    folder.mkdir()
    content = bytes(SAMPLE_BYTES)
    for number in range(TARS):
        with tarfile.open(folder / f"{number:06d}.tar", "w") as archive:
            for sample in range(SAMPLES):
                for extension, data in (("bin", content), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"{sample:06d}.{extension}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def first_epoch(tars: Path, cache_path: Path, order: str, samples_per_visit: int | None) -> dict[str, float]:
    """Distinct tars (here: classes too) among the first samples, and how long these took."""
    source = cs.TarSource(tars, samples_per_visit=samples_per_visit)
    options: dict[str, Any] = {"order": order, "num_workers": 2, "bandwidth_limit": "20MB/s"}
    begun_s = time.perf_counter()
    with cs.Cache(cache_path, size_limit="2GB") as cache, cs.start_worker(cache, source, **options):
        cache.wait(FIRST, timeout_s=60)
        took_s = time.perf_counter() - begun_s
        keys = [*cached_keys(cache)][:FIRST]
    return {"distinct_tars": len({key.partition("#")[0] for key in keys}), "seconds": took_s}


def main() -> None:
    ways: dict[str, tuple[str, int | None]] = {
        "sequential": ("sequential", None),
        "shuffled": ("shuffle", None),
        "visits": ("shuffle", 20),
    }
    with scratch() as folder:
        write_tars(folder / "tars")
        found = {
            f"{name}_{figure}": value
            for name, way in ways.items()
            for figure, value in first_epoch(folder / "tars", folder / name, *way).items()
        }
    emit(**found)


if __name__ == "__main__":
    main()
