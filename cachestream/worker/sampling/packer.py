"""Samples into the columns of an open shard, in buffers that are reused from shard to shard.

The first samples of an empty cache decide the fields of all others: they are held back until most of them
agree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SchemaMismatchError
from cachestream.schema import STORAGE, Field, Schema
from cachestream.shard_format import KEYS, ColumnData, ShardContent, column_data
from cachestream.worker.sampling.encode import (
    SMALL_BYTES,
    Column,
    Table,
    item_bytes,
    joined,
    stored_shape,
)

Votes = list[tuple[Schema, int]]  # how many samples have which schema

_FIRST_BYTES: Final = 64 * 1024
_OFFSET_BYTES: Final = 8
_MOST_FITTING: Final = 4096  # schemas that need not be checked again: as many as lists have lengths
_AT_ONCE_BYTES: Final = 256 * 1024  # copied without releasing the GIL: getting it back may take longer

ALIKE: Final = 8  # so many samples of one process decide, if none of any process differs
ALIKE_S: Final = 0.5  # or all samples that have come by then
MIXED: Final = 32  # samples of all processes, if some differ
MIXED_S: Final = 3.0


class _ColumnBuilder:
    """One field of the open shard: its values, and the run lengths of their sizes and shapes.

    `clear` keeps the memory, so that only the first shard pays page faults.
    """

    def __init__(self) -> None:
        self._data = np.empty(_FIRST_BYTES, np.uint8)
        self._memory = self._data.data
        self._size = 0
        # The size in bytes and the shape of values that follow one another, and the number of such values.
        self._runs: list[tuple[int, tuple[int, ...]]] = []
        self._counts: list[int] = []

    def append(self, column: Column, shape: tuple[int, ...]) -> int:
        """Append values of one shape; returns their bytes. After a MemoryError the builder is as before."""
        is_single = len(column) == 1 and not isinstance(column, np.ndarray)
        if len(column) > 1 and not isinstance(column, np.ndarray) and len(column[0]) > SMALL_BYTES:
            self._grow(self._size + sum(map(len, column)))  # for all values, before the first is added
            return sum([self.append((value,), shape) for value in column])
        data = column[0] if is_single else joined(column)
        nbytes = len(data)
        stop = self._size + nbytes
        if stop > len(self._memory):
            self._grow(stop)
        if nbytes <= _AT_ONCE_BYTES:
            self._memory[self._size : stop] = data if isinstance(data, bytes) else data.data
        else:
            np.copyto(self._data[self._size : stop], np.frombuffer(data, np.uint8))
        self._size = stop
        if is_single:
            self._count((nbytes, shape), 1)
        elif isinstance(column, np.ndarray):
            self._count((column.shape[1], shape), len(column))
        else:
            for size, alike in itertools.groupby(map(len, column)):
                self._count((size, shape), sum(1 for _ in alike))
        return nbytes

    def _grow(self, nbytes: int) -> None:
        """Have memory for `nbytes` in all."""
        if nbytes > len(self._memory):
            grown = np.empty(max(nbytes, 2 * len(self._data)), np.uint8)
            grown[: self._size] = self.view
            self._data, self._memory = grown, grown.data

    def _count(self, run: tuple[int, tuple[int, ...]], count: int) -> None:
        if self._runs and self._runs[-1] == run:
            self._counts[-1] += count
        else:
            self._runs.append(run)
            self._counts.append(count)

    def cut(self, count: int) -> None:
        """Keep the first `count` values."""
        while (over := sum(self._counts) - count) > 0:
            removed = min(over, self._counts[-1])
            self._size -= removed * self._runs[-1][0]
            self._counts[-1] -= removed
            if not self._counts[-1]:
                self._counts.pop()
                self._runs.pop()

    @property
    def view(self) -> npt.NDArray[np.uint8]:
        return self._data[: self._size]

    def clear(self) -> None:
        self._size = 0
        self._runs.clear()
        self._counts.clear()

    def columns(self, field: Field) -> list[ColumnData]:
        """The columns of the field; one column `[N, ...]` if all its values have one shape."""
        dtype, _ = STORAGE[field.dtype]
        data = self.view
        if field.shape is not None:
            shape = stored_shape(field.dtype, field.shape)
            return [ColumnData(field.name, dtype, (sum(self._counts), *shape), data)]
        width = item_bytes(field.dtype)
        sizes = np.repeat(np.array([nbytes for nbytes, _ in self._runs], np.int64), self._counts)
        offsets = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes // width, out=offsets[1:])
        columns = [
            ColumnData(field.name, dtype, (len(data) // width,), data),
            column_data(f"{field.name}#offsets", "I64", offsets),
        ]
        if field.kind == "tensor":
            shapes = np.array([shape for _, shape in self._runs], np.int64).reshape(-1, field.ndim)
            name, values = f"{field.name}#shapes", np.repeat(shapes, self._counts, axis=0)
            columns.append(column_data(name, "I64", values))
        return columns


@dataclass(frozen=True, slots=True)
class _Fit:
    """Tables of the schema `given` in a shard of the cache `known`: the shard has the schema `merged` with
    them.

    They are `stored` with its dtypes. `builders` and `shapes` are those of their fields and of their keys.
    """

    known: Schema | None
    given: Schema
    stored: Schema
    merged: Schema
    builders: tuple[_ColumnBuilder, ...]
    shapes: tuple[tuple[int, ...], ...]


class Packer:
    """Collects the samples of one shard. Not thread-safe."""

    def __init__(self) -> None:
        self._builders: dict[str, _ColumnBuilder] = {}
        self._keys = _ColumnBuilder()
        self._schema: Schema | None = None
        # By the id of a table's schema.
        self._fitting: dict[int, _Fit] = {}
        self.num_samples = 0
        self.size_bytes = 0

    def add(self, table: Table, known: Schema | None) -> None:
        """Add samples; integers become floats beside floats.

        Raises SchemaMismatchError unless they fit the shard and `known`, the schema of the cache. After any
        error, a MemoryError too, the shard holds what it held before.
        """
        given = table.schema
        fit = self._fitting.get(id(given))
        if fit is None or fit.known is not known:
            fit = self._fit(given, known)
        if fit.stored is not given:
            table = table.converted(fit.stored)
        before, nbytes = self._schema, 0
        if fit.merged is not before:
            self._change_schema(fit.merged)
            self._fitting[id(given)] = fit
        try:
            for builder, column, shape in zip(fit.builders, (*table.columns, table.keys), fit.shapes):  # noqa: B905
                nbytes += builder.append(column, shape)
        except BaseException:
            for builder in fit.builders:
                builder.cut(self.num_samples)
            self._schema = None if before is None else before.with_dtypes(fit.merged.dtypes)
            self._fitting.clear()
            raise
        self.num_samples += len(table.keys)
        self.size_bytes += nbytes + len(table.keys) * _OFFSET_BYTES

    def _fit(self, given: Schema, known: Schema | None) -> _Fit:
        """Fit samples of the schema `given` into the shard, or raise SchemaMismatchError.

        Numbers of int64 in the shard become floats where `given` has floats. Where `known` has floats, and
        the shard does not, numbers of int64 stay as they are.
        """
        schema = given
        if known is not None:
            schema = given.widened(known)
            known.merge(schema)
        # The schema of a shard is that of its own samples: a field whose shape varies in the cache may
        # still have one shape in the shard, and one of floats may have integers alone.
        merged = schema if self._schema is None else self._schema.merge(schema)
        for name in schema.names:
            if name not in self._builders:
                self._builders[name] = _ColumnBuilder()
        builders = *(self._builders[name] for name in schema.names), self._keys
        shapes = *(field.shape or () for field in schema.fields), ()
        if len(self._fitting) >= _MOST_FITTING:
            self._fitting.clear()
        if self._schema is not None and merged == self._schema:
            merged = self._schema
        fit = _Fit(known, given, given.with_dtypes(merged.dtypes), merged, builders, shapes)
        if merged is self._schema:
            self._fitting[id(given)] = fit
        return fit

    def _change_schema(self, schema: Schema) -> None:
        """Convert the numbers of int64 in the shard to float64 where `schema` has these."""
        before = schema if self._schema is None else self._schema
        pairs = zip(before.fields, schema.fields, strict=True)
        columns = [self._builders[old.name].view for old, new in pairs if old.dtype != new.dtype]
        floats = [column.view("<i8").astype("<f8") for column in columns]  # all memory, before any change
        for column, values in zip(columns, floats, strict=True):
            column.view("<f8")[:] = values
        self._schema = schema
        self._fitting.clear()

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
        columns.extend(self._keys.columns(KEYS))
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


def _width(dtype: str) -> int:
    digits = "".join(ch for ch in dtype if ch.isdigit())
    return int(digits) // 8 if digits else 1


@dataclass(slots=True)
class FirstSamples:
    """The samples that a process holds back since `since_s`, in their order, and their `votes`.

    `told`: the votes that the supervisor knows.
    """

    tables: list[Table] = dataclasses.field(default_factory=list)
    votes: Votes = dataclasses.field(default_factory=list)
    told: Votes | None = None
    nbytes: int = 0
    since_s: float = 0.0

    def add(self, table: Table, now_s: float) -> None:
        """Hold `table` back, too."""
        self.since_s = self.since_s if self.tables else now_s
        self.tables.append(table)
        self.nbytes += table.nbytes
        self.votes = counted(self.votes, [(table.schema, len(table))])

    def is_due(self, now_s: float, most_bytes: int) -> bool:
        """True if the supervisor is to hear of the votes: there are enough, or they wait, or are others by
        now.
        """
        if not self.tables or self.votes is self.told:
            return False
        count = sum(each for _, each in self.votes)
        return count >= ALIKE or self.nbytes >= most_bytes or now_s - self.since_s >= ALIKE_S


@dataclass(slots=True)
class Election:
    """The votes of all processes on the fields of a cache: those that most of the first samples have win."""

    votes: dict[int, Votes] = dataclasses.field(default_factory=dict)  # by process
    since_s: float | None = None

    def vote(self, process: int, votes: Votes, now_s: float) -> None:
        """Note the votes of a process, in place of its earlier ones."""
        self.votes[process] = votes
        self.since_s = now_s if self.since_s is None else self.since_s

    def winner(self, now_s: float) -> Schema | None:
        """The schema of the cache; None if it is not decided yet."""
        if self.since_s is None:
            return None
        votes: Votes = []
        for given in self.votes.values():
            votes = counted(votes, given)
        count = sum(each for _, each in votes)
        is_decided = len(votes) == 1 or count >= MIXED or now_s - self.since_s >= MIXED_S
        return majority(votes) if is_decided else None


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
