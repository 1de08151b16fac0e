"""Samples into the columns of an open shard, in buffers that are reused from shard to shard.

The first samples of an empty cache decide the fields of all others: they are held back until most of them
agree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from cachestream.errors import SchemaMismatchError
from cachestream.schema import KEY_FIELD, Field, Schema, storage_of
from cachestream.shard_format import ColumnData, ShardContent
from cachestream.worker.sampling.encode import (
    SMALL_BYTES,
    BytesLike,
    EncodedSample,
    Table,
    item_bytes,
    stored_shape,
)

Part = tuple[str, EncodedSample] | Table  # a sample with its key, or samples in columns
_Stored = TypeVar("_Stored", EncodedSample, Table)
Votes = list[tuple[Schema, int]]  # how many samples have which schema

_FIRST_BYTES: Final = 64 * 1024
_PENDING_BYTES: Final = 128 * 1024
_OFFSET_BYTES: Final = 8
_MOST_FITTING: Final = 16  # schemas of samples that need not be checked again
_AT_ONCE_BYTES: Final = 256 * 1024  # copied without releasing the GIL: getting it back may take longer

ALIKE: Final = 8  # so many samples of one process decide, if none of any process differs
ALIKE_S: Final = 0.5  # or all samples that have come by then
MIXED: Final = 32  # samples of all processes, if some differ
MIXED_S: Final = 3.0


class _GrowingBytes:
    """A buffer that grows at the end.

    `clear` keeps its memory, so that only the first shard pays page faults.
    """

    def __init__(self) -> None:
        self._data = np.empty(_FIRST_BYTES, np.uint8)
        self._stop = 0
        # Small values, which are joined before they are copied: a copy of each costs more than its bytes.
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @property
    def size(self) -> int:
        return self._stop + self._pending_bytes

    def append(self, data: BytesLike) -> None:
        if not isinstance(data, bytes) or len(data) > SMALL_BYTES:
            self._join_pending()
            self._copy(data)
        else:
            self._pending.append(data)
            self._pending_bytes += len(data)
            if self._pending_bytes > _PENDING_BYTES:
                self._join_pending()

    def _join_pending(self) -> None:
        if self._pending:
            self._copy(b"".join(self._pending))  # may raise MemoryError
            self._pending.clear()
            self._pending_bytes = 0

    def _copy(self, data: BytesLike) -> None:
        stop = self._stop + len(data)
        if stop > len(self._data):
            grown = np.empty(max(stop, 2 * len(self._data)), np.uint8)
            grown[: self._stop] = self._data[: self._stop]
            self._data = grown
        if len(data) <= _AT_ONCE_BYTES:
            self._data.data[self._stop : stop] = data if isinstance(data, bytes) else data.data
        else:
            self._data[self._stop : stop] = np.frombuffer(data, np.uint8)
        self._stop = stop

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes, which are whole values."""
        while self._pending and self.size > size:
            self._pending_bytes -= len(self._pending.pop())
        self._stop = min(self._stop, size)

    def clear(self) -> None:
        self._stop = self._pending_bytes = 0
        self._pending.clear()

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        self._join_pending()
        return self._data[: self._stop]


class _ColumnBuilder:
    """One field of the open shard: its values, and the run lengths of their sizes and shapes."""

    def __init__(self) -> None:
        self._data = _GrowingBytes()
        # The size in bytes and the shape of values that follow one another, and the number of such values.
        self._runs: list[tuple[int, tuple[int, ...]]] = []
        self._counts: list[int] = []

    def append(self, value: BytesLike, shape: tuple[int, ...]) -> None:
        self._data.append(value)
        self._count((len(value), shape), 1)

    def extend(self, values: npt.NDArray[np.uint8] | Sequence[bytes], shape: tuple[int, ...]) -> None:
        """Append many: values of one shape, contiguous uint8 `[count, nbytes]`, or strings of bytes."""
        if isinstance(values, np.ndarray):
            self._data.append(values.reshape(-1))
            self._count((values.shape[1], shape), len(values))
            return
        for value in values:
            self._data.append(value)
        for nbytes, alike in itertools.groupby(map(len, values)):
            self._count((nbytes, shape), sum(1 for _ in alike))

    def _count(self, run: tuple[int, tuple[int, ...]], count: int) -> None:
        if self._runs and self._runs[-1] == run:
            self._counts[-1] += count
        else:
            self._runs.append(run)
            self._counts.append(count)

    def cut(self, count: int) -> None:
        """Keep the first `count` values."""
        sizes, left = 0, count
        for i, ((nbytes, _), alike) in enumerate(zip(self._runs, self._counts, strict=False)):
            self._counts[i] = min(alike, left)
            sizes += nbytes * self._counts[i]
            left -= self._counts[i]
        while self._counts and not self._counts[-1]:
            self._counts.pop()
        del self._runs[len(self._counts) :]
        self._data.cut(sizes)

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return self._data.view

    def clear(self) -> None:
        self._data.clear()
        self._runs.clear()
        self._counts.clear()

    def columns(self, field: Field) -> list[ColumnData]:
        """The columns of the field; one column `[N, ...]` if all its values have one shape."""
        dtype, _ = storage_of(field.dtype)
        data = self._data.view
        if field.shape is not None:
            shape = stored_shape(field.dtype, field.shape)
            return [ColumnData(field.name, dtype, (sum(self._counts), *shape), data)]
        width = item_bytes(field.dtype)
        sizes = np.repeat(np.array([nbytes for nbytes, _ in self._runs], np.int64), self._counts)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes // width, out=offsets[1:])
        columns = [
            ColumnData(field.name, dtype, (len(data) // width,), data),
            _integers(f"{field.name}#offsets", offsets),
        ]
        if field.kind == "tensor":
            shapes = np.array([shape for _, shape in self._runs], np.int64).reshape(-1, field.ndim)
            columns.append(_integers(f"{field.name}#shapes", np.repeat(shapes, self._counts, axis=0)))
        return columns


class Packer:
    """Collects the samples of one shard. Not thread-safe."""

    def __init__(self) -> None:
        self._builders: dict[str, _ColumnBuilder] = {}
        self._keys = _ColumnBuilder()
        self._schema: Schema | None = None
        # By the id of a sample's schema: that of the cache, the sample's, and the latter as the shard takes it.
        self._fitting: dict[int, tuple[Schema | None, Schema, Schema]] = {}
        self._in_order: list[_ColumnBuilder] = []
        self.num_samples = 0
        self.size_bytes = 0

    def take(self, part: Part, known: Schema | None) -> None:
        """Add `part`; raises as `add`."""
        if isinstance(part, Table):
            self.add_table(part, known)
        else:
            self.add(*part, known)

    def add(self, key: str, record: EncodedSample, known: Schema | None) -> None:
        """Add a sample; integers become floats beside floats.

        Raises SchemaMismatchError unless the sample fits the shard and `known`, the schema of the cache.
        After any error, a MemoryError too, the shard holds what it held before.
        """
        name, before = encode_key(key), self._schema
        record = self._fit(record, known)
        try:
            for builder, value, shape in zip(self._in_order, record.values, record.shapes, strict=True):
                builder.append(value, shape)
            self._keys.append(name, ())
        except BaseException:
            self._roll_back(before)
            raise
        self.num_samples += 1
        self.size_bytes += record.nbytes + len(name) + _OFFSET_BYTES

    def add_table(self, table: Table, known: Schema | None) -> None:
        """Add samples that lie in columns; raises as `add`."""
        before = self._schema
        table = self._fit(table, known)
        try:
            for builder, column, field in zip(
                self._in_order, table.columns, table.schema.fields, strict=True
            ):
                builder.extend(column, field.shape or ())
            self._keys.extend(table.keys, ())
        except BaseException:
            self._roll_back(before)
            raise
        self.num_samples += len(table)
        self.size_bytes += table.nbytes + len(table) * _OFFSET_BYTES

    def _roll_back(self, before: Schema | None) -> None:
        """Remove a partly added sample; `before` is the schema of the samples that stay."""
        for builder in (*self._builders.values(), self._keys):
            builder.cut(self.num_samples)
        self._schema = None if before is None else before.with_dtypes(self.schema.dtypes)
        self._fitting.clear()

    def _fit(self, stored: _Stored, known: Schema | None) -> _Stored:
        """Return `stored` with the dtypes of the shard, or raise SchemaMismatchError."""
        given = stored.schema
        fit = self._fitting.get(id(given))
        if fit is None or fit[0] is not known:
            fit = self._merge(given, known)
        return stored if fit[2] is given else stored.converted(fit[2])

    def _merge(self, given: Schema, known: Schema | None) -> tuple[Schema | None, Schema, Schema]:
        """Merge `given` into the schema of the shard, whose numbers of int64 become floats where `given` has
        floats. Where `known` has floats, and the shard does not, numbers of int64 stay as they are.
        """
        schema = given
        if known is not None:
            schema = given.widened(known)
            known.merge(schema)
        # The schema of a shard is that of its own samples: a field whose shape varies in the cache may
        # still have one shape in the shard, and one of floats may have integers alone.
        merged = schema if self._schema is None else self._schema.merge(schema)
        if self._schema is not None and self._schema.dtypes != merged.dtypes:
            self._convert(self._schema, merged)
        for name in schema.names:
            if name not in self._builders:
                self._builders[name] = _ColumnBuilder()
        self._in_order = [self._builders[name] for name in schema.names]
        if merged != self._schema or len(self._fitting) >= _MOST_FITTING:
            self._fitting.clear()
        self._schema = merged
        self._fitting[id(given)] = known, given, given.with_dtypes(merged.dtypes)
        return self._fitting[id(given)]

    def _convert(self, before: Schema, after: Schema) -> None:
        """Convert the numbers of int64 in the shard to float64 where `after` has these."""
        pairs = zip(before.fields, after.fields, strict=True)
        columns = [self._builders[old.name].view for old, new in pairs if old.dtype != new.dtype]
        floats = [column.view("<i8").astype("<f8") for column in columns]  # all memory, before any change
        for column, values in zip(columns, floats, strict=True):
            column.view("<f8")[:] = values

    @property
    def schema(self) -> Schema:
        """The schema of the samples so far."""
        if self._schema is None:
            raise SchemaMismatchError("an empty shard has no schema; add a sample first")
        return self._schema

    def content(self, fill: Mapping[str, Any]) -> ShardContent:
        """The shard so far: views of the packer's buffers, valid until `clear` or the next `add`."""
        columns: list[ColumnData] = []
        for field in self.schema.fields:
            columns.extend(self._builders[field.name].columns(field))
        columns.extend(self._keys.columns(Field(KEY_FIELD, "str", "uint8", 1, None)))
        # Wide elements first: every column then starts at a multiple of its own width.
        columns.sort(key=lambda column: -_width(column.dtype))
        return ShardContent(self.schema, self.num_samples, tuple(columns), fill)

    def clear(self) -> None:
        """Start the next shard."""
        for builder in (*self._builders.values(), self._keys):
            builder.clear()
        self._schema = None
        self._fitting.clear()
        self.num_samples = 0
        self.size_bytes = 0


def _integers(name: str, values: npt.NDArray[np.int64]) -> ColumnData:
    data = np.ascontiguousarray(values, "<i8")
    return ColumnData(name, "I64", data.shape, data.reshape(-1).view(np.uint8))


def _width(dtype: str) -> int:
    digits = "".join(ch for ch in dtype if ch.isdigit())
    return int(digits) // 8 if digits else 1


def encode_key(key: str) -> bytes:
    """The bytes of a key as shards store them."""
    return key.encode("utf-8", "surrogatepass")


def decode_key(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


def keys_of(part: Part) -> list[str]:
    """The keys of the samples in `part`."""
    if isinstance(part, Table):
        return list(map(decode_key, part.keys))
    return [part[0]]


@dataclass(slots=True)
class FirstSamples:
    """The samples that a process has held back since `since_s`, in their order, and their `votes`.

    `others`: the votes of the other processes; None until they have been read.
    """

    parts: list[Part] = dataclasses.field(default_factory=list)
    votes: Votes = dataclasses.field(default_factory=list)
    others: Votes | None = None
    nbytes: int = 0
    since_s: float = 0.0

    def add(self, part: Part, now_s: float) -> None:
        """Hold `part` back, too."""
        shown, count = (part, len(part)) if isinstance(part, Table) else (part[1], 1)
        self.since_s = self.since_s if self.parts else now_s
        self.parts.append(part)
        self.nbytes += shown.nbytes
        self.votes = counted(self.votes, [(shown.schema, count)])

    @property
    def all_votes(self) -> Votes:
        """The known votes of all processes."""
        return counted(self.votes, self.others or [])

    def due_in_s(self, now_s: float, most_bytes: int) -> float:
        """The time left until the next step: to ask for the votes of the others, then to decide.

        0 if the step is due: there are enough votes, or more than `most_bytes` are held back.
        """
        if not self.parts or self.nbytes >= most_bytes:
            return 0.0
        votes = self.all_votes
        count = sum(each for _, each in votes)
        if self.others is None:
            return 0.0 if count >= ALIKE else max(0.0, self.since_s + ALIKE_S - now_s)
        if len(votes) <= 1 or count >= MIXED:
            return 0.0
        return max(0.0, self.since_s + MIXED_S - now_s)


def majority(votes: Votes) -> Schema | None:
    """The schema with the most votes, the first one in a tie; None without votes."""
    return max(votes, key=lambda vote: vote[1])[0] if votes else None


def counted(votes: Votes, more: Votes) -> Votes:
    """Add `more` to `votes`; schemas that can be merged are counted as one."""
    found = list(votes)
    for schema, count in more:
        for i, (known, before) in enumerate(found):
            try:
                found[i] = known.merge(schema, widen=True), before + count
            except SchemaMismatchError:
                continue
            break
        else:
            found.append((schema, count))
    return found
