"""The workloads: samples that hold their own number, so that every delivery can be verified."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch

__all__ = ["SHARD_BYTES", "WORKLOADS", "Batch", "Epochs", "Peer", "Workload", "scaled"]

SHARD_BYTES: Final = 64 << 20  # of every format that has shards
SMALL_BYTES: Final = 4096  # numpy stacks samples below this faster than torch does (measured)

Batch: TypeAlias = tuple[torch.Tensor, ...]


class Epochs(Protocol):
    """Something whose every `iter()` is an epoch of batches."""

    def __iter__(self) -> Iterator[Batch]: ...


class Peer(Protocol):
    """Interface of the modules of this folder."""

    def prepare(self, folder: Path, work: Workload) -> None:
        """Write the samples of `work` into the empty `folder`, in the format that is read fastest."""

    def deliver(
        self, folder: Path, work: Workload, workers: int, option: str
    ) -> AbstractContextManager[Epochs]:
        """The shuffled epochs of what `prepare` wrote, by this many worker processes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`samples` rows of `length` values, in batches of `batch`; `labelled`: each with its number as int64."""

    name: str
    samples: int
    length: int
    dtype: str
    batch: int
    labelled: bool

    @property
    def sample_bytes(self) -> int:
        return self.length * np.dtype(self.dtype).itemsize

    @property
    def shard_samples(self) -> int:
        """Samples in a shard of the usual size."""
        return max(1, SHARD_BYTES // self.sample_bytes)

    def value(self, number: int) -> int:
        """The value that fills sample `number`."""
        return number % 251 if self.dtype == "uint8" else number

    def sample(self, number: int) -> tuple[Any, ...]:
        values = np.full(self.length, self.value(number), self.dtype)
        return (values, number) if self.labelled else (values,)

    def shards(self) -> Iterator[range]:
        """The numbers of the samples of each shard."""
        for start in range(0, self.samples, self.shard_samples):
            yield range(start, min(start + self.shard_samples, self.samples))

    def record(self, number: int) -> bytes:
        """The sample as bytes: its values, then its label."""
        return b"".join(np.asarray(part).tobytes() for part in self.sample(number))

    def unpack(self, record: Any) -> tuple[Any, ...]:
        """The sample of one record, as views of it."""
        values = np.frombuffer(record, self.dtype, self.length)
        if not self.labelled:
            return (values,)
        return values, int.from_bytes(bytes(record[self.sample_bytes :]), "little")

    def stack(self, samples: Sequence[tuple[Any, ...]]) -> Batch:
        """Samples as one batch; for large ones torch's own way, straight into shared memory in a worker."""
        if self.sample_bytes >= SMALL_BYTES:
            rows = [(torch.as_tensor(sample[0]), *sample[1:]) for sample in samples]
            return tuple(torch.utils.data.default_collate(rows))
        columns = zip(*samples, strict=True)
        return tuple(torch.from_numpy(np.asarray(column)) for column in columns)

    def ids(self, batch: Batch) -> torch.Tensor:
        """int64 `[n]`: the numbers of the samples of a batch, in memory of their own."""
        return batch[1].clone() if self.labelled else batch[0][:, 0].to(torch.int64)

    def check(self, batch: Batch) -> None:
        """Every value of every sample."""
        expected = torch.tensor([self.value(int(i)) for i in self.ids(batch)])
        if not bool((batch[0] == expected[:, None].to(batch[0].dtype)).all()):
            raise AssertionError(f"a batch of workload {self.name} holds what was never written")

    def check_epoch(self, ids: Sequence[torch.Tensor]) -> None:
        """Every sample once, in another order than it was written."""
        found = torch.cat(list(ids))
        if not torch.equal(found.sort().values, torch.arange(self.samples)):
            counts = f"{len(found)} samples, {len(set(found.tolist()))} different ones, of {self.samples}"
            raise AssertionError(f"an epoch of workload {self.name} delivered {counts}")
        if len(found) > self.batch and all(a < b for a, b in itertools.pairwise(found.tolist())):
            raise AssertionError(f"an epoch of workload {self.name} was not shuffled")


WORKLOADS: Final = {
    "A": Workload("A", 8192, 32 * 1024, "float32", 64, labelled=False),
    "B": Workload("B", 60_000, 784, "uint8", 256, labelled=True),
}


def scaled(name: str, scale: float) -> Workload:
    """Workload `name` with a share of its samples."""
    work = WORKLOADS[name]
    samples = max(work.batch, int(work.samples * scale))
    return Workload(name, samples, work.length, work.dtype, work.batch, work.labelled)
