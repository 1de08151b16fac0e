"""A cache larger than memory: `python -m benchmarks.beyond [bytes of a sample]`, as root.

A cache of 3 GB is read by a process that a control group allows 1 GB of memory, page cache included: shuffled fully, within
a window, and in order by the EpochLoader, shuffled by a DataLoader; beside a memmap of the same samples that is batched by
hand. Each is timed for 10 s, after twice the memory has been read, or 10 s. Told are samples a second, and how many bytes
were read from the disk for each byte delivered. Every batch is checked. It needs Linux, and room for 6 GB.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader

import cachestream as cs
from benchmarks.measure import emit, run_rounds, scratch
from tests.support.caches import add_shard

CACHE_BYTES: Final = 3_000_000_000
MEMORY_BYTES: Final = 1_000_000_000
SHARD_BYTES: Final = 32_000_000
BATCH_BYTES: Final = 4 << 20
SECONDS: Final = 10.0
GROUPS: Final = Path("/sys/fs/cgroup")
WINDOW: Final = 0.1  # of the memory


@contextmanager
def limited_memory() -> Iterator[Path]:
    """The file to which a process writes "0" to live with MEMORY_BYTES from then on, of either version of control groups."""
    old = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if old else GROUPS) / f"cachestream-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(MEMORY_BYTES))
    except OSError as error:
        raise SystemExit(
            f"{group}: memory cannot be limited here ({error}); run this as root, with control groups"
        ) from None
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def fill(folder: Path, sample_bytes: int) -> None:
    cache = cs.Cache(folder, size_limit="100GB", min_free=0)
    rows = SHARD_BYTES // sample_bytes
    for shard in range(CACHE_BYTES // (rows * sample_bytes)):
        numbers = range(shard * rows, (shard + 1) * rows)
        add_shard(cache, ((str(n), {"x": torch.full((sample_bytes // 4,), float(n))}) for n in numbers))
    drop(folder)


def fill_memmap(path: Path, sample_bytes: int) -> None:
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (CACHE_BYTES // sample_bytes, sample_bytes // 4))
    rows[:] = np.arange(len(rows), dtype=np.float32)[:, None]
    rows.flush()
    del rows  # what is mapped is not dropped
    drop(path.parent)


def drop(folder: Path) -> None:
    """Out of the page cache, so that whoever reads it next is charged for it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_read() -> int:
    """Bytes that this process has read from the disk so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def timed(batches: Iterator[torch.Tensor]) -> None:
    """Tell how fast `batches` come, `[n, floats]` each, once the memory is full of others."""
    torch.set_num_threads(1)
    held, begun_s = 0, time.perf_counter()
    for values in batches:
        held += values.nbytes
        if held >= 2 * MEMORY_BYTES or time.perf_counter() - begun_s > SECONDS:
            break
    begun_s, before, samples, delivered = time.perf_counter(), bytes_read(), 0, 0
    for values in batches:
        assert torch.equal(values[:, 0], values[:, -1])
        samples, delivered = samples + len(values), delivered + values.nbytes
        if time.perf_counter() - begun_s > SECONDS:
            break
    took_s = time.perf_counter() - begun_s
    emit(samples_per_s=samples / took_s, bytes_read_for_each=(bytes_read() - before) / delivered)


def from_cache(folder: Path, sample_bytes: int, options: dict[str, Any]) -> Iterator[torch.Tensor]:
    with cs.EpochLoader(cs.Cache(folder), BATCH_BYTES // sample_bytes, **options) as loader:
        while True:
            for batch in loader:
                yield batch["x"]


def from_dataset(folder: Path, sample_bytes: int) -> Iterator[torch.Tensor]:
    batch = BATCH_BYTES // sample_bytes
    with cs.Cache(folder).snapshot() as dataset:
        while True:
            for values in DataLoader(dataset, batch, shuffle=True, collate_fn=cs.collate):
                yield values["x"]


def from_memmap(path: Path, sample_bytes: int) -> Iterator[torch.Tensor]:
    """The same samples in one file, batched by hand."""
    rows = np.load(path, mmap_mode="r")
    batch = BATCH_BYTES // sample_bytes
    while True:
        order = np.random.default_rng(0).permutation(len(rows))
        for start in range(0, len(order), batch):
            yield torch.from_numpy(rows[order[start : start + batch]])


def main(sample_bytes: int = 131_072) -> None:
    ways: dict[str, dict[str, Any] | None] = {
        "full": {},
        "window": {"locality": int(WINDOW * MEMORY_BYTES / sample_bytes)},
        "none": {"shuffle": False},
        "DataLoader": None,
    }
    with scratch() as folder, limited_memory() as group:
        fill(folder / "cache", sample_bytes)
        fill_memmap(folder / "rows.npy", sample_bytes)
        me = ["-m", "benchmarks.beyond", str(sample_bytes)]
        commands = {
            name: [*me, str(group), str(folder / "cache"), json.dumps(way)] for name, way in ways.items()
        }
        commands["memmap"] = [*me, str(group), str(folder / "rows.npy")]
        found = run_rounds(commands, 1)
    emit(**{f"{name}_{figure}": one for name, figures in found.items() for figure, [one] in figures.items()})


def child(sample_bytes: int, group: str, where: str, way: str | None = None) -> None:
    Path(group).write_text("0")
    path, options = Path(where), None if way is None else json.loads(way)
    if way is None:
        timed(from_memmap(path, sample_bytes))
    elif options is None:
        timed(from_dataset(path, sample_bytes))
    else:
        timed(from_cache(path, sample_bytes, options))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        child(int(sys.argv[1]), *sys.argv[2:])
    else:
        main(*map(int, sys.argv[1:]))
