"""One epoch's samples as an ordinary map-style dataset: frozen, leased, for any DataLoader and sampler.

Nothing here calls `torch.set_num_threads`: it also sets the number for new threads of the program, and a
thread whose first torch operation falls into that moment would keep it.
"""

from __future__ import annotations

import operator
import os
import reprlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, TypeAlias

import numpy as np
import torch
import torch.utils.data

from cachestream.errors import EpochError
from cachestream.repr_html import table
from cachestream.schema import IntArray, Snapshot
from cachestream.storage.leases import Lease, join_lease
from cachestream.training.batches.collate import SampleBatch, rows_of
from cachestream.training.batches.gather import Columns, Gatherer, to_container
from cachestream.training.batches.mapped_shards import EpochMaps
from cachestream.training.batches.memory import BufferPool
from cachestream.training.batches.readahead import ReadTogether

if TYPE_CHECKING:
    from typing_extensions import Self


Indices: TypeAlias = Sequence[int] | IntArray | torch.Tensor

_KEEP_BUFFERS: Final = 4
_KEYS_AT_ONCE: Final = 65_536


class EpochDataset(torch.utils.data.Dataset[Any]):
    """A frozen snapshot of a cache as a dataset: `len()`, `[i]`, and whole batches at memory speed.

    A sample is the source's: a dict (or tuple, or bare value) of tensors, str and bytes. The snapshot's
    shards stay on disk until `close`, or until the process ends. Thread-safe; usable in forked and spawned
    DataLoader workers, which hold the lease themselves.

    Raises CorruptShardError for a sample whose shard is damaged or missing, IndexError past the end,
    TypeError for an invalid index, and EpochError after `close`.
    """

    def __init__(
        self, snapshot: Snapshot, lease: Lease | None = None, *, maps: EpochMaps | None = None
    ) -> None:
        self.snapshot = snapshot
        self._lease = lease
        self._maps = maps
        self._closed = False
        self._begin_process()

    def _begin_process(self) -> None:
        """Make the locks and buffers of this process; a forked child makes its own."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool = BufferPool(_KEEP_BUFFERS)
        self._gatherer: Gatherer | None = None

    def __len__(self) -> int:
        return self.snapshot.num_samples

    def __getitem__(self, index: SupportsIndex | slice | Indices) -> Any:
        """Sample `index` (negative ones count from the end); for a slice or a sequence of indices, the batch
        that `cs.collate` makes of the samples. Tensors own their memory.
        """
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        if hasattr(index, "__len__") and not _is_one_number(index):
            return to_container(self._gather(self._check_indices(index)), self.snapshot.schema)
        columns = self._gather(self._check_indices([operator.index(index)]))  # type: ignore[arg-type]
        return to_container({name: column[0] for name, column in columns.items()}, self.snapshot.schema)

    def __getitems__(self, indices: Indices) -> Sequence[Any]:
        """The samples at `indices`, gathered together; a DataLoader calls this."""
        samples = self._check_indices(indices)
        columns, schema = self._gather(samples), self.snapshot.schema
        if schema.container not in ("dict", "tuple"):
            return list(rows_of(columns[schema.names[0]]))
        return SampleBatch(columns, schema, len(samples))

    def keys(self, indices: Indices | None = None) -> list[str]:
        """The keys of the samples at `indices` (None: of all samples, in order)."""
        samples = self._check_indices(range(len(self)) if indices is None else indices)
        found: list[str] = []
        for start in range(0, len(samples), _KEYS_AT_ONCE):
            part = samples[start : start + _KEYS_AT_ONCE]
            with self._exclusive():
                gatherer = self._open()
                found += gatherer.keys(*_mapped(gatherer.maps, part))
        return found

    def lengths(self, field: str) -> IntArray:
        """The length of `field` in each sample, int64 `[len(self)]`, for samplers: the size of its first
        dimension; of str and bytes the number of bytes.

        Read from the shards' offsets, once for each shard. Raises ConfigError for another name and for
        numbers, CorruptShardError for damaged offsets.
        """
        with self._exclusive():
            lengths, damaged = self._open().maps.lengths_of(field)
        for _, error in damaged:
            raise error
        return lengths

    def shape_groups(self, field: str) -> IntArray:
        """A number for each sample, int64 `[len(self)]`, for samplers: equal where the shapes of `field` are.

        Raises ConfigError for another name, str and bytes, CorruptShardError for damaged shapes.
        """
        with self._exclusive():
            groups, damaged = self._open().maps.shape_groups(field)
        for _, error in damaged:
            raise error
        return groups

    def close(self) -> None:
        """Release the shards for eviction. Tensors handed out stay valid."""
        self._closed = True
        self._maps = None
        self._gatherer = None
        if self._lease is not None:
            self._lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._closed:
            raise EpochError("this EpochDataset is closed; take a new snapshot for other processes")
        return {"snapshot": self.snapshot}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The lease is joined here, while the sender, which waits for its children to start, still holds it.
        snapshot = state["snapshot"]
        self.__init__(snapshot, join_lease(snapshot.lease))  # type: ignore[misc]

    def _check_indices(self, indices: Any) -> IntArray:
        """Return `indices` as int64 `[n]` in range(len(self)); raises IndexError, or TypeError."""
        try:
            given = np.array(indices.numpy(force=True) if isinstance(indices, torch.Tensor) else indices)
        except ValueError:  # lists of different lengths
            given = np.array(None)
        if given.ndim != 1 or (given.dtype.kind not in "iu" and len(given)):
            raise TypeError(
                f"index {reprlib.repr(indices)}: give an integer, a slice or a sequence of integers (of a "
                "mask: where it is true)"
            )
        samples, size = given.astype(np.int64, copy=False), self.snapshot.num_samples
        if _all_within(samples, size):
            return samples
        if given.dtype.kind == "i":  # a huge unsigned number has become negative, and is outside
            samples[samples < 0] += size
        if not _all_within(samples, size):
            raise IndexError(f"index {reprlib.repr(indices)} is outside of a dataset of {size} samples")
        return samples

    def _gather(self, samples: IntArray) -> Columns:
        with self._exclusive():
            gatherer = self._open()
            shards, rows = _mapped(gatherer.maps, samples)
            self._reading.reach(shards, rows)
            return gatherer.gather(shards, rows)

    def _exclusive(self) -> threading.Lock:
        """The lock of the gatherer, which one thread at a time uses."""
        if self._pid != os.getpid():
            self._follow_fork()
        return self._lock

    def _open(self) -> Gatherer:
        """The gatherer, made at the first use; called with the lock."""
        if self._closed:
            raise EpochError("this EpochDataset is closed; take a new one with cache.snapshot()")
        if self._gatherer is None:
            self._maps = EpochMaps(self.snapshot, self._maps)
            self._gatherer = Gatherer(self._maps, self._pool)
            self._reading = ReadTogether(self._maps)
        return self._gatherer

    def _follow_fork(self) -> None:
        """Join the lease in a forked child, and replace the parent's locks, which may be in any state."""
        if self._maps is not None:
            self._maps.after_fork()
        if self._lease is not None and not self._closed:
            self._lease = join_lease(self.snapshot.lease)
        self._begin_process()

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        return f"<EpochDataset {state}{len(self)} samples in {self.snapshot.num_shards} shards>"

    def _repr_html_(self) -> str:
        found, state = self.snapshot, "closed" if self._closed else "open"
        rows = {"samples": len(self), "shards": found.num_shards, "schema": found.schema, "state": state}
        return table("EpochDataset", rows)


def _is_one_number(index: Any) -> bool:
    return isinstance(index, np.ndarray | torch.Tensor) and index.ndim == 0


def _all_within(samples: IntArray, size: int) -> bool:
    """Return whether all of `samples` are in range(size); as unsigned numbers, negative ones are huge."""
    if not len(samples):
        return True
    unsigned = samples.view(np.uint64)
    return bool(unsigned[unsigned.argmax()] < size)  # a third of the time of a comparison and all()


def _mapped(maps: EpochMaps, samples: IntArray) -> tuple[IntArray, IntArray]:
    """The shards, which are mapped now, and rows of `samples`; raises CorruptShardError for a damaged one."""
    shards, rows = maps.locate(samples)
    for _, error in maps.open(shards):
        raise error
    return shards, rows
