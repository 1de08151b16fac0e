"""The mapped shards of a snapshot: the address of each field's values, and the shard and row of each sample.

A shard is mapped and verified once in a process, before any sample of it is delivered, and its map is handed
on from one epoch to the next. Maps are held by references and never unmapped explicitly: an address is valid
as long as a reference to its map exists.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import CorruptShardError
from cachestream.schema import KEY_FIELD, Field, IntArray, Snapshot
from cachestream.storage.shard import MappedShard, shard_path

KEYS: Final = Field(KEY_FIELD, "str", "uint8", 1, None)
_MAX_OPEN: Final = 16_384
_LISTED_SAMPLES: Final = 1 << 18  # 2 MiB


class FieldAddresses:
    """The addresses of one field's values in each shard, int64 `[num_shards]`; 0 where the shard is not
    mapped.

    `base` is the address of the values. A field whose shape varies also has the addresses of its `offsets`
    and `shapes`. Both are 0 in a shard whose samples all have one shape: `row_bytes` and `row_shapes` give
    that shape.
    """

    __slots__ = ("base", "field", "item_bytes", "offsets", "row_bytes", "row_shapes", "shapes")

    def __init__(self, field: Field, num_shards: int) -> None:
        self.field = field
        self.item_bytes = stored_item_bytes(field)
        self.base = np.zeros(num_shards, np.int64)
        varies = field.shape is None
        self.offsets = np.zeros(num_shards if varies else 0, np.int64)
        self.shapes = np.zeros(num_shards if varies and field.kind == "tensor" else 0, np.int64)
        self.row_bytes = np.full(num_shards if varies else 0, -1, np.int64)
        self.row_shapes = np.zeros((num_shards if varies else 0, field.ndim), np.int64)

    def arrays(self) -> tuple[IntArray, ...]:
        """All arrays with an entry for each shard."""
        return self.base, self.offsets, self.shapes, self.row_bytes, self.row_shapes

    def read(self, shard: MappedShard, position: int) -> None:
        """Store the addresses of the field in `shard`, the shard at position `position` of the snapshot."""
        columns, name, address = shard.columns, self.field.name, shard.address
        self.base[position] = address + columns[name].offset
        if self.field.shape is not None:
            return
        offsets = columns.get(f"{name}#offsets")
        if offsets is None:
            shape = next(f.shape for f in shard.schema.fields if f.name == name)
            assert shape is not None
            self.row_shapes[position] = shape
            self.row_bytes[position] = math.prod(shape) * element_bytes(self.field)
            return
        self.offsets[position] = address + offsets.offset
        if self.field.kind == "tensor" and name != KEY_FIELD:
            self.shapes[position] = address + columns[f"{name}#shapes"].offset


class EpochMaps:
    """The mapped shards of one snapshot. Thread-safe, except that `open` may drop maps.

    `verified` has the ids of the shards that this process has verified, and is shared with later epochs.
    `picked` has the rows of the snapshot's split, for shards with samples of both splits. At most `max_open`
    shards are mapped at a time (the kernel limits the maps of a process).
    """

    def __init__(
        self,
        snapshot: Snapshot,
        previous: EpochMaps | None = None,
        *,
        max_open: int | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.max_open = max_open or _default_max_open()
        self.starts: IntArray = np.concatenate([[0], np.cumsum(snapshot.counts)]).astype(np.int64)
        # The first shard of each run of 2**bits samples: a look-up and a step or two. A binary search among
        # thousands of shards costs ten times that in cache misses. With few samples, each one has an entry.
        bits = max(0, (snapshot.num_samples // max(1, 4 * snapshot.num_shards)).bit_length() - 1)
        self._bucket_bits = 0 if snapshot.num_samples <= _LISTED_SAMPLES else bits
        self._buckets: IntArray
        if self._bucket_bits:
            firsts = np.arange(0, snapshot.num_samples, 1 << self._bucket_bits)
            self._buckets = np.searchsorted(self.starts, firsts, side="right") - 1
        else:
            self._buckets = np.repeat(np.arange(snapshot.num_shards), snapshot.counts)
        self.picked: dict[int, IntArray] = {} if previous is None else previous.picked
        self._rows = self._rows_of_split()
        self.fields = {
            field.name: FieldAddresses(field, snapshot.num_shards)
            for field in (*snapshot.schema.fields, KEYS)
        }
        self.mapped = np.zeros(snapshot.num_shards, np.bool_)
        self.verified: set[int] = set() if previous is None else previous.verified
        self._keepers: npt.NDArray[Any] = np.full(snapshot.num_shards, None, object)
        self._last_used = np.zeros(snapshot.num_shards, np.int64)
        self._tick = 0
        self._lock = threading.Lock()
        if previous is not None:
            self._adopt(previous)

    @property
    def all_mapped(self) -> bool:
        return bool(self.mapped.all())

    @property
    def num_mapped(self) -> int:
        return int(np.count_nonzero(self.mapped))

    def locate(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Return the shard's position and the row in it for each of `samples`, which are numbers within the
        snapshot.
        """
        if self._rows is not None:
            return self._shards_of(samples), self._rows[samples]
        shards = self._shards_of(samples)
        return shards, samples - self.starts[shards]

    def _shards_of(self, samples: IntArray) -> IntArray:
        shards: IntArray
        if not self._bucket_bits:
            shards = self._buckets[samples]
            return shards
        shards = self._buckets[samples >> self._bucket_bits]
        beyond = np.flatnonzero(self.starts[shards + 1] <= samples)
        while len(beyond):
            shards[beyond] += 1
            beyond = beyond[self.starts[shards[beyond] + 1] <= samples[beyond]]
        return shards

    def _rows_of_split(self) -> IntArray | None:
        """Return the row of each sample in its shard; None if no shard has samples of two splits."""
        snapshot = self.snapshot
        if snapshot.split is None or snapshot.sizes is None or (snapshot.sizes == snapshot.counts).all():
            return None
        rows: list[IntArray] = []
        for shard_id, count, size in zip(
            *(array.tolist() for array in (snapshot.shard_ids, snapshot.counts, snapshot.sizes)), strict=True
        ):
            picked = np.arange(count, dtype=np.int64)
            if count < size:
                if shard_id not in self.picked:
                    self.picked[shard_id] = _pick(snapshot, shard_id)
                if len(self.picked[shard_id]) == count:  # otherwise `open` reports it as damaged
                    picked = self.picked[shard_id]
            rows.append(picked)
        return np.concatenate(rows)

    def open(
        self, shards: IntArray, settle: Callable[[], None] | None = None, *, ahead: bool = False
    ) -> list[tuple[int, CorruptShardError]]:
        """Map and verify those of `shards` (positions) that are not mapped; return the damaged (position,
        error).

        Above `max_open`, the maps that were unused for longest are dropped, after a call of `settle`, which
        must return when no thread gathers from them any more. All shards of a gather must be opened by one
        call. With `ahead`, which another thread may use, no map is dropped.
        """
        if not ahead:
            self._tick += 1
            self._last_used[shards] = self._tick
        damaged: list[tuple[int, CorruptShardError]] = []
        absent = ~self.mapped[shards]
        if not absent.any():
            return damaged
        for position in np.unique(shards[absent]).tolist():
            if self.num_mapped >= self.max_open:
                if ahead:
                    break
                if settle is not None:
                    settle()
                self._drop_some(keep=shards)
            try:
                self._insert(position, self._map(int(self.snapshot.shard_ids[position])))
            except CorruptShardError as error:
                damaged.append((position, error))
        return damaged

    def after_fork(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def _map(self, shard_id: int) -> MappedShard:
        shard = MappedShard(shard_path(self.snapshot.root, shard_id))
        if shard_id not in self.verified:
            shard.verify()
            _check_offsets(shard)
            self.verified.add(shard_id)
        shard.expect_random()  # not before: verifying reads the file from end to end
        return shard

    def _insert(self, position: int, shard: MappedShard) -> None:
        expected = int(
            (self.snapshot.counts if self.snapshot.sizes is None else self.snapshot.sizes)[position]
        )
        merged = self.snapshot.schema.merge(shard.schema)
        if shard.num_samples != expected or merged != self.snapshot.schema:
            raise CorruptShardError(
                f"{shard.path}: holds {shard.num_samples} samples of {shard.schema}, the snapshot expects "
                f"{expected} of {self.snapshot.schema}; run 'cachestream verify CACHE --repair'"
            )
        picked = self.picked.get(int(self.snapshot.shard_ids[position]))
        if self._rows is not None and picked is not None and len(picked) != self.snapshot.counts[position]:
            raise CorruptShardError(
                f"{shard.path}: {len(picked)} of its samples are of the split, and not {self.snapshot.counts[position]}"
            )
        with self._lock:
            if self.mapped[position]:
                return  # by another thread; its addresses may be in use by now
            for field in self.fields.values():
                field.read(shard, position)
            # An array on the map keeps it, at a hundredth of the size of the shard's description.
            self._keepers[position] = shard.array(f"{KEY_FIELD}#offsets")
            self.mapped[position] = True

    def _drop_some(self, keep: IntArray) -> None:
        with self._lock:
            positions = np.flatnonzero(self.mapped)
            positions = positions[~np.isin(positions, keep)]
            oldest = positions[np.argsort(self._last_used[positions], kind="stable")][
                : max(1, self.max_open // 8)
            ]
            self.mapped[oldest] = False
            self._keepers[oldest] = None

    def _adopt(self, previous: EpochMaps) -> None:
        """Take over the maps of the shards that `previous` has too, by a few array operations."""
        mine, theirs = self.snapshot, previous.snapshot
        if mine.root != theirs.root or mine.schema != theirs.schema:
            return
        _, here, there = np.intersect1d(
            mine.shard_ids, theirs.shard_ids, assume_unique=True, return_indices=True
        )
        # Under the lock: between an address and the map behind it, `previous` may drop the map.
        with previous._lock:
            open_there = previous.mapped[there]
            here, there = here[open_there], there[open_there]
            for field in self.fields.values():
                for to, come_from in zip(
                    field.arrays(), previous.fields[field.field.name].arrays(), strict=True
                ):
                    if len(to):
                        to[here] = come_from[there]
            self._keepers[here] = previous._keepers[there]
            self.mapped[here] = True

    def __repr__(self) -> str:
        return f"<EpochMaps {self.num_mapped}/{self.snapshot.num_shards} shards mapped>"


def _pick(snapshot: Snapshot, shard_id: int) -> IntArray:
    """Return the rows of the snapshot's split in a shard; none if it is damaged."""
    assert snapshot.split is not None
    try:
        return snapshot.split.rows(MappedShard(shard_path(snapshot.root, shard_id)).key_hashes())
    except CorruptShardError:
        return np.empty(0, np.int64)


def element_bytes(field: Field) -> int:
    """Bytes of one element of a sample's tensor."""
    return numpy_dtype(field.dtype).itemsize


def fixed_row_bytes(field: Field) -> int:
    """Bytes of one sample's value; 0 if its shape varies."""
    return 0 if field.shape is None else math.prod(field.shape) * element_bytes(field)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype that carries values of torch dtype `dtype`: bfloat16 travels as the bits of uint16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def stored_item_bytes(field: Field) -> int:
    """Bytes of the unit that a varying field's offsets count in: complex128 is stored as pairs of float64."""
    return 8 if field.dtype == "complex128" else element_bytes(field)


def _check_offsets(shard: MappedShard) -> None:
    """Raise CorruptShardError unless all offsets stay in their columns: they will be used as addresses."""
    for field in (*shard.schema.fields, KEYS):
        if f"{field.name}#offsets" not in shard.columns:
            continue
        offsets = shard.array(f"{field.name}#offsets")
        size = shard.columns[field.name].nbytes // stored_item_bytes(field)
        sound = offsets[0] == 0 and offsets[-1] == size and bool((np.diff(offsets) >= 0).all())
        if sound and f"{field.name}#shapes" in shard.columns:
            shapes = shard.array(f"{field.name}#shapes")
            elements = shapes.prod(axis=1) * (element_bytes(field) // stored_item_bytes(field))
            sound = bool((shapes >= 0).all()) and bool((elements == np.diff(offsets)).all())
        if not sound:
            raise CorruptShardError(
                f"{shard.path}: the offsets of '{field.name}' do not fit its data; "
                "run 'cachestream verify CACHE --repair'"
            )


@functools.cache
def _default_max_open() -> int:
    """A quarter of the maps that the kernel grants a process, at most `_MAX_OPEN`."""
    try:
        granted = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return _MAX_OPEN
    return min(_MAX_OPEN, max(64, granted // 4))
