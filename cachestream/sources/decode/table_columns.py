"""Tables of Parquet and Arrow: the choice of their columns, and the samples in their rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from cachestream.config import check_mapping
from cachestream.errors import ConfigError
from cachestream.sources.base import Item, Rows, Skipped
from cachestream.sources.decode.arrow_columns import (
    Batch,
    Columns,
    Unusable,
    Values,
    is_image_struct,
    is_split,
    load_arrow,
)
from cachestream.sources.decode.images import UNCHANGED, ImageOptions
from cachestream.sources.decode.values import named_decoder
from cachestream.sources.fields import check_columns

_PANDAS_INDEX: Final = re.compile(r"__index_level_\d+__")


@dataclass(frozen=True, slots=True)
class ColumnOptions:
    """The columns to read of tables, and the conversion of their values; see `ParquetSource`.

    `defaults` are those of optional fields; `of_folders` are columns that come from the names of folders
    where the files lack them (see `FolderColumns`). Raises ConfigError for invalid options.
    """

    columns: Sequence[str] | None = None
    decode_images: bool | Sequence[str] = True
    images: ImageOptions = UNCHANGED
    nulls: Mapping[str, Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    of_folders: tuple[str, ...] = ()
    decoders: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_columns(self.columns)
        object.__setattr__(self, "columns", None if self.columns is None else tuple(self.columns))
        check_mapping("nulls", self.nulls, "{'age': -1}")
        check_mapping("decoders", self.decoders, "{'mask': 'index'}")
        for name, wanted in (self.decoders or {}).items():
            named_decoder(name, wanted, self.images)
        if isinstance(self.decode_images, str):
            raise ConfigError(f"decode_images={self.decode_images!r}: give a list of columns, True or False")

    @property
    def identity(self) -> list[str]:
        """The options as parts of a fingerprint, but for `images` and `defaults`."""
        options = {
            "columns": self.columns,
            "nulls": dict(self.nulls) if self.nulls else None,
            "decode_images": self.decode_images,
            "decoders": sorted(self.decoders.items()) if self.decoders else None,
        }
        return [f"{name}={value}" for name, value in options.items() if value not in (None, True)]

    def choose(self, schema: Any, where: str, *, of_parquet: bool = False) -> tuple[Columns, tuple[str, ...]]:
        """Return the converter for the chosen columns of an Arrow schema, and their names.

        `of_parquet`: a name may be that of a member of a struct column, "column.member", and the index of
        pandas is left out. Raises ConfigError for columns that are missing, that become one field, or that
        have no field, and for names in `nulls` or `decode_images` that are no fields.
        """
        arrow, names = load_arrow(), self.columns
        self._check_names(arrow, schema, where)
        if names is None:
            names = [name for name in schema.names if not (of_parquet and _PANDAS_INDEX.fullmatch(name))]
        known = {*schema.names}
        names = [name for name in names if name in known or name not in self.of_folders]
        there = [name for name in names if name in known or (of_parquet and _has_member(arrow, schema, name))]
        for name in names:
            if name not in there and name not in self.defaults:
                raise ConfigError(
                    f"{where}: no column '{name}'; there are {', '.join((*schema.names, *self.of_folders))}"
                )
        # pyarrow reads all columns of Parquet that match a name.
        read = schema if of_parquet else [column for column in schema if column.name in there]
        for name in doubled_fields(arrow, read):
            if any(f"{name}.".startswith(f"{one}.") for one in there):
                raise ConfigError(
                    f"{where}: several columns become the field '{name}': give each a name of its own, "
                    "or choose others with columns=[…]"
                )
        tops = [name if name in known else name.partition(".")[0] for name in there]
        part = arrow.schema([schema.field(top) for top in dict.fromkeys(tops)], metadata=schema.metadata)
        return Columns(arrow, part, self), tuple(there)

    def _check_names(self, arrow: Any, schema: Any, where: str) -> None:
        """Raise ConfigError for a name in an option that no column becomes."""
        fields = [name for one in schema for name in _names_of(arrow, one.name, one.type)]
        fields += self.of_folders
        images = () if isinstance(self.decode_images, bool) else self.decode_images
        given = {"nulls": self.nulls or (), "decode_images": images, "decoders": self.decoders or ()}
        for option, names in given.items():
            for name in names:
                if name not in fields and name not in self.defaults:
                    raise ConfigError(
                        f"{where}: {option}= names '{name}'; the fields are {', '.join(fields)}"
                    )


def same_columns(schema: Any, other: Any) -> bool:
    """Return whether two Arrow schemas have the same columns, with the same features of Hugging Face's."""
    first, second = ((one.metadata or {}).get(b"huggingface") for one in (schema, other))
    return bool(schema.equals(other)) and first == second


def _has_member(arrow: Any, schema: Any, name: str) -> bool:
    """Return whether `name` is a member of a struct column of `schema`, such as "column.member"."""
    top, _, rest = name.partition(".")
    kind = schema.field(top).type if top in schema.names else None
    while kind is not None and rest:
        member, _, rest = rest.partition(".")
        index = kind.get_field_index(member) if arrow.types.is_struct(kind) else -1
        kind = kind.field(index).type if index >= 0 else None
    return kind is not None


def doubled_fields(arrow: Any, schema: Any) -> list[str]:
    """Return the field names that several columns would share: "a.b" beside a struct "a" with a "b", say."""
    counts = Counter(name for one in schema for name in _names_of(arrow, one.name, one.type))
    return [name for name, count in counts.items() if count > 1]


def _names_of(arrow: Any, name: str, kind: Any) -> Iterator[str]:
    if is_split(arrow.types, kind):
        for member in kind.value_type:
            yield from _names_of(arrow, f"{name}.{member.name}", arrow.list_(member.type))
    elif arrow.types.is_struct(kind) and not is_image_struct(arrow.types, kind):
        for member in kind:
            yield from _names_of(arrow, f"{name}.{member.name}", member.type)
    else:
        yield name


def usable_rows(
    fields: Mapping[str, Values], bad: Mapping[int, Unusable], first: int, noun: str = "row"
) -> Iterator[tuple[int, dict[str, Any]] | Skipped]:
    """Yield the number and the sample of each row whose columns are `fields`, in order.

    Rows are numbered from `first`; those that cannot be used are Skipped, as "`noun` 7: …".
    """
    names = tuple(fields)
    for row, values in enumerate(zip(*fields.values(), strict=True)):
        if row in bad:
            yield Skipped(f"{noun} {first + row}: {bad[row].reason}")
        else:
            yield first + row, dict(zip(names, values, strict=True))


def table_rows(batches: Iterator[Batch], first: int) -> Iterator[Item]:
    """Yield the samples of `batches`, as `Rows` where every row of a batch is usable and alike.

    Their names are the numbers of the rows, from `first`.
    """
    for num_rows, fields, bad in batches:
        if not bad and is_uniform(fields):
            numbers: Any = range(first, first + num_rows)
            yield Rows(numbers, fields)
        else:
            yield from usable_rows(fields, bad, first)
        first += num_rows


def is_uniform(fields: Mapping[str, Values]) -> bool:
    """Return whether every field is an array, all str or all bytes, as `Rows` requires."""
    return all(
        isinstance(values, np.ndarray) or {*map(type, values)} in ({str}, {bytes})
        for values in fields.values()
    )
