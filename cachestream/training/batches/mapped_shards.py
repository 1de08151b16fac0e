"""The mapped shards of a snapshot: the address of each field's values, and the shard and row of each sample,
which a rank works out ahead for its batches.

A shard is mapped and verified once in a process, before any sample of it is delivered, and its map is handed
on from one epoch to the next. Maps are held by references and never unmapped explicitly: an address is valid
as long as a reference to its map exists.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cachestream.errors import CacheError, CorruptShardError
from cachestream.schema import KEY_FIELD, Field, IntArray, Schema, Snapshot
from cachestream.shard_format import KEYS
from cachestream.storage.shard import MappedShard, ShardColumns, ShardValues, columns_of, shard_path
from cachestream.training.batches.memory import read_numbers

if TYPE_CHECKING:
    from cachestream.training.plan import Plan, SampleOrder

Floats = npt.NDArray[np.float64]
_LISTED_SAMPLES: Final = 1 << 18  # 2 MiB


class Spans(NamedTuple):
    """Bytes in mapped shards: the address and the length of each span, int64 `[n]`, and the numbers of those
    in shards whose samples' shapes vary.
    """

    addresses: IntArray
    lengths: IntArray
    varying: IntArray


class ChangedShardError(CorruptShardError):
    """The shard at `position` of the snapshot was sound when it was mapped, and its file has changed
    since.
    """

    def __init__(self, message: str, position: int = -1) -> None:
        super().__init__(message)
        self.position = position


class FieldAddresses:
    """The addresses of one field's values in each shard, in the rows of a table, int64 `[…, num_shards]`; 0
    where the shard is not mapped.

    `base` is the address of the values. In a shard whose samples all have one shape, `row_bytes` are the
    bytes of a value, and `row_shapes` its shape if other shards have others. Where the samples' shapes vary,
    `row_bytes` is -1, and `offsets` and `shapes` have the addresses of these. `sizes` are the bytes of all
    values in a shard. A field of one shape has only `base` and `row_bytes`.
    """

    __slots__ = (
        "base",
        "field",
        "item_bytes",
        "offsets",
        "row_bytes",
        "row_shapes",
        "shapes",
        "sizes",
        "table",
        "value_bytes",
    )

    def __init__(self, field: Field, num_shards: int) -> None:
        self.field = field
        self.item_bytes, self.value_bytes = _item_bytes(field), field.numpy_dtype.itemsize
        varies = field.shape is None
        self.table: IntArray = np.zeros((5 + field.ndim if varies else 2, num_shards), np.int64)
        self.base, self.row_bytes = self.table[:2]
        self.row_bytes[:] = -1 if varies else field.row_bytes
        if varies:
            self.offsets, self.shapes, self.sizes = self.table[2:5]
            self.row_shapes: IntArray = self.table[5:].T

    def read(self, shard: MappedShard, position: int) -> Floats | None:
        """Store the addresses of the field in `shard`, the shard at position `position` of the snapshot.

        Returns the values if they are not the shard's own: its integers as the floats of later shards.
        """
        columns, name, address = shard.columns, self.field.name, shard.address
        self.base[position] = address + columns[name].offset
        if self.field.dtype == "float64" and columns[name].dtype.kind == "i":
            shard.verify(name)  # an error of the disk is raised, and is no SIGBUS
            floats: Floats = shard.array(name).astype(np.float64)
            self.base[position] = floats.ctypes.data
            return floats
        if self.field.shape is not None:
            return None
        self.sizes[position] = columns[name].nbytes
        offsets = columns.get(f"{name}#offsets")
        if offsets is None:
            field = next(field for field in shard.schema.fields if field.name == name)
            assert field.shape is not None
            self.row_shapes[position] = field.shape
            self.row_bytes[position] = field.row_bytes
            return None
        self.offsets[position] = address + offsets.offset
        if self.field.kind == "tensor" and name != KEY_FIELD:
            self.shapes[position] = address + columns[f"{name}#shapes"].offset
        return None

    def spans(self, shards: IntArray, rows: IntArray, counts: IntArray | None = None) -> Spans:
        """Return the spans of rows `rows` of `shards`, or of `counts` rows each, all int64 `[n]`."""
        lengths = self.row_bytes[shards]
        varying = np.flatnonzero(lengths < 0)
        if counts is None and len(varying) == len(shards) > 0:  # as a rule: no copies of parts
            return Spans(*self._varying(shards, rows, None), varying)
        addresses = self.base[shards] + rows * lengths
        if counts is not None:
            lengths *= counts
        if len(varying):
            some = None if counts is None else counts[varying]
            addresses[varying], lengths[varying] = self._varying(shards[varying], rows[varying], some)
        return Spans(addresses, lengths, varying)

    def _varying(
        self, shards: IntArray, rows: IntArray, counts: IntArray | None
    ) -> tuple[IntArray, IntArray]:
        """As `spans`, where the samples' shapes vary."""
        table = self.offsets[shards] + rows * 8
        if counts is None:
            begins, ends = read_numbers(table, 2).T * self.item_bytes
        else:
            begins = read_numbers(table, 1)[:, 0] * self.item_bytes
            ends = read_numbers(table + counts * 8, 1)[:, 0] * self.item_bytes
        lengths, left = ends - begins, self.sizes[shards] - ends
        # The file may have changed since it was verified: what is read there now becomes an address.
        if (begins | lengths | left).min(initial=0) < 0:
            wrong = np.flatnonzero((begins | lengths | left) < 0)
            raise self._changed(int(shards[wrong[0]]))
        return self.base[shards] + begins, lengths

    def shapes_of(self, shards: IntArray, rows: IntArray, varying: IntArray) -> IntArray:
        """Return the shapes of tensors `rows` of `shards`, int64 `[n, ndim]`; `varying` is of their spans."""
        ndim = self.field.ndim
        if ndim and len(varying) == len(shards) > 0:
            return read_numbers(self.shapes[shards] + rows * (8 * ndim), ndim)
        shapes = self.row_shapes[shards]
        if len(varying) and ndim:
            shapes[varying] = read_numbers(self.shapes[shards[varying]] + rows[varying] * (8 * ndim), ndim)
        return shapes

    def check_shapes(self, shapes: IntArray, lengths: IntArray, shards: IntArray) -> None:
        """Raise ChangedShardError unless values of `shapes` have `lengths` bytes, for samples of `shards`."""
        if self.field.ndim == 1:  # a negative one has no length
            wrong = shapes[:, 0] * self.value_bytes != lengths
        else:
            wrong = (shapes < 0).any(axis=1) | (shapes.prod(axis=1) * self.value_bytes != lengths)
        if wrong.any():
            raise self._changed(int(shards[np.flatnonzero(wrong)[0]]))

    def _changed(self, position: int) -> ChangedShardError:
        return ChangedShardError(
            f"shard {position + 1} of the epoch has changed on the disk since it was verified (the offsets "
            f"of {self.field.name!r}); run 'cachestream verify CACHE --repair'",
            position,
        )


class EpochMaps:
    """The mapped shards of one snapshot. Thread-safe.

    `verified` has the ids of the shards that this process has verified, and is shared with later epochs.
    `keepers` has a reference to each map: who holds it, or these maps, may use the addresses.
    """

    def __init__(self, snapshot: Snapshot, previous: EpochMaps | None = None) -> None:
        num_samples, num_shards = snapshot.num_samples, snapshot.num_shards
        self.snapshot = snapshot
        self.starts: IntArray = np.concatenate([[0], np.cumsum(snapshot.counts)]).astype(np.int64)
        # The first shard of each run of 2**bits samples: a look-up and a step or two. A binary search among
        # thousands of shards costs ten times that in cache misses. With few samples, each one has an entry.
        bits = max(0, (num_samples // max(1, 4 * num_shards)).bit_length() - 1)
        self._bucket_bits = 0 if num_samples <= _LISTED_SAMPLES else bits
        self._buckets: IntArray
        if self._bucket_bits:
            firsts = np.arange(0, num_samples, 1 << bits)
            self._buckets = np.searchsorted(self.starts, firsts, side="right") - 1
        else:
            self._buckets = np.repeat(np.arange(num_shards), snapshot.counts)
        self._values: dict[str, ShardValues] = {} if previous is None else previous._values
        # Of all epochs: a trainer may ask while the next epoch is prepared.
        self._measuring: threading.Lock = threading.Lock() if previous is None else previous._measuring
        self._rows = self._rows_of_split()
        fields = (*snapshot.schema.fields, KEYS)
        self.fields = {field.name: FieldAddresses(field, num_shards) for field in fields}
        self.mapped = np.zeros(num_shards, np.bool_)
        self.verified: set[int] = set() if previous is None else previous.verified
        self.keepers: npt.NDArray[Any] = np.full(num_shards, None, object)
        self._lock = threading.Lock()
        if previous is not None:
            self._adopt(previous)

    @property
    def all_mapped(self) -> bool:
        return bool(self.mapped.all())

    def varying_bytes(self) -> float:
        """Return the mean bytes of a sample's fields whose shape varies, over the mapped shards."""
        fields = [self.fields[name] for name in self.snapshot.schema.names]
        varying = [field for field in fields if field.field.shape is None]
        if not varying:
            return 0.0
        mapped = np.flatnonzero(self.mapped)
        held = self.snapshot.counts if self.snapshot.sizes is None else self.snapshot.sizes
        total = sum(int(field.sizes[mapped].sum()) for field in varying)
        return total / max(1, int(held[mapped].sum()))

    def locate(self, samples: IntArray) -> tuple[IntArray, IntArray]:
        """Return the shard's position and the row in it of each of `samples`, numbers within the snapshot."""
        bits, shards = self._bucket_bits, self._buckets
        shards = shards[samples >> bits] if bits else shards[samples]
        if bits:
            beyond = np.flatnonzero(self.starts[shards + 1] <= samples)
            while len(beyond):
                shards[beyond] += 1
                beyond = beyond[self.starts[shards[beyond] + 1] <= samples[beyond]]
        return shards, samples - self.starts[shards] if self._rows is None else self._rows[samples]

    def lengths_of(self, name: str) -> tuple[IntArray, list[tuple[int, CorruptShardError]]]:
        """The length of `name` in each sample of the snapshot, int64 `[num_samples]`, and the damaged shards
        (position, error), whose samples have 0.
        """
        return self._read(name, lambda shard: ShardColumns(shard).lengths(name).astype(np.int32), np.int32(0))

    def shape_groups(self, name: str) -> tuple[IntArray, list[tuple[int, CorruptShardError]]]:
        """A number for each sample of the snapshot, int64 `[num_samples]`, equal where the shapes of `name`
        are; and the damaged shards (position, error), whose samples have 0.
        """
        return self._read(
            f"{name}#shapes", lambda shard: _numbers_of(ShardColumns(shard).shapes(name)), np.int64(0)
        )

    def _read(
        self, what: str, read: Callable[[MappedShard], npt.NDArray[Any]], absent: np.generic
    ) -> tuple[IntArray, list[tuple[int, CorruptShardError]]]:
        """The value `what` of each sample of the snapshot, which `read` gives for a shard, and the damaged
        shards.

        Those of shards that later epochs have too are kept for them.
        """
        with self._measuring:
            values = self._values.setdefault(what, ShardValues(read, absent))
            return values.of(self.snapshot).astype(np.int64), values.damaged

    def _rows_of_split(self) -> IntArray | None:
        """Return the row of each sample in its shard; None if no shard has samples of two splits."""
        snapshot = self.snapshot
        if snapshot.rows is not None:
            return snapshot.rows
        if snapshot.split is None or snapshot.sizes is None or (snapshot.sizes == snapshot.counts).all():
            return None
        # A damaged shard has only its first row here; `open` reports it.
        rows, _ = self._read("#rows", lambda shard: np.arange(shard.num_samples, dtype=np.int32), np.int32(0))
        if len(rows) != snapshot.num_samples:
            raise CacheError(
                f"{snapshot.root}: its shards hold {len(rows)} samples of the split '{snapshot.split.name}', "
                f"and the catalogue has {snapshot.num_samples}; run 'cachestream verify CACHE --repair'"
            )
        return rows

    def open(self, shards: IntArray) -> list[tuple[int, CorruptShardError]]:
        """Map and verify `shards` (positions) that are not mapped; return the damaged (position, error).

        Raises CacheError where the kernel grants the process no more maps.
        """
        damaged: list[tuple[int, CorruptShardError]] = []
        for position in _distinct(shards[~self.mapped[shards]]).tolist():
            try:
                self._insert(position, self._map(int(self.snapshot.shard_ids[position])))
            except CorruptShardError as error:
                damaged.append((position, error))
        return damaged

    def after_fork(self) -> None:
        """Replace the locks in a forked child: a thread of the parent may have held them."""
        self._lock, self._measuring = threading.Lock(), threading.Lock()

    def _map(self, shard_id: int) -> MappedShard:
        shard = MappedShard(shard_path(self.snapshot.root, shard_id))
        if shard_id not in self.verified:
            names = (*self.snapshot.schema.names, KEY_FIELD)
            shard.verify(*columns_of(shard, names))
            _check_offsets(shard, names)
            self.verified.add(shard_id)
        shard.expect_random()  # not before: verifying reads the file from end to end
        return shard

    def _insert(self, position: int, shard: MappedShard) -> None:
        snapshot = self.snapshot
        expected = int((snapshot.counts if snapshot.sizes is None else snapshot.sizes)[position])
        if shard.num_samples != expected or not self._fits(shard.schema):
            raise CorruptShardError(
                f"{shard.path}: holds {shard.num_samples} samples of {shard.schema}, the snapshot expects "
                f"{expected} of {snapshot.schema}; run 'cachestream verify CACHE --repair'"
            )
        with self._lock:
            if self.mapped[position]:
                return  # by another thread; its addresses may be in use by now
            read = [field.read(shard, position) for field in self.fields.values()]
            floats = [values for values in read if values is not None]
            # An array on the map keeps it, at a hundredth of the size of the shard's description.
            keeper = shard.array(f"{KEY_FIELD}#offsets")
            self.keepers[position] = [keeper, *floats] if floats else keeper
            self.mapped[position] = True

    def _fits(self, schema: Schema) -> bool:
        wanted = self.snapshot.schema
        return wanted.merge(schema.only(wanted.names)) == wanted

    def _adopt(self, previous: EpochMaps) -> None:
        """Take over the maps of the shards that `previous` has too, by a few array operations."""
        mine, theirs = self.snapshot, previous.snapshot
        if mine.root != theirs.root or mine.schema != theirs.schema:
            return
        _, here, there = np.intersect1d(
            mine.shard_ids, theirs.shard_ids, assume_unique=True, return_indices=True
        )
        open_there = previous.mapped[there]
        here, there = here[open_there], there[open_there]
        for name, field in self.fields.items():
            field.table[:, here] = previous.fields[name].table[:, there]
        self.keepers[here] = previous.keepers[there]
        self.mapped[here] = True

    def __repr__(self) -> str:
        return f"<EpochMaps {np.count_nonzero(self.mapped)}/{self.snapshot.num_shards} shards mapped>"


def _item_bytes(field: Field) -> int:
    """Bytes of the unit that a varying field's offsets count in: complex128 is stored as pairs of float64."""
    return 8 if field.dtype == "complex128" else field.numpy_dtype.itemsize


def _check_offsets(shard: MappedShard, names: Container[str]) -> None:
    """Raise CorruptShardError unless all offsets of the fields `names` stay in their columns: they will be
    used as addresses.
    """
    for field in (*shard.schema.fields, KEYS):
        if field.name not in names or f"{field.name}#offsets" not in shard.columns:
            continue
        offsets, item_bytes = shard.array(f"{field.name}#offsets"), _item_bytes(field)
        size = shard.columns[field.name].nbytes // item_bytes
        sound = offsets[0] == 0 and offsets[-1] == size and bool((np.diff(offsets) >= 0).all())
        if sound and f"{field.name}#shapes" in shard.columns:
            shapes = shard.array(f"{field.name}#shapes")
            items = shapes.prod(axis=1) * (field.numpy_dtype.itemsize // item_bytes)
            sound = bool((shapes >= 0).all()) and bool((items == np.diff(offsets)).all())
        if not sound:
            raise CorruptShardError(
                f"{shard.path}: the offsets of '{field.name}' do not fit its data; "
                "run 'cachestream verify CACHE --repair'"
            )


def _distinct(shards: IntArray) -> IntArray:
    """The sorted distinct `shards`. np.unique would load numpy.ma, 8 ms before the first batch."""
    return np.array(sorted(set(shards.tolist())), np.int64)


def _numbers_of(shapes: IntArray) -> IntArray:
    """Return a number for each of `shapes`, int64 `[n, ndim]`: different ones have different numbers, up to
    three dimensions below a million; beyond that it is as unlikely as for a hash that they have not.
    """
    numbers = np.ones(len(shapes), np.int64)
    with np.errstate(over="ignore"):
        for axis in shapes.T:
            numbers = numbers * 1_000_003 + axis
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class SampleLocations:
    """Locations of the samples of a rank's batches `first`, `first + 1`, ...

    `shards` are the shards' positions in the snapshot and `rows` the rows in them, both int64 `[n]`; batch
    `first + i` has samples `bounds[i]` to `bounds[i + 1]` of them, int64 `[batches + 1]`.
    """

    first: int
    shards: IntArray
    rows: IntArray
    bounds: IntArray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, start: int, stop: int) -> SampleLocations:
        """Batches `start` to `stop` of these."""
        low, high = self.bounds[start], self.bounds[stop]
        bounds = self.bounds[start : stop + 1] - low
        return SampleLocations(self.first + start, self.shards[low:high], self.rows[low:high], bounds)


def find_locations(
    order: SampleOrder, plan: Plan, rank: int, maps: EpochMaps, first: int, stop: int
) -> SampleLocations:
    """Return the locations of batches `first` to `stop` of rank number `rank`."""
    starts, stops = plan.spans(rank, first, stop)
    bounds = np.concatenate([[0], np.cumsum(stops - starts)])
    positions = np.repeat(starts - bounds[:-1], stops - starts) + np.arange(bounds[-1])
    shards, rows = maps.locate(order.at(positions))
    return SampleLocations(first, shards, rows, bounds)
