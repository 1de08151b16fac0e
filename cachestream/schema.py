"""The frozen values that pass between the layers: fields, schemas, shards, snapshots, the held-out split.

A sample is held out if the xxh3 hash (64 bits, seed 0) of its key's UTF-8 is below `holdout` times 2**64. So
its split is the same on every run, node and resume, whatever is cached.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.config import check_share
from cachestream.errors import ConfigError, SchemaMismatchError

SplitName = Literal["train", "held-out"]
Hashes = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.int64]

# The samples of its spans that a shard holds: all, or those of one split.
WHOLE: Final = 0
TRAIN: Final = 1
HELD_OUT: Final = 2


@dataclass(frozen=True, slots=True)
class Split:
    """A split of a cache, "train" or "held-out", where the share `holdout` of the samples is held out."""

    name: SplitName
    holdout: float

    @property
    def held_out(self) -> bool:
        return self.name == "held-out"

    def rows(self, hashes: Hashes) -> IntArray:
        """The rows of this split in a shard whose keys have the `hashes`: int64 `[n]`, ascending."""
        return np.flatnonzero((hashes < np.uint64(_hash_bound(self.holdout))) == self.held_out)


def is_held_out(key: bytes, holdout: float) -> bool:
    """Return whether the sample with this key (UTF-8) is held out."""
    return xxhash.xxh3_64_intdigest(key) < _hash_bound(holdout)


def _hash_bound(holdout: float) -> int:
    return int(holdout * 2.0**64)


def check_holdout(holdout: object) -> float:
    """`holdout`, a share above 0 and below 1; raises ConfigError for another value."""
    check_share("holdout", holdout)
    share = float(holdout)  # type: ignore[arg-type]
    if not _hash_bound(share):
        raise ConfigError(f"holdout={holdout!r} holds nothing out: give a share above 0, such as 0.05")
    return share


def check_split(split: object) -> SplitName:
    """`split`, if it is the name of a split; raises ConfigError otherwise."""
    if split == "train":
        return "train"
    if split == "held-out":
        return "held-out"
    raise ConfigError(
        f"split={split!r}: give 'train' or 'held-out'; a set whose splits are folders is opened by its folder"
    )


FieldKind = Literal["tensor", "str", "bytes"]
Container = Literal["dict", "tuple", "bare"]

KEY_FIELD: Final = "__key__"


STORAGE: Final[dict[str, tuple[str, np.dtype[Any]]]] = {
    "bool": ("BOOL", np.dtype("?")),
    "uint8": ("U8", np.dtype("<u1")),
    "int8": ("I8", np.dtype("<i1")),
    "int16": ("I16", np.dtype("<i2")),
    "uint16": ("U16", np.dtype("<u2")),
    "float16": ("F16", np.dtype("<f2")),
    "bfloat16": ("BF16", np.dtype("<u2")),
    "int32": ("I32", np.dtype("<i4")),
    "uint32": ("U32", np.dtype("<u4")),
    "float32": ("F32", np.dtype("<f4")),
    "int64": ("I64", np.dtype("<i8")),
    "uint64": ("U64", np.dtype("<u8")),
    "float64": ("F64", np.dtype("<f8")),
    "complex64": ("C64", np.dtype("<c8")),
    "complex128": ("F64", np.dtype("<f8")),  # safetensors has no C128: a trailing axis of 2
}

# The values of bfloat16 outside of torch: `array["bfloat16"]` has their bits.
BFLOAT16: Final = np.dtype([("bfloat16", "<u2")])


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a sample.

    `dtype` is the name of a torch dtype ("float32", "bfloat16", "complex64", "bool", …; "uint8"
    for str and bytes). `shape` is the shape of one sample's tensor, or None where it varies
    between samples (then all have `ndim` dimensions), and for str and bytes.
    """

    name: str
    kind: FieldKind
    dtype: str
    ndim: int
    shape: tuple[int, ...] | None

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype that carries the values: bfloat16 travels as the bits of uint16."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample's value; 0 if its shape varies."""
        return 0 if self.shape is None else math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def is_empty(self) -> bool:
        """True for an array without elements. Its dtype says nothing: `[]` makes one of floats."""
        return self.shape is not None and 0 in self.shape

    def merge(self, other: Field, *, widen: bool = False) -> Field:
        """The field that covers both: one number of int64 and one of float64 become float64.

        With `widen`, integers of any shape take the other's dtype of floats, and an array without elements
        takes any dtype of the other. Raises SchemaMismatchError if there is no such field.
        """
        pairs = (self, other), (other, self)
        for narrow, wide in reversed(pairs) if other.is_empty else pairs:
            if narrow.is_read_as(wide) or (widen and narrow.is_widened_to(wide)):
                return replace(narrow, dtype=wide.dtype).merge(wide)
        if (self.kind, self.dtype, self.ndim) != (other.kind, other.dtype, other.ndim):
            raise SchemaMismatchError(f"field '{self.name}': {self} in the cache, {other} in the sample")
        return self if self.shape == other.shape else replace(self, shape=None)

    def is_read_as(self, other: Field) -> bool:
        """Return whether this field holds a number of int64, and `other` one of float64.

        One cache may hold shards of both: readers convert the integers.
        """
        return (self.dtype, other.dtype, self.ndim, other.ndim) == ("int64", "float64", 0, 0)

    def is_widened_to(self, other: Field) -> bool:
        """Return whether this field holds integers where `other` holds floats, or is empty; of one `ndim`."""
        return (self.kind, self.ndim) == (other.kind, other.ndim) and (
            (self.dtype.startswith(("int", "uint")) and other.dtype in ("float32", "float64"))
            or self.is_empty
        )

    def __str__(self) -> str:
        if self.kind != "tensor":
            return self.kind
        shape = ", ".join(map(str, self.shape)) if self.shape is not None else ", ".join("?" * self.ndim)
        return f"{self.dtype}[{shape}]"


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of a sample, sorted by name ("0", "1", … by number), and their container.

    `container` is the type of a sample in a batch: a dict, a tuple of the fields
    "0", "1", …, or the bare value of the only field "0".
    """

    fields: tuple[Field, ...]
    container: Container = "dict"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(field.dtype for field in self.fields)

    def merge(self, other: Schema, *, widen: bool = False) -> Schema:
        """The schema that covers both: a shape that differs becomes ragged, and dtypes as `Field.merge` says.

        Raises SchemaMismatchError for other fields, dtypes, numbers of dimensions or containers.
        """
        if self == other:
            return self
        if (self.names, self.container) != (other.names, other.container):
            raise SchemaMismatchError(
                f"fields differ: the cache holds {self.container} {list(self.names)}, "
                f"the sample has {other.container} {list(other.names)}"
            )
        return Schema(
            tuple(
                mine.merge(theirs, widen=widen)
                for mine, theirs in zip(self.fields, other.fields, strict=True)
            ),
            self.container,
        )

    def widened(self, wanted: Schema) -> Schema:
        """The schema with floats for integers where `wanted` has floats, unless readers convert these.

        An array without elements takes the dtype in `wanted`.
        """
        if self.names != wanted.names:
            return self
        pairs = zip(self.fields, wanted.fields, strict=True)
        return self.with_dtypes(
            theirs.dtype if mine.is_widened_to(theirs) and not mine.is_read_as(theirs) else mine.dtype
            for mine, theirs in pairs
        )

    def with_dtypes(self, dtypes: Iterable[str]) -> Schema:
        """The schema with other dtypes; itself if they are its own."""
        pairs = list(zip(self.fields, dtypes, strict=True))
        if all(field.dtype == dtype for field, dtype in pairs):
            return self
        return Schema(tuple(replace(field, dtype=dtype) for field, dtype in pairs), self.container)

    def with_shapes(self, found: Iterable[Sequence[tuple[int, ...] | None]]) -> Schema:
        """The schema of samples whose fields have the shapes `found`: a shape that differs is ragged."""
        common = (shapes[0] if len(set(shapes)) == 1 else None for shapes in zip(*found, strict=True))
        pairs = zip(self.fields, common, strict=True)
        return Schema(tuple(replace(field, shape=shape) for field, shape in pairs), self.container)

    def only(self, names: Iterable[str], asked: str = "fields") -> Schema:
        """The fields `names`, in this order. Raises ConfigError about `asked` for a name that is no field."""
        fields = {field.name: field for field in self.fields}
        for name in names:
            if name not in fields:
                raise ConfigError(f"{asked} names {name!r}, and the samples have {list(fields)}")
        return Schema(tuple(fields[name] for name in names), self.container)

    def to_json(self) -> str:
        return json.dumps(
            {
                "container": self.container,
                "fields": [
                    {"name": f.name, "kind": f.kind, "dtype": f.dtype, "ndim": f.ndim, "shape": f.shape}
                    for f in self.fields
                ],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Schema:
        raw: dict[str, Any] = json.loads(text)
        return cls(
            tuple(
                Field(
                    f["name"],
                    f["kind"],
                    f["dtype"],
                    f["ndim"],
                    None if f["shape"] is None else tuple(f["shape"]),
                )
                for f in raw["fields"]
            ),
            raw["container"],
        )

    def __str__(self) -> str:
        return "{" + ", ".join(f"{f.name}: {f}" for f in self.fields) + "}"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A run of samples of one pass over the remote, from (position, offset) up to, not with, another.

    A position is a unit's place in the pass's order; an offset counts samples within the unit.
    """

    start: tuple[int, int]
    stop: tuple[int, int]


def spans_of(rows: Iterable[Sequence[int]]) -> tuple[Span, ...]:
    """The spans of `rows`: the position and the offset of the start, and those of the stop."""
    return tuple(Span((int(a), int(b)), (int(c), int(d))) for a, b, c, d in rows)


def span_array(spans: Iterable[Span]) -> IntArray:
    """The rows of `spans_of`, int64 `[n, 4]`."""
    return np.array([[*span.start, *span.stop] for span in spans], np.int64).reshape(-1, 4)


@dataclass(frozen=True, slots=True)
class ShardRow:
    """A published shard as eviction policies see it.

    `size_bytes` is what the file occupies on disk; `uses` counts the epochs of training that had it;
    `last_used` is the logical time (a counter of snapshots, not a clock) of its last use, or of
    its arrival.
    """

    id: int
    size_bytes: int
    num_samples: int
    uses: int
    last_used: int


def holds_integers_of(value: Any, array: npt.NDArray[Any]) -> bool:
    """Return whether `array`, made of the list `value`, holds all integers in it exactly.

    Beside floats, and beside unsigned ones, integers become floats, which are exact up to 2**53.
    """
    if array.dtype != np.float64 or not (np.abs(array) >= 2.0**53).any():
        return True
    if isinstance(value, list | tuple):
        return all(holds_integers_of(item, array) for item in value)
    return not isinstance(value, int | np.integer) or int(float(value)) == int(value)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A frozen set of shards that one epoch is drawn from, leased for as long as it is held.

    `shard_ids` and `counts` (samples in each) are int64 `[num_shards]`, in order of arrival. With a `split`,
    `counts` are of its samples alone, and `sizes` (int64 `[num_shards]`) of all samples in the shards. With a
    condition, too; then `rows` (int64 `[num_samples]`) has the row of each sample in its shard.
    """

    cache_id: str
    root: str
    lease: str
    schema: Schema
    shard_ids: IntArray
    counts: IntArray
    split: Split | None = None
    sizes: IntArray | None = None
    rows: IntArray | None = None

    @property
    def num_samples(self) -> int:
        return int(self.counts.sum())

    @property
    def num_shards(self) -> int:
        return len(self.shard_ids)
