"""A TFRecord pipeline in PyTorch: the `tfrecord` package, one file with its index, a shuffle buffer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfrecord import TFRecordWriter
from tfrecord.tools.tfrecord2idx import create_index
from tfrecord.torch.dataset import TFRecordDataset
from torch.utils.data import DataLoader

from benchmarks.peers.workload import Epochs, Workload

_SHUFFLE_BUFFER = 1000


def prepare(folder: Path, work: Workload) -> None:
    path = str(folder / "samples.tfrecord")
    writer = TFRecordWriter(path)
    for number in range(work.samples):
        writer.write({"record": (work.record(number), "byte")})
    writer.close()
    create_index(path, str(folder / "samples.index"))


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    dataset = TFRecordDataset(
        str(folder / "samples.tfrecord"),
        str(folder / "samples.index"),
        {"record": "byte"},
        shuffle_queue_size=_SHUFFLE_BUFFER,
        transform=lambda features: work.unpack(features["record"]),
    )
    yield DataLoader(
        dataset,
        batch_size=work.batch,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=work.stack,
    )
