"""Samples as sources and transforms give them, and as shards store them: fields of one dtype."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import SampleError, SchemaMismatchError
from cachestream.schema import BFLOAT16, STORAGE, Container, Field, FieldKind, Schema, holds_integers_of
from cachestream.sources.base import Rows

BytesLike = bytes | npt.NDArray[np.uint8]

SMALL_BYTES: Final = 4096  # copied at once: bytes cost less to make and to free than arrays
MOST_SAMPLES: Final = 64  # of a chunk
MOST_BYTES: Final = 256 * 1024
LONGEST_S: Final = 0.01  # shorter than this, threads that wait for the interpreter would send single samples
_NUMBERS: Final = (np.generic, int, float)
_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes})
_SCHEMAS: Final = 4096  # cached, for fields whose shape varies from sample to sample


Column = npt.NDArray[np.uint8] | Sequence[BytesLike]


@dataclass(slots=True, eq=False)  # not frozen: that takes twice as long to make, and most are single samples
class Table:
    """Samples of one schema, column by column, as shards store them; often a single sample.

    `columns[i]`: field i of all samples, uint8 `[n, nbytes]`, or the bytes of each, which may be uint8 arrays
    `[nbytes]` that share the memory of the sample.
    """

    schema: Schema
    keys: Sequence[bytes]
    columns: tuple[Column, ...]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """The size of all values and keys."""
        if len(self.keys) == 1:
            return len(self.keys[0]) + sum([len(column[0]) for column in self.columns])
        nbytes = sum(map(len, self.keys))
        for column in self.columns:
            nbytes += column.nbytes if isinstance(column, np.ndarray) else sum(map(len, column))
        return nbytes

    def cut(self, start: int, stop: int) -> Table:
        """The samples `start` to `stop`."""
        return Table(self.schema, self.keys[start:stop], tuple(column[start:stop] for column in self.columns))

    def take(self, indices: Sequence[int]) -> Table:
        """The samples at `indices`."""
        columns = [
            column[np.asarray(indices, np.int64)]
            if isinstance(column, np.ndarray)
            else [column[i] for i in indices]
            for column in self.columns
        ]
        return Table(self.schema, [self.keys[i] for i in indices], tuple(columns))

    def converted(self, schema: Schema) -> Table:
        """The samples as of `schema`, which has floats in place of integers.

        Raises SchemaMismatchError for integers that the floats do not hold exactly.
        """
        columns = list(self.columns)
        for i, (old, new) in enumerate(zip(self.schema.fields, schema.fields, strict=True)):
            if old.dtype != new.dtype:
                data = np.frombuffer(joined(columns[i]), np.uint8).reshape(len(self), -1)
                numbers = data.view(np.dtype(old.dtype).newbyteorder("<"))
                floats = numbers.astype(np.dtype(new.dtype).newbyteorder("<"))
                with np.errstate(invalid="ignore"):
                    if (
                        old.dtype.startswith(("int", "uint"))
                        and (floats.astype(numbers.dtype) != numbers).any()
                    ):
                        raise SchemaMismatchError(
                            f"field '{old.name}': {new.dtype} in the cache, and the sample has integers of "
                            f"{old.dtype} that no {new.dtype} holds exactly"
                        )
                columns[i] = floats.view(np.uint8)
        return Table(schema, self.keys, tuple(columns))


def joined(column: Column) -> BytesLike:
    """The values of `column` one after the other."""
    if isinstance(column, np.ndarray):
        return column.reshape(-1)
    if len(column) == 1:
        return column[0]
    return b"".join(column)  # type: ignore[arg-type]  # arrays are buffers, too


def encode_key(key: str) -> bytes:
    """The bytes of a key as shards store them."""
    return key.encode("utf-8", "surrogatepass")


def encode_keys(keys: Sequence[str]) -> list[bytes]:
    """The bytes of each key. Raises TypeError unless all are str."""
    # In one string, as a call for each takes five times as long.
    found = "\0".join(keys).encode("utf-8", "surrogatepass").split(b"\0")
    return found if len(found) == len(keys) else list(map(encode_key, keys))


def decode_key(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


# A kind, a torch dtype, the shape of a tensor, and the bytes.
_Value = tuple[FieldKind, str, tuple[int, ...], BytesLike]


def to_record(sample: Any, key: str = "") -> Table:
    """`sample`, a mapping, a tuple (fields "0", "1", …) or a bare value (field "0"), as a table of one row.

    Raises SampleError that names the field for a value that is no array, tensor, number, bool, str or
    bytes.
    """
    container, names, items = _items(sample)
    found = [_value(name, items[name]) for name in names]
    kinds, dtypes, shapes, values = zip(*found, strict=True)
    columns = tuple([(value,) for value in values])
    return Table(_schema(container, names, kinds, dtypes, shapes), (encode_key(key),), columns)


@functools.lru_cache(maxsize=_SCHEMAS)
def _schema(
    container: Container,
    names: tuple[str, ...],
    kinds: tuple[FieldKind, ...],
    dtypes: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
) -> Schema:
    """The schema of a sample; equal samples share one object, which is compared by identity first."""
    fields = [
        Field(name, kind, dtype, len(shape), shape) if kind == "tensor" else Field(name, kind, dtype, 1, None)
        for name, kind, dtype, shape in zip(names, kinds, dtypes, shapes, strict=True)
    ]
    return Schema(tuple(fields), container)


def _items(sample: Any) -> tuple[Container, tuple[str, ...], Mapping[str, Any]]:
    """The container of a sample, the names of its fields in schema order, and the fields."""
    if isinstance(sample, Mapping):
        return "dict", sorted_names(tuple(sample)), sample
    if isinstance(sample, tuple | list):
        if not sample:
            raise SampleError("the sample is an empty tuple")
        items = {str(i): value for i, value in enumerate(sample)}
        return "tuple", tuple(items), items
    return "bare", ("0",), {"0": sample}


@functools.lru_cache(maxsize=_SCHEMAS, typed=True)
def sorted_names(names: tuple[Any, ...]) -> tuple[str, ...]:
    """The sorted names of the fields of a dict; raises SampleError for an invalid name."""
    if not names:
        raise SampleError("the sample has no fields")
    for name in names:
        if not isinstance(name, str) or not name or "#" in name or name.startswith("__"):
            raise SampleError(
                f"field {name!r}: names are non-empty str, without '#' and not beginning with '__'"
            )
    return tuple(sorted(names))


def _value(name: str, value: Any) -> _Value:
    if isinstance(value, np.ndarray):
        return _array(name, value)
    if isinstance(value, str):
        return "str", "uint8", (), value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return "bytes", "uint8", (), value
    if isinstance(value, _NUMBERS):  # np.str_ and np.bytes_ are str and bytes: handled above
        return _array(name, value)
    if isinstance(value, bytearray) or (isinstance(value, memoryview) and value.format in ("B", "b", "c")):
        return "bytes", "uint8", (), bytes(value)
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return _tensor(name, value)
    if value is None or isinstance(value, Mapping | set | frozenset) or callable(value):
        raise SampleError(
            f"field '{name}' is {_describe(value)}: store arrays, tensors, numbers, bools, str or bytes"
        )
    return _array(name, value)


def _tensor(name: str, tensor: Any) -> _Value:
    if str(tensor.layout) != "torch.strided":
        raise SampleError(f"field '{name}' is a sparse tensor: call .to_dense() on it in the transform")
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if dtype == "bfloat16":  # numpy has no such type: its bits travel as uint16
            bits = dense.view(sys.modules["torch"].uint16).numpy()
            return "tensor", dtype, tuple(dense.shape), _bytes_of(bits)
        return _array(name, dense.numpy())
    except (RuntimeError, TypeError) as error:
        raise SampleError(f"field '{name}' is a tensor that cannot be stored ({error})") from error


def _array(name: str, value: Any) -> _Value:
    if type(value) is not np.ndarray and (loss := _loss(value)):
        raise SampleError(f"field '{name}' is {_describe(value)} {loss}")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # the last one is torch's
        raise SampleError(f"field '{name}' is {_describe(value)} that makes no array ({error})") from error
    if isinstance(value, list | tuple) and not holds_integers_of(value, array):
        raise SampleError(
            f"field '{name}' is {_describe(value)} of integers that no float64 holds exactly: store them as "
            "an array of int64 or uint64"
        )
    dtype = torch_name(array.dtype)
    if dtype is None:
        raise SampleError(
            f"field '{name}' is {_describe(value)} of dtype {array.dtype}: store numbers, bools, str or bytes"
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.nbytes <= SMALL_BYTES:
        return "tensor", dtype, array.shape, array.tobytes()
    return "tensor", dtype, array.shape, _bytes_of(np.ascontiguousarray(array))


def _loss(value: Any) -> str:
    """The part of `value` that an array of its numbers would lack, and the remedy; "" if there is none."""
    if isinstance(value, _NUMBERS):
        return ""
    if isinstance(value, list | tuple):
        if {*map(type, value)} <= _PLAIN:
            return ""
        return next((loss for item in value if (loss := _loss(item))), "")
    kind = type(value)
    if isinstance(value, np.ma.MaskedArray):
        masked = np.ma.is_masked(value)
        return "with a mask: store .filled(…), and .mask as a field of its own" if masked else ""
    if hasattr(kind, "columns") or hasattr(kind, "column_names"):
        return "with named columns: store a dict of them"
    unit = next((str(getattr(value, name)) for name in ("unit", "units") if hasattr(kind, name)), "")
    if unit not in ("", "None", "dimensionless"):
        return f"with the unit {unit}: store the numbers alone, in one unit"
    count = getattr(value, "null_count", 0)  # of pyarrow, a method in polars
    is_extension = hasattr(value, "isna") and not isinstance(getattr(value, "dtype", None), np.dtype)
    if (count() if callable(count) else count) or (is_extension and value.isna().any()):
        return "with nulls: fill them with a number, or store where they are as a field of its own"
    return ""


@functools.lru_cache(maxsize=_SCHEMAS)
def torch_name(dtype: np.dtype[Any]) -> str | None:
    """The torch dtype as which numbers of `dtype`, in any byte order, are stored; None if there is none."""
    if dtype == BFLOAT16:
        return "bfloat16"
    is_stored = dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    return dtype.name if is_stored else None


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _describe(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a shard of a value of torch dtype `dtype`: complex128 gets a trailing axis of 2."""
    return (*shape, 2) if dtype == "complex128" else shape


def item_bytes(dtype: str) -> int:
    """Bytes of one stored element of torch dtype `dtype`."""
    return STORAGE[dtype][1].itemsize


def to_table(rows: Rows) -> Table:
    """Encode `rows`. Raises SampleError that names the field for values that cannot be stored."""
    names = sorted_names(tuple(rows.fields))
    found = [_column(name, rows.fields[name], len(rows.keys)) for name in names]
    try:
        keys = encode_keys(rows.keys)
    except TypeError:
        raise SampleError("a key of its rows is no str") from None
    fields, columns = zip(*found, strict=True)
    return Table(Schema(fields), keys, columns)


def _column(
    name: str, values: npt.NDArray[Any] | Sequence[str] | Sequence[bytes], count: int
) -> tuple[Field, Column]:
    if len(values) != count:
        raise SampleError(f"field '{name}' has {len(values)} values for {count} keys")
    if not isinstance(values, np.ndarray):
        if all(isinstance(value, str) for value in values):
            return Field(name, "str", "uint8", 1, None), encode_keys(values)  # type: ignore[arg-type]
        if all(isinstance(value, bytes) for value in values):
            return Field(name, "bytes", "uint8", 1, None), list(values)  # type: ignore[arg-type]
        raise SampleError(f"field '{name}': rows hold arrays, or lists of str alone or bytes alone")
    if type(values) is not np.ndarray and (loss := _loss(values)):
        raise SampleError(f"field '{name}' is {_describe(values)} {loss}")
    dtype = torch_name(values.dtype)
    if dtype is None:
        raise SampleError(f"field '{name}' is an array of dtype {values.dtype}: store numbers or bools")
    shape = values.shape[1:]
    stored = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    data = stored.reshape(-1).view(np.uint8)
    return Field(name, "tensor", dtype, len(shape), shape), data.reshape(count, len(data) // max(1, count))


@dataclass(frozen=True, slots=True, eq=False)
class SampleChunk:
    """Samples of one unit, in its order: `samples[i]` is at `offsets[i]` in the unit, with the key `keys[i]`.

    A Table has keys of its own, and `keys` is empty. The samples take about `nbytes` of memory.
    """

    offsets: Sequence[int]
    keys: Sequence[str]
    samples: Sequence[Any] | Table
    nbytes: int


def in_columns(chunk: SampleChunk) -> SampleChunk:
    """Return `chunk` with its samples in a Table, if there are several of one schema that can all be
    stored.
    """
    if isinstance(chunk.samples, Table) or len(chunk.samples) < 2:
        return chunk
    records: list[Table] = []
    try:
        for key, sample in zip(chunk.keys, chunk.samples, strict=True):
            records.append(to_record(sample, key))
            if records[-1].schema is not records[0].schema:
                return chunk
    except Exception:  # noqa: BLE001  sources are user code; each sample is encoded by itself later
        return chunk
    columns = zip(*[record.columns for record in records], strict=True)
    table = Table(
        records[0].schema,
        [record.keys[0] for record in records],
        tuple([[value for (value,) in column] for column in columns]),
    )
    return SampleChunk(chunk.offsets, (), table, chunk.nbytes)


Item = tuple[int, str, Any, int]  # offset, key, sample, bytes


def group_into_chunks(items: Iterator[Item | SampleChunk]) -> Iterator[SampleChunk]:
    """Group `items` into chunks; large or slow items come at once, and items before an error are not lost."""
    waiting: list[Item] = []
    waiting_bytes, since_s = 0, time.monotonic()
    try:
        for item in items:
            if isinstance(item, SampleChunk):
                if waiting:
                    yield _chunk(waiting, waiting_bytes)
                    waiting, waiting_bytes = [], 0
                yield item
                continue
            waiting.append(item)
            waiting_bytes += item[3]
            now_s = time.monotonic()
            if waiting_bytes >= MOST_BYTES or now_s - since_s >= LONGEST_S or len(waiting) >= MOST_SAMPLES:
                yield _chunk(waiting, waiting_bytes)
                waiting, waiting_bytes, since_s = [], 0, now_s
    except GeneratorExit:
        raise
    except BaseException:
        if waiting:
            yield _chunk(waiting, waiting_bytes)
        raise
    if waiting:
        yield _chunk(waiting, waiting_bytes)


def _chunk(items: list[Item], nbytes: int) -> SampleChunk:
    offsets, keys, samples, _ = zip(*items, strict=True)
    return SampleChunk(offsets, keys, samples, nbytes)


def approximate_bytes(value: Any) -> int:
    """Estimate the memory that a sample takes."""
    try:
        nbytes = getattr(value, "nbytes", None)
    except RuntimeError:  # a sparse tensor has none
        nbytes = None
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, Mapping):
        return sum(map(approximate_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(approximate_bytes, value))
    return len(value) if isinstance(value, bytes | str) else sys.getsizeof(value)
