"""MosaicML Streaming: MDS shards in a local folder, shuffled by its default algorithm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.peers.workload import SHARD_BYTES, Epochs, Workload


class _Unused(ModuleType):
    """Stands in for a module of which only the names are needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(MetaPathFinder, Loader):
    """streaming imports these for its datasets of text and pictures; none of them is used here."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.split(".", 1)[0] not in {"torchvision", "transformers"}:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Unused(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


sys.meta_path.append(_Finder())

import streaming  # noqa: E402  (after what stands in)
from streaming.base.util import clean_stale_shared_memory  # noqa: E402


def _columns(work: Workload) -> dict[str, str]:
    values = {"x": f"ndarray:{work.dtype}:{work.length}"}
    return values | ({"label": "int"} if work.labelled else {})


def prepare(folder: Path, work: Workload) -> None:
    columns = _columns(work)
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES) as writer:
        for number in range(work.samples):
            writer.write(dict(zip(columns, work.sample(number), strict=True)))


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    columns = _columns(work)
    clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=work.batch)
    yield DataLoader(
        dataset,
        batch_size=work.batch,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=lambda samples: work.stack(
            [tuple(sample[name] for name in columns) for sample in samples]
        ),
    )
