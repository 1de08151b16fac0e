"""MLPerf Storage's training workloads by DLIO, the program that it runs: `make bench-mlperf`.

The parameters are those of MLPerf Storage v3 for B200 accelerators (mlcommons/storage, configs/dlio/workload: unet3d_b200.yaml
at 0d75b41, where the time of a step is half of an H100's, and retinanet_b200.yaml at 11460d0). An accelerator is an MPI process
in which DLIO takes a batch, sleeps for the time of a step, and waits for the others. Its utilisation (AU) is the share of an epoch,
without the first step, that it sleeps. Accelerators are fed if the mean AU of the epochs reaches the bound, 90 or 85 %.

No result in the sense of the rules. The program is DLIO 2.0.0 from PyPI, epochs are short, and the few files that DLIO
generates lie in the page cache (the rules want five times the memory). Each has several names (hard links), for enough steps; an
`EpochLoader` passes over its cache, filled before, as often. DLIO's loader reads and decodes every file in every epoch, and
hands on 2 MiB of a record of unet3d. cachestream keeps either decoded records whole, of which a batch takes all bytes, or
2 MiB of each, cut out when the cache is filled: the same crop in every epoch. "No data" takes no batches.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader

import cachestream as cs
from benchmarks.measure import scratch
from benchmarks.page import matrix
from benchmarks.record import Figures, save

LADDER: Final = (1, 2, 4, 8)  # numbers of accelerators
TIMEOUT_S: Final = 120
SETTINGS: Final = (
    "framework=pytorch dataset.num_files_eval=0 dataset.num_subfolders_train=0 dataset.num_subfolders_eval=0 "
    "reader.data_loader=pytorch reader.file_shuffle=seed reader.sample_shuffle=seed train.epochs=2 "
    "workflow.evaluation=False"
)
# More processes than cores, bound to none of them, as root in a container too.
MPI: Final = "--prtemca rmaps_default_mapping_policy :oversubscribe --bind-to none --allow-run-as-root"


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload: DLIO's settings, and the files to generate.

    `kept`: the most accelerators that are tried with a cache, which must hold a batch for each, and what it keeps of a sample.
    """

    settings: str
    batch: int
    bound: float
    files: int
    steps: int
    kept: dict[str, tuple[int, Callable[[dict[str, Any]], dict[str, Any]]]]


WORKLOADS: Final = {
    "unet3d": Workload(
        "dataset.format=npz dataset.record_length=146600628 dataset.record_length_stdev=68341808 "
        "dataset.record_length_resize=2097152 reader.read_threads=4 train.computation_time=0.162",
        batch=7,
        bound=0.90,
        files=21,
        steps=12,
        kept={
            "cachestream, whole records": (2, lambda sample: {"x": sample["x"][..., 0]}),
            "cachestream, 2 MiB of each": (8, lambda sample: {"x": sample["x"][:1448, :1448, 0].copy()}),
        },
    ),
    "retinanet": Workload(
        "dataset.format=jpeg dataset.record_length=322957 reader.read_threads=8 train.computation_time=0.04755",
        batch=24,
        bound=0.85,
        files=1920,
        steps=80,
        kept={"cachestream": (8, lambda sample: {"x": sample["image"][0]})},
    ),
}


class NoData(BaseDataLoader):  # type: ignore[misc] # DLIO has no types
    """A DLIO data loader without data."""

    def __init__(self, format_type: object, dataset_type: object, epoch: int) -> None:
        super().__init__(format_type, dataset_type, epoch, None)

    def read(self) -> None:
        """Begin."""

    def next(self) -> Iterator[Any]:
        """The batches of an epoch, which DLIO leaves after as many as it wants."""
        return itertools.repeat(None)

    def finalize(self) -> None:
        """End an epoch."""


class FromCache(NoData):
    """A DLIO data loader over the cache in DLIO's data folder. Ranks meet by torch.distributed, as those of a trainer."""

    def read(self) -> None:
        rank, ranks, folder = self._args.my_rank, self._args.comm_size, self._args.data_folder
        torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=rank, world_size=ranks)
        cache, ahead = cs.Cache(f"{folder}/cache"), self._args.prefetch_size
        self._loader = cs.EpochLoader(cache, self.batch_size, epoch_size=self.num_samples, prefetch=ahead)

    def next(self) -> Iterator[Any]:
        yield from self._loader


def run_rank(overrides: list[str]) -> None:
    """One process of DLIO."""
    torch.set_num_threads(1)
    # DLIO imports TensorFlow for a profiler, which is not used here.
    sys.modules["tensorflow"] = types.ModuleType("tensorflow")
    from dlio_benchmark.main import main as dlio

    sys.argv[1:] = overrides
    dlio()


def run_dlio(ranks: int, work: Workload, settings: str, output: Path) -> None:
    """Run DLIO in so many processes; `output` gets its results."""
    mpi = f"{Path(sys.executable).parent}/mpiexec {MPI} --timeout {TIMEOUT_S} -n {ranks}".split()
    program = [sys.executable, "-m", "benchmarks.mlperf", "rank", f"hydra.run.dir={output}"]
    settings += f" {SETTINGS} {work.settings} reader.batch_size={work.batch} metric.au={work.bound} output.folder={output}"
    command = [*mpi, *program, *(f"++workload.{setting}" for setting in settings.split())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"DLIO failed: {done.stdout[-2000:]}{done.stderr[-4000:]}")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A workload, with its files, caches and runs in `folder`."""

    name: str
    work: Workload
    folder: Path

    def link(self, names: int, folder: Path) -> None:
        """Give the files so many names in `folder`."""
        folder.mkdir()
        files = list((self.folder / "train").iterdir())
        for number in range(names):
            file = files[number % len(files)]
            (folder / f"{number:06d}{file.suffix}").hardlink_to(file)

    def run(self, what: str, loader: str, ranks: int) -> tuple[float, float]:
        """AU in percent and samples/s with so many accelerators and a loader of this module ("": DLIO's own)."""
        names = self.work.batch * self.work.steps * ranks
        with scratch() as folder:
            self.link(names, folder / "train")
            (folder / "valid").mkdir()
            (folder / "cache").symlink_to(self.folder / "cache")
            settings = f"dataset.data_folder={folder} dataset.num_files_train={names}"
            if loader:
                settings += f" reader.data_loader_classname=benchmarks.mlperf.{loader} reader.data_loader_sampler=index"
            run_dlio(ranks, self.work, settings, folder / "output")
            metric = json.loads((folder / "output" / "summary.json").read_text(encoding="utf-8"))["metric"]
        au = metric["train_au_mean_percentage"]
        print(f"{self.name}: {what}: {ranks} accelerators: AU {au:.1f} %", file=sys.stderr, flush=True)
        return au, metric["train_throughput_mean_samples_per_second"]

    def most(self, what: str, loader: str, limit: int) -> Iterator[tuple[str, float]]:
        """The largest number of `LADDER`, up to `limit`, that is fed, 0 if not even one is; and DLIO's figures."""
        found: dict[int, tuple[float, float]] = {}
        fed, starved = -1, bisect.bisect(LADDER, limit)
        while starved - fed > 1:
            middle = (fed + starved) // 2 if found else 0
            found[middle] = self.run(what, loader, LADDER[middle])
            au, _ = found[middle]
            fed, starved = (middle, starved) if au >= 100 * self.work.bound else (fed, middle)
        yield f"{self.name}: {what} / accelerators fed", LADDER[fed] if fed >= 0 else 0
        yield f"{self.name}: {what} / AU of one, %", found[0][0]
        yield f"{self.name}: {what} / AU of these, %", found[max(fed, 0)][0]
        yield f"{self.name}: {what} / samples/s", found[max(fed, 0)][1]

    def figures(self) -> Iterator[tuple[str, float]]:
        """All figures of the workload."""
        settings = f"dataset.data_folder={self.folder} dataset.num_files_train={self.work.files} "
        settings += "workflow.generate_data=True workflow.train=False"
        run_dlio(2, self.work, settings, self.folder / "generated")
        au, _ = self.run("no data", "NoData", LADDER[-1])
        yield f"{self.name}: no data / AU of {LADDER[-1]}, %", au
        yield from self.most("DLIO's loader", "", LADDER[-1])
        for what, (limit, transform) in self.work.kept.items():
            self.link(max(self.work.files, limit * self.work.batch), self.folder / what)
            begun_s, cache = time.perf_counter(), cs.Cache(self.folder / "cache", size_limit="8GB")
            with cs.start_worker(cache, self.folder / what, num_workers=2, transform=transform) as worker:
                worker.wait(TIMEOUT_S)
            yield f"{self.name}: {what} / filled in, s", time.perf_counter() - begun_s
            yield from self.most(what, "FromCache", limit)
            shutil.rmtree(cache.path)


def main() -> None:
    parser = argparse.ArgumentParser(description="MLPerf Storage's training workloads by DLIO.")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args()
    found: Figures = {}
    for name, work in WORKLOADS.items():
        with scratch() as folder:
            found |= {figure: [value] for figure, value in Measurement(name, work, folder).figures()}
    print("\n".join(matrix(found)))
    if options.save:
        save("mlperf", found)


if __name__ == "__main__":
    run_rank(sys.argv[2:]) if sys.argv[1:2] == ["rank"] else main()
