"""How filling grows with sampling processes: `python -m benchmarks.scaling [case …] [--processes 1,2,4]`.

Cases: what needs a processor (JPEGs of 640 × 480 to 224 × 224, from a local disk), what waits for a network (.npy files of
128 KiB, S3 with 50 ms), and what a bandwidth of 40 MB/s limits (tars on S3, and `bandwidth_limit`). All on this machine: the
server, the network and the processes share its processors. Rates are those of eight seconds of packing, after four
to find the speed in; "processors" is how many the machine kept busy meanwhile, all programs together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cachestream as cs
from benchmarks.decode import photograph
from benchmarks.places import open_places
from benchmarks.sources import BLOB_BYTES, LATENCY_S, write_npy, write_tars

FILL_TIMEOUT_S: Final = 60.0
SETTLE_S: Final = 4.0
MEASURED_S: Final = 8.0
SIDE: Final = 224


@dataclass(frozen=True, slots=True)
class Case:
    """`write` into a folder, which is read locally or as a bucket with `latency_s`; samples of `nbytes`."""

    write: Callable[[Path], None]
    source: Callable[..., Any]
    options: dict[str, Any]
    nbytes: int
    latency_s: float | None = None
    bandwidth: str | None = None


def repeat(name: str, count: int) -> Callable[[Path], None]:
    """Gives each file of a folder `count` names in all: enough for as long as is measured."""

    def write(folder: Path) -> None:
        WRITERS[name](folder)
        for path in sorted(folder.iterdir()):
            for number in range(1, count):
                os.link(path, folder / f"{path.stem}-{number}{path.suffix}")

    return write


def write_pictures(folder: Path) -> None:
    picture = photograph(640, 480)
    for number in range(100):
        (folder / f"{number}.jpg").write_bytes(picture)


WRITERS: Final = {"jpg": write_pictures, "npy": write_npy, "tar": write_tars}
CASES: Final = {
    "JPEG, local": Case(repeat("jpg", 200), cs.FileSource, {"resize": SIDE, "crop": SIDE}, 3 * SIDE * SIDE),
    "npy files, 128 KiB, S3 with 50 ms": Case(repeat("npy", 1), cs.FileSource, {}, 131_072, LATENCY_S),
    "tars, S3, at most 40 MB/s": Case(repeat("tar", 2), cs.TarSource, {}, BLOB_BYTES, 0.0, "40MB/s"),
}


def busy_s() -> float:
    """Seconds that processors of this machine have worked, all together."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def packed(cache: cs.Cache) -> int:
    """How many samples the worker has packed so far; those in the cache come a shard at a time."""
    worker = cache.status().worker
    assert worker is not None
    return worker.totals.samples


def fill_per_s(case: Case, source: Any, folder: Path, processes: int) -> tuple[float, float]:
    """Samples a second that `processes` cache, and how many processors were busy."""
    with cs.Cache(folder / "cache", size_limit="8GB") as cache:
        with cs.start_worker(cache, source, num_workers=processes, bandwidth_limit=case.bandwidth):
            cache.wait(1, timeout_s=FILL_TIMEOUT_S)
            time.sleep(SETTLE_S)
            first, first_s, first_busy_s = packed(cache), time.perf_counter(), busy_s()
            time.sleep(MEASURED_S)
            last, last_s, last_busy_s = packed(cache), time.perf_counter(), busy_s()
        cache.clear()
    shutil.rmtree(folder / "cache")
    took_s = last_s - first_s
    return (last - first) / took_s, (last_busy_s - first_busy_s) / took_s


def main() -> None:
    parser = argparse.ArgumentParser(description="How filling grows with sampling processes.")
    parser.add_argument("cases", nargs="*", help="words of their names")
    parser.add_argument("--processes", default="1,2,4")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.processes.split(",")]
    print("| source | processes | MB/s | samples/s | processors busy |\n|-|-|-|-|-|")
    for name, case in CASES.items():
        if not all(word in name for word in arguments.cases):
            continue
        with open_places() as places:
            case.write(places.data)
            url, options = places.at(case.latency_s)
            source = case.source(url, storage_options=options, **case.options)
            for count in counts:
                rate, busy = fill_per_s(case, source, places.scratch, count)
                row = f"{rate * case.nbytes / 1e6:,.0f} | {rate:,.0f} | {busy:.1f}"
                print(f"| {name} | {count} | {row} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    main()
